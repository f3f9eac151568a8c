"""TrainingWeight: base of the weights that training recipes make.

They are parameters with a gradient. `F.linear`, `matmul`, `einsum` and related functions run in the engine
(`engine.contraction`), with the three matmuls that the recipe asks for. `convert()` returns the weight for inference.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...dtypes import AffineQuantizedTensor, Layout, QuantizedTensor, products
from ...dtypes.linear import check_dtype, multiply
from ...kernels.conv import Window, multiply_windows, to_matrix
from ...kernels.registry import from_rows, scale_per_row, to_rows
from ...primitives import LinearSpec, QuantSpec, fake_quant, tracing
from ...primitives.jsonable import HashedOnce, jsonable
from ...primitives.layouts import LAYOUTS
from ...primitives.spec import constant_shape
from ..engine import gemm_spec, operand
from ..engine.contraction import IN_CODES, contraction


@jsonable
class TrainingScheme(HashedOnce):
    """Metadata of a weight in training that has a `TrainingSpec`, or another description with a `linear_spec`. Kernels
    read it as the scheme of the converted weight. `dtype` is that of its gradient and inputs; the `master` of a
    `MasterWeight` may have another one: under mixed precision codes are made of all its bits."""

    training: gemm_spec.TrainingSpec | Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", constant_shape(self.shape))

    @property
    def spec(self) -> LinearSpec | None:
        return self.training.linear_spec

    @property
    def weight(self) -> QuantSpec | None:
        return None if self.spec is None else self.spec.weight

    @property
    def activation(self) -> QuantSpec | None:
        return None if self.spec is None else self.spec.activation

    @property
    def layout(self) -> Layout:
        spec = self.spec
        return LAYOUTS["plain"]() if spec is None or spec.layout is None else spec.layout


class TrainingWeight(QuantizedTensor):
    """Base of the weights in training."""

    trains: ClassVar[bool] = True

    @property
    def training_spec(self) -> gemm_spec.TrainingSpec:
        """How the matmuls of this weight are quantized, the weight being their rhs."""
        return self.scheme.training  # type: ignore[attr-defined]

    def floats(self) -> Tensor:
        """The weight as a plain tensor, not differentiable."""
        raise NotImplementedError

    def convert(self) -> Tensor:
        """The weight for inference."""
        raise NotImplementedError

    def check_convert(self) -> None:
        """Raise `ValueError` if this weight cannot be converted."""

    def linear(self, input: Tensor, bias: Tensor | None, state: operand.ContractionState = operand.STATELESS) -> Tensor:
        """`F.linear`; under tensor parallelism `state` is the `Split` of which this is a part."""
        return from_rows(contraction(to_rows(input), self, self.training_spec, state), input, bias)

    def check_split(self, axis: str, part: int, whole: int) -> None:
        """Raise `ValueError` where a layer whose weight is cut over processes (`engine.split`) could not have the
        numbers of one process: ``"n"``, rows, or ``"k"``, columns, `whole` of them, at most `part` on a process.
        """
        raise ValueError(
            f"a {type(self).__name__} chooses codes and scales anew from whole rows, with noise, at each update; train "
            "with a recipe that keeps weights in floating point, such as int8_mixed_precision_training()"
        )

    def conv(self, input: Tensor, window: Window) -> Tensor:
        matrices = to_matrix(self).chunk(window.groups, 0)
        return multiply_windows(input, window, lambda rows, group: multiply(rows, matrices[group]))  # type: ignore[arg-type]

    def embedding(self, ids: Tensor, **options: Any) -> Tensor:
        """Rows of the weight as the forward quantizes it: the table may be tied to a linear layer."""
        rows = floats_of(self)
        spec = self.training_spec.output.rhs
        if spec is not None and not isinstance(self, IN_CODES):
            rows = fake_quant.straight_through(rows, spec.to_nearest().fake_quantize(rows.detach()))
        return torch.nn.functional.embedding(ids, rows, **options).to(self.dtype)

    @classmethod
    @tracing.starts_no_graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _Floats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: TrainingWeight) -> Tensor:
        return weight.floats().clone()

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def floats_of(weight: Tensor) -> Tensor:
    """A weight, plain or in training, as a plain tensor, differentiable."""
    return tracing.apply(_Floats, weight) if isinstance(weight, TrainingWeight) else weight


def of_codes(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, spec: LinearSpec, dtype: torch.dtype,
    **activation: Tensor | None,
) -> AffineQuantizedTensor:  # fmt: skip
    """The weight for inference of these codes (N, K); a single scale is repeated where `spec` has one for each row."""
    rows = spec.weight.scale_shape(codes.shape)[0]
    scale = scale_per_row(scale, rows).contiguous()
    zero_point = None if zero_point is None else scale_per_row(zero_point, rows).contiguous()
    return AffineQuantizedTensor.from_plain(codes.contiguous(), scale, zero_point, spec, dtype, **activation)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator changes."""
    return [
        kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2:
        raise ValueError(f"einsum with a weight in training takes two operands, got {len(operands)}")
    lhs, rhs = operands
    if not isinstance(rhs, TrainingWeight):
        terms, arrow, result = equation.partition("->")
        first, _, second = terms.partition(",")
        equation, lhs, rhs = f"{second},{first}{arrow}{result}", rhs, lhs
    check_dtype("einsum", lhs, rhs.dtype)

    def product(a: Tensor, b: Tensor) -> Tensor:
        """Of an input and a view of the weight. A sum over an axis of the weight is a plain tensor."""
        return b.linear(a, None) if isinstance(b, TrainingWeight) else contraction(a, b, rhs.training_spec)

    return products.einsum_by(product, equation, lhs, rhs)


def _grad(outputs: Any, inputs: Any, materialize_grads: bool = False, **options: Any) -> Any:
    """`torch.autograd.grad`, with torch functions in force: a checkpoint runs the forward again inside of it."""
    weights = [input for input in inputs if isinstance(input, TrainingWeight)]
    if not all(weight.requires_grad for weight in weights) or any(isinstance(y, TrainingWeight) for y in outputs):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.grad(outputs, inputs, materialize_grads=materialize_grads, **options)
    edge = torch.autograd.graph.get_gradient_edge
    edges = tuple(edge(input) if isinstance(input, TrainingWeight) else input for input in inputs)
    options["allow_unused"] = options.get("allow_unused") or materialize_grads
    grads = torch.autograd.grad(outputs, edges, **options)
    if not materialize_grads:
        return grads
    return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True))


_FUNCTIONS: dict[Any, Any] = {torch.einsum: _einsum, torch.autograd.grad: _grad}
"""Functions beside the products of `dtypes.products`, which call `linear`, and convolutions, which call `conv`."""
