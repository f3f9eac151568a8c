"""Tensor parallelism of layers that quantize their operands while they run: the numbers of one process.

Frozen weights: torch's styles take them as they are. A row-wise layer has a part of each row of the input on each rank;
where one scale is chosen for the whole row, parts of it would choose other scales. `RowwiseParallel` of this file
chooses the scale of the whole row:

    lowest, highest  <- the extremes of the row over all ranks     (one all-reduce of two numbers a row)
    y                 = sum over ranks of  scale * (codes @ weight codes)

Weights in training take the two styles of this file, which choose the scales of all operands of the three products so,
and add up integers before they are scaled (`training.engine.split`).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, parallel

from ..dtypes import AffineQuantizedTensor, QuantizedTensor, dispatch
from ..dtypes.linear import check_dtype, multiply
from ..model.install import PreparedModule
from ..primitives.granularity import PerTensor
from ..training import TrainingWeight
from ..training.engine.split import CUT_HERE, Split, joined_extremes

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _Parallel(parallel.ParallelStyle):
    """What the two styles have in common."""

    axis: ClassVar[int]

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        weight: Any = module.weight
        if isinstance(weight, QuantizedTensor) and weight.trains:
            raise ValueError(
                f"{type(self).__name__}: {module}: an embedding in training is quantized by the whole of its rows; "
                "leave it out of the plan, or train it in floating point"
            )
        super()._partition_embedding_fn(name, module, device_mesh)  # type: ignore[misc]

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        trains = self._check(module, device_mesh)
        CUT_HERE.append(module)
        try:
            super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[misc]
        finally:
            CUT_HERE.pop()
        if trains:
            module.forward = _TrainingForward(module, device_mesh, self.axis)

    def _check(self, module: nn.Module, mesh: Any) -> bool:
        """Whether the weight of a linear layer trains; raise `ValueError` if it does and cannot be cut."""
        weight: Any = module.weight
        trains = isinstance(weight, QuantizedTensor) and weight.trains
        try:
            if isinstance(module, PreparedModule):
                raise ValueError("scales, ranges or a schedule of its own are those of the whole layer, on one process")
            if trains:
                axis, whole, ranks = self.axis, weight.shape[self.axis], mesh.size()
                part = -(-whole // ranks)
                if part * (ranks - 1) >= whole > 0 and ranks > 1:
                    raise ValueError(f"axis {axis} of the weight, {whole}, leaves one of {ranks} ranks without")
                weight.check_split("nk"[axis], part, whole)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {module}: {error}") from None
        return trains


class ColwiseParallel(_Parallel, parallel.ColwiseParallel):
    """`torch.distributed.tensor.parallel.ColwiseParallel`, also for linear layers whose weight is trained in low
    precision by a recipe that keeps it in floating point. Other layers are those of torch.

    Raises:
        ValueError: such a layer could not have the numbers of one process; the error says why.
    """

    axis = 0


class RowwiseParallel(_Parallel, parallel.RowwiseParallel):
    """`torch.distributed.tensor.parallel.RowwiseParallel`, equal to one process for inputs that are quantized by a
    scale for each row, or one for all, and for linear layers as in `ColwiseParallel`. Other layers are those of torch.

    Raises:
        ValueError: the input is quantized in another way that depends on whole rows (NVFP4, whose scales have a scale
            of the whole input; ranges that are not those of the extremes); or as for `ColwiseParallel`.
    """

    axis = 1

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        super()._partition_linear_fn(name, module, device_mesh)
        weight: Any = module.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if not isinstance(local, QuantizedTensor) or local.trains or local.scheme.spec.static:
            return
        activation = local.scheme.activation
        if activation is None or (activation.scale_spec is None and activation.granularity.pattern(2)[1] != -1):
            return  # the parts of a row are quantized one by one
        _check_depends_on_extremes(activation, name)
        module.forward = _Forward(module, device_mesh, self.output_layouts)


def _local(input: Any) -> Tensor:
    """The part of a DTensor on this rank, which kernels can read: a redistribution may still be under way."""
    if isinstance(input._local_tensor, AsyncCollectiveTensor):
        input._local_tensor = input._local_tensor.wait()
    return input.to_local()


class _TrainingForward:
    """The forward, on DTensors, of a linear layer whose weight is trained and cut along an axis."""

    def __init__(self, module: nn.Module, mesh: Any, axis: int) -> None:
        self._module = (module,)
        self._mesh, self._axis = mesh, axis

    def __call__(self, input: DTensor) -> Tensor:
        module: Any = self._module[0]
        split = Split(self._mesh.get_group(), "nk"[self._axis], module.weight.shape[self._axis])
        weight = module.weight.to_local()
        if not isinstance(weight, TrainingWeight):
            raise TypeError(f"{module}: a {type(weight).__name__} is not a weight in training that is cut over ranks")
        x = _local(input)
        check_dtype("linear", x, weight.dtype)
        bias = None if module.bias is None else module.bias.to_local()

        def product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            y = weight.linear(x, None, split)
            return y if bias is None else y + bias

        y = dispatch.cast_for_product(product, x, weight, bias)
        # The rows that this rank has, or all of them, summed already.
        placement = Shard(y.dim() - 1) if self._axis == 0 else Replicate()
        shape = torch.Size((*y.shape[:-1], module.weight.shape[0]))
        stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
        return DTensor.from_local(y, self._mesh, [placement], run_check=False, shape=shape, stride=stride)


class _Forward:
    """The forward of a row-wise linear layer on DTensors."""

    def __init__(self, module: nn.Module, mesh: Any, layouts: Any) -> None:
        # Not an attribute of a module, which would register it again.
        self._module = (module,)
        self._mesh, self._layouts = mesh, layouts
        self._codes: tuple[Any, Any] | None = None

    def __call__(self, input: DTensor) -> Tensor:
        module: Any = self._module[0]
        weight = module.weight.to_local()
        if self._codes is None or self._codes[0] is not weight:
            self._codes = (weight, self._of_codes(weight))
        x = _local(input)
        partial = _Product.apply(x, weight, self._codes[1], self._mesh.get_group())
        y = DTensor.from_local(partial, self._mesh, [Partial()], run_check=False)
        result: Tensor = y.redistribute(placements=self._layouts)
        return result if module.bias is None else result + module.bias

    @staticmethod
    def _of_codes(weight: Any) -> Any:
        """The weight for inputs that are codes already, so that the kernel of integers runs; None if codes do not stand
        for multiples of themselves."""
        activation = weight.scheme.activation
        if activation.has_zero_point or not isinstance(weight, AffineQuantizedTensor):
            return None
        one = torch.ones((1, 1), device=weight.device, dtype=torch.float32)
        return weight.with_activation(replace(activation, granularity=PerTensor()), act_scale=one)


class _Product(torch.autograd.Function):
    """The part of the product of this rank; the gradient goes straight through the quantization."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, of_codes: Any, group: Any) -> Tensor:
        ctx.weight = weight
        activation = weight.scheme.activation
        rows = input.reshape(-1, input.shape[-1])
        # A row of the lowest and the highest over all ranks has the range of the whole row.
        extremes = torch.stack(joined_extremes(rows.amin(1).float(), rows.amax(1).float(), group), 1)
        scale, zero_point = activation.choose_qparams(extremes.to(rows.dtype))
        codes = activation.quantize(rows, scale, zero_point)
        if of_codes is None:
            y = multiply(activation.dequantize(codes, scale, zero_point, input.dtype), weight.with_activation(None))
        else:
            y = multiply(codes.to(input.dtype), of_codes) * scale.to(input.dtype)
        return y.reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return multiply(grad_outputs[0], ctx.weight.with_activation(None).t()), None, None, None


def _check_depends_on_extremes(activation: Any, name: str) -> None:
    rows = torch.linspace(-1, 2, 256, dtype=torch.float32, device="cpu").square().reshape(2, 128)
    if activation.scale_spec is None:
        extremes = torch.stack([rows.amin(1), rows.amax(1)], 1)
        pairs = zip(activation.choose_qparams(rows), activation.choose_qparams(extremes), strict=True)
        if all(a is b or torch.equal(a, b) for a, b in pairs):
            return
    raise ValueError(
        f"RowwiseParallel: the input of {name or 'this layer'} is quantized as {activation}, whose scales depend on "
        "more than the extremes of a row; cut this layer by columns (ColwiseParallel), or take a recipe with a "
        "scale for each row"
    )
