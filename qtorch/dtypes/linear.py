"""`F.linear` with a quantized weight, routed to the kernel registry.

Gradients flow to the input and the bias:

    dL/dx = dL/dy @ dequantize(w)      (straight through the quantization of x)

The weight itself is frozen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu import low_rank
from ..kernels.custom_ops import recording
from ..kernels.registry import Kernel, lookup
from ..primitives import Scheme, tracing
from . import affine_tensor, copying, dispatch, factories, parameter
from .base import QuantizedTensor
from .low_rank_weight import LowRankWeight, add_branch, matrix_beside
from .transposed_weight import PaddedWeight, TransposedWeight, as_view, padded_matrix

# The fast path of layers. All that the full path looks up and checks takes longer than the product of a small layer. So
# a kernel that can be called again with pointers alone sets ``weight.fast_linear`` (fast_grouped, fast_conv), which
# checks what may change between calls: dtype, width and device of the input, the bias, and whether the inner tensors
# were moved or written to. It returns None if the call needs the full path, and is neither copied nor saved.

_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def fast_of(name: str, input: Any, weight: Any) -> Any:
    """The function of this name that the last kernel set on `weight`, or None if this call needs the full path. For
    eager mode only: a compiler traces the full path."""
    fast = getattr(weight, name, None)
    return None if fast is None or recording() or factories.dispatches or others_take_part(input) else fast


def others_take_part(input: Any) -> bool:
    """Whether a call with this input, in eager mode, needs more of torch than the memory of tensors."""
    return bool(
        type(input) is not Tensor
        or input.is_neg()
        or _functorch_is_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state()
        or tracing.modes_active()
    )


def _lookup_constant(op: str, scheme: Scheme, dtype: torch.dtype, device: str) -> Kernel:
    """`lookup`, which a compiler runs while it traces, so that the kernel becomes a constant of the graph."""
    return lookup(op, scheme, dtype, device)


# As torch.compiler.assume_constant_result does; calling it would import the compiler with qtorch, which takes 0.7 s.
_lookup_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_kernel(op: str, scheme: Scheme, dtype: torch.dtype, device: str) -> Kernel:
    """`lookup`, in eager mode and while a compiler traces."""
    find = _lookup_constant if tracing.is_compiling() else lookup
    return find(op, scheme, dtype, device)


@dispatch.implements_function(torch.nn.functional.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a quantized weight (N, K): input (..., K) -> (..., N), in the input's dtype."""
    compiling = tracing.is_compiling()
    if not compiling and (fast_linear := fast_of("fast_linear", input, weight)) is not None:
        if torch.is_grad_enabled() and (input.requires_grad or requires_grad(bias)):
            y = _Linear.apply(input, weight, bias, fast_linear)
        else:
            y = fast_linear(input, weight, bias)
        if y is not None:
            return y
    if not compiling and torch._C._get_tracing_state() is not None:
        tracing.refuse_jit_trace()
    if not isinstance(weight, QuantizedTensor) or isinstance(input, QuantizedTensor):
        raise TypeError(f"linear takes a float input and a quantized weight, got {kinds(input, weight)}")
    shape = weight.scheme.shape
    if len(shape) != 2 or not input.dim() or input.shape[-1] != shape[1]:
        raise ValueError(f"linear: an input of shape {tuple(input.shape)} does not fit a weight of shape {shape}")
    if isinstance(weight, TransposedWeight):  # the sum runs over the rows of the matrix
        y = linear(input, padded_matrix(weight.t()).t() if weight.scheme.padding else as_view(weight))  # type: ignore[arg-type]
        y = y[..., : shape[0]]
        return y if bias is None else y + bias
    if isinstance(weight, PaddedWeight):
        return linear(torch.nn.functional.pad(input, (0, weight.scheme.padding)), padded_matrix(weight), bias)
    if input.dtype is not weight.scheme.dtype:
        check_dtype("linear", input, weight.scheme.dtype)
    check_device("linear", input, weight)
    return dispatch.cast_for_product(multiply, input, weight, bias)


