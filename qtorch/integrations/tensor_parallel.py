"""Tensor parallelism of layers that quantize their input while they run.

torch's `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel` take frozen quantized weights as they are. A
row-wise layer has a part of each row of the input on each rank; where one scale is chosen for the whole row, parts of
it would choose other scales than one process does. `RowwiseParallel` of this file chooses the scale of the whole row:

    lowest, highest  <- the extremes of the row over all ranks     (one all-reduce of two numbers a row)
    y                 = sum over ranks of  scale * (codes @ weight codes)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, parallel

from ..dtypes import AffineQuantizedTensor, QuantizedTensor
from ..dtypes.linear import multiply
from ..primitives.granularity import PerTensor

__all__ = ["RowwiseParallel"]


class RowwiseParallel(parallel.RowwiseParallel):
    """`torch.distributed.tensor.parallel.RowwiseParallel`, equal to one process for inputs that are quantized by a
    scale for each row, or one for all. Other layers are those of torch.

    Raises:
        ValueError: the input is quantized in another way that depends on whole rows (NVFP4, whose scales have a scale
            of the whole input; ranges that are not those of the extremes).
    """

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
            self._codes = (weight, _of_codes(weight))
        x = input.to_local()
        group = self._mesh.get_group()
        partial = _Product.apply(x, weight, self._codes[1], group)
        y = DTensor.from_local(partial, self._mesh, [Partial()], run_check=False)
        result: Tensor = y.redistribute(placements=self._layouts)
        return result if module.bias is None else result + module.bias


class _Product(torch.autograd.Function):
    """The part of the product of this rank; the gradient goes straight through the quantization."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, of_codes: Any, group: Any) -> Tensor:
        ctx.weight = weight
        activation = weight.scheme.activation
        rows = input.reshape(-1, input.shape[-1])
        scale, zero_point = activation.choose_qparams(_extremes(rows, group))
        codes = activation.quantize(rows, scale, zero_point)
        if of_codes is None:
            y = multiply(activation.dequantize(codes, scale, zero_point, input.dtype), weight.with_activation(None))
        else:
            y = multiply(codes.to(input.dtype), of_codes) * scale.to(input.dtype)
        return y.reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return multiply(grad_outputs[0], ctx.weight.with_activation(None).t()), None, None, None


def _of_codes(weight: Any) -> Any:
    """The weight for inputs that are codes already, so that the kernel of integers runs; None if codes do not stand for
    multiples of themselves."""
    activation = weight.scheme.activation
    if activation.has_zero_point or not isinstance(weight, AffineQuantizedTensor):
        return None
    one = torch.ones((1, 1), device=weight.device)
    return weight.with_activation(replace(activation, granularity=PerTensor()), act_scale=one)


def _extremes(rows: Tensor, group: Any) -> Tensor:
    """(M, 2): lowest and highest of each row over all ranks, a row that has the range of the whole one."""
    found = torch.stack([rows.amin(1).neg(), rows.amax(1)], 1).float()
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    found[:, 0].neg_()
    return found.to(rows.dtype)


def _check_depends_on_extremes(activation: Any, name: str) -> None:
    rows = torch.linspace(-1, 2, 256).square().reshape(2, 128)
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