def multiply(input: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of a checked input, which under autocast need not have the dtype of the weight."""
    compiling = tracing.is_compiling()
    if tracing.transforms_active() if compiling else tracing.are_active():
        if weight.trains:
            return tracing.run_whole(multiply, input, weight, bias)
        return _Transformed.apply(input, weight, bias)
    if weight.trains:
        if not compiling:
            weight.check_inner_tensors()
        return weight.linear(input, bias)
    if factories.dispatches and isinstance(weight, affine_tensor.AffineQuantizedTensor):
        for condition, implementation in factories.dispatches.items():
            if condition(input, weight, bias):
                return implementation(input, weight, bias)
    kernel: Callable[..., Tensor] = multiply_with_branch
    if not isinstance(weight, LowRankWeight):
        kernel = find_kernel("linear", weight.scheme, input.dtype, input.device.type)
        if not compiling:
            weight.check_inner_tensors(not kernel.checks_memory)
    if torch.is_grad_enabled() and (input.requires_grad or requires_grad(bias)):
        return _Linear.apply(input, weight, bias, kernel)
    return kernel(input, weight, bias)


def multiply_with_branch(input: Tensor, weight: LowRankWeight, bias: Tensor | None) -> Tensor:
    """`multiply` for a weight with a branch of low rank, without a gradient."""
    if tracing.is_compiling():
        return add_branch(multiply(input, matrix_beside(weight), bias), input, weight)
    weight.check_inner_tensors()
    y = add_branch(multiply(input, weight.matrix, bias), input, weight)
    low_rank.prepare(weight, weight.matrix.fast_linear)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: QuantizedTensor, bias: Tensor | None, kernel: Callable[..., Tensor | None]
    ) -> Tensor | None:
        y = kernel(input, weight, bias)
        if y is not None:
            save_weight(ctx, weight)
        return y

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, saved_weight(ctx), grad_outputs[0]), None


class _Transformed(torch.autograd.Function):
    """`linear` with a frozen weight under the transforms of torch.func; all its derivatives call `linear`."""

    @staticmethod
    def forward(input: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        return multiply(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)  # not all weights can be zero
        ctx.weight = tracing.unwrapped_subclass(inputs[1])

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            raise frozen_error(ctx.weight)
        return _gradients(ctx, ctx.weight, grad_outputs[0])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], input: Tensor, weight: QuantizedTensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        of_input, _, of_bias = in_dims
        if of_bias is not None or of_input is None or not rows_are_independent(weight.scheme):
            return tracing.one_by_one(info, in_dims, multiply, (input, weight, bias))
        return multiply(input.movedim(of_input, 0), weight, bias), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        of_input, _, of_bias = tangents
        y = None if of_input is None else multiply(of_input, ctx.weight.with_activation(None))
        return y if of_bias is None else of_bias if y is None else y + of_bias


def rows_are_independent(scheme: Scheme) -> bool:
    """Whether the quantization of a row of the input depends on that row alone."""
    activation = scheme.activation
    if activation is None or scheme.spec.static:
        return True
    return activation.granularity.pattern(2)[0] == 1 and activation.scale_spec is None


def _gradients(ctx: Any, weight: QuantizedTensor, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients of the input, the weight (None: it is frozen) and the bias."""
    grad_input = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_input = multiply(grad, weight.with_activation(None).t())  # type: ignore[arg-type]
    if ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_input, None, grad_bias


def check_device(op: str, input: Tensor, weight: QuantizedTensor) -> None:
    """Raise `ValueError` if `input` and the data of `weight` are on different devices."""
    # Reading weight.device would be dispatched, which takes 5 us. A meta weight, never loaded, would give garbage.
    own = vars(weight)
    inner: Tensor = own[weight.tensor_names(own["scheme"])[0]]
    if inner.device != input.device:
        raise ValueError(_on_two_devices(op, input, inner))


def check_input(op: str, input: Tensor, weight: Tensor) -> None:
    """`check_device` and `check_dtype` for a weight in floating point."""
    if input.device != weight.device:
        raise ValueError(_on_two_devices(op, input, weight))
    check_dtype(op, input, weight.dtype)


def _on_two_devices(op: str, input: Tensor, weight: Tensor) -> str:
    return f"{op}: the input is on {input.device}, the weight on {weight.device}"


def check_dtype(op: str, input: Tensor, dtype: torch.dtype) -> None:
    """Check that `input` has `dtype`, the dtype of the weight, or that autocast casts both."""
    if input.dtype == dtype:
        return
    if not input.is_floating_point():
        raise TypeError(f"{op} takes a floating-point input, got {input.dtype}: input.to({dtype})")
    # Autocast does not cast fp64.
    double = input.dtype == torch.float64
    if double or not dispatch.autocasts(input.device.type):
        hint = "" if double else f", model.to({input.dtype}), or torch.autocast"
        raise ValueError(
            f"{op}: expected an input of dtype {dtype}, which the weight has, got {input.dtype}: "
            f"input.to({dtype}){hint}"
        )


def frozen_error(weight: Tensor) -> RuntimeError:
    """The error to raise when a transform requests the gradient of `weight`."""
    return RuntimeError(
        f"the gradient of a frozen quantized weight was requested ({weight!r}). Differentiate with respect to other "
        f"tensors; {parameter.HOW_TO_TRAIN}"
    )


def save_weight(ctx: Any, weight: QuantizedTensor) -> None:
    """Save a frozen weight for the backward by its inner tensors: `model.to` could not swap a weight that is saved."""
    if tracing.is_compiling():
        ctx.save_for_backward(weight)
        ctx.weight = None
        return
    own, kind = vars(weight), type(weight)
    scheme = own["scheme"]
    names = copying.forms_of(kind, scheme)
    ctx.save_for_backward(*[own[name] for name in names])
    ctx.weight = kind, names, scheme


def saved_weight(ctx: Any) -> Any:
    """The weight that `save_weight` saved."""
    if ctx.weight is None:
        return ctx.saved_tensors[0]
    kind, names, scheme = ctx.weight
    return kind(dict(zip(names, ctx.saved_tensors)), scheme)


def requires_grad(tensor: Tensor | None) -> bool:
    """Whether the tensor is given and requires a gradient."""
    if tensor is None:
        return False
    # Without this, reading the property of a subclass is dispatched, which takes 1 us.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def kinds(*tensors: Any) -> str:
    """The types of `tensors`, for error messages."""
    return " and ".join(type(tensor).__name__ for tensor in tensors)
