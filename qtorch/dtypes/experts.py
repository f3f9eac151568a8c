"""Rows times the quantized matrices of experts, each row with its own: `grouped_linear`.

    y[t * R + r] = x[t] w[experts[t, r]]^T,    0 where experts[t, r] names no expert

All products with experts come here: `F.grouped_mm` and `bmm` of matrices chosen by an index (`products.py`), and the
experts of transformers (`integrations/transformers/experts_interface.py`). A kernel of the operation "grouped_linear"
multiplies all experts in one call and reads the index on the device. Where there is none, and for weights in training,
each expert is a linear layer.

The gradient of the input is the product with the transposed matrices; the weight is frozen.
"""

import functools
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import custom_ops, registry
from ..kernels.ops.experts import expert_by_expert
from ..primitives import Scheme, files, from_json, to_json, tracing
from . import factories, linear
from .base import QuantizedTensor, quantized_type
from .dispatch import cast_for_product, implements_function, run_below
from .transposed_weight import PaddedWeight, padded_matrix


def grouped_linear(input: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """The equation above.

    Args:
        input: (T, K) in the dtype of the weight.
        weight: quantized matrices (E, N, K).
        experts: (T, R) integers; below 0 or from E on, they name no expert.
    """
    differentiates = torch.is_grad_enabled() and linear.requires_grad(input)
    if not tracing.is_compiling() and not differentiates:
        fast_grouped = linear.fast_of("fast_grouped", input, weight)
        y = None if fast_grouped is None else fast_grouped(input, weight, experts)
        if y is not None:
            return y
    if not isinstance(weight, QuantizedTensor) or isinstance(input, QuantizedTensor):
        raise TypeError(f"grouped_linear takes a float input and quantized matrices, got {linear.kinds(input, weight)}")
    shape = weight.scheme.shape
    fits = input.dim() == 2 and len(shape) == 3 and input.shape[1] == shape[2]
    if not fits or experts.dim() != 2 or experts.shape[0] != input.shape[0] or experts.is_floating_point():
        raise ValueError(
            f"grouped_linear takes rows (T, K), matrices (E, N, K) and integers (T, R), got shapes "
            f"{tuple(input.shape)}, {shape} and {tuple(experts.shape)} of {experts.dtype}"
        )
    linear.check_dtype("grouped_linear", input, weight.scheme.dtype)
    linear.check_device("grouped_linear", input, weight)
    if isinstance(weight, PaddedWeight):
        return grouped_linear(functional.pad(input, (0, weight.scheme.padding)), padded_matrix(weight), experts)
    return cast_for_product(_product, input, weight, None, experts)


@custom_ops.opaque(lambda input, weight, experts: input.new_empty(experts.shape[0] * experts.shape[1], weight.shape[1]))
def grouped_linear_call(input: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """`grouped_linear` as a torch function, which a compiler writes into its graph with the quantized weight; then it
    is traced like `F.linear`, by `__torch_function__`."""
    return grouped_linear(input, weight, experts)


_CALL = torch.ops.qtorch.grouped_linear_call
implements_function(_CALL, _CALL.default)(grouped_linear)


def has_kernel(weight: Any, input: Tensor) -> bool:
    """Whether a kernel multiplies all experts in one call, for an input of this dtype on this device."""
    if weight.trains or factories.dispatches:
        return False
    if isinstance(weight, PaddedWeight):
        weight = weight.matrix
    kernel = linear.find_kernel("grouped_linear", weight.scheme, input.dtype, input.device.type)
    return kernel.function is not experts_as_linear_layers


def _product(input: Tensor, weight: QuantizedTensor, _: None, experts: Tensor) -> Tensor:
    """`grouped_linear` of checked arguments, outside autocast."""
    compiling = tracing.is_compiling()
    if tracing.transforms_active() if compiling else tracing.are_active():
        return tracing.run_whole(_product, input, weight, None, experts)
    # torchao's dispatch knows linear layers.
    if weight.trains or factories.dispatches:
        return one_by_one(input, weight, experts)
    kernel = linear.find_kernel("grouped_linear", weight.scheme, input.dtype, input.device.type)
    if not compiling:
        weight.check_inner_tensors(not kernel.checks_memory)
    experts = experts.to(torch.int64)
    if torch.is_grad_enabled() and linear.requires_grad(input):
        return _Grouped.apply(input, weight, experts, kernel)
    return kernel(input, weight, experts)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: QuantizedTensor, experts: Tensor, kernel: registry.Kernel) -> Tensor:
        linear.save_weight(ctx, weight)
        ctx.experts = experts
        return kernel(input, weight, experts)

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, experts = linear.saved_weight(ctx), ctx.experts
        transposed = weight.with_activation(None).transpose(1, 2)
        grad = _product(grad_outputs[0], transposed, None, experts.reshape(-1, 1))
        return grad.unflatten(0, experts.shape).sum(1), None, None, None


def one_by_one(input: Tensor, weight: Any, experts: Tensor) -> Tensor:
    """`grouped_linear` as a linear layer for each expert that has rows, differentiable as they are."""
    # In training, one node in the backward, where each index would make a gradient of the whole weight.
    matrices = weight.unbind(0) if weight.trains else weight
    count, n = weight.scheme.shape[:2]
    return expert_by_expert(input, experts, count, n, lambda rows, e: linear.linear(input[rows], matrices[e]))


# --- the portable kernel ---


NOTE = "a linear layer for each expert, found by reading the index on the host"


@registry.register("grouped_linear", spec=None, rotated=True, priority=10, note=NOTE)
def experts_as_linear_layers(x: Tensor, weight: Any, experts: Tensor) -> Tensor:
    """`grouped_linear` with any weight, by the kernels of linear layers."""
    if not tracing.is_compiling():
        return one_by_one(x, weight, experts)
    tensors = weight.inner_tensors
    return grouped_by_expert(x, experts, list(tensors.values()), ",".join(tensors), _text_of(weight.scheme))


def _empty(x: Tensor, experts: Tensor, tensors: Any, names: str, scheme: str) -> Tensor:
    return x.new_empty(experts.shape[0] * experts.shape[1], _scheme_of(scheme).shape[1])


@custom_ops.opaque(_empty)
def grouped_by_expert(x: Tensor, experts: Tensor, tensors: list[Tensor], names: str, scheme: str) -> Tensor:
    """`experts_as_linear_layers` as a node of a graph; names are separated by commas, the scheme is JSON text."""
    known = _scheme_of(scheme)
    weight = quantized_type(known.weight)(dict(zip(names.split(","), tensors, strict=True)), known)
    weight.check_inner_tensors()
    with torch.no_grad():
        return one_by_one(x, weight, experts)


def _text_of(scheme: Scheme) -> str:
    return json.dumps(to_json(scheme))


# A constant of the graph; see `linear._lookup_constant`.
_text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _scheme_of(text: str) -> Any:
    return from_json(files.parse_json(text))


# ``weight[e]`` of a frozen weight (E, N, K) is the same tensor at each call, as long as the inner tensors neither
# change nor move: making it takes longer than a product with one token, and what a kernel has prepared would be lost.


class _PickedMatrices(NamedTuple):
    """What the matrices were picked from, and they by number."""

    tensors: tuple[Tensor, ...]
    state: tuple[Any, ...]
    scheme: Any
    by_number: dict[int, QuantizedTensor]


@implements_function(torch.Tensor.__getitem__)
def _getitem(tensor: Any, index: Any) -> Any:
    if isinstance(tensor, QuantizedTensor) and not tensor.trains and len(tensor.scheme.shape) == 3:
        # A number, or a tensor of one.
        single = type(index) is int or (
            isinstance(index, Tensor)
            and not isinstance(index, QuantizedTensor)
            and not index.dim()
            and not (index.is_floating_point() or index.dtype is torch.bool)
        )
        if single and not (tracing.is_compiling() or tracing.are_active() or torch._C._get_tracing_state()):
            return _matrix(tensor, int(index))
    kind = type(tensor) if isinstance(tensor, QuantizedTensor) else QuantizedTensor
    return run_below(kind, torch.Tensor.__getitem__, (tensor, index), {})


def _matrix(weight: QuantizedTensor, e: int) -> QuantizedTensor:
    own = vars(weight)
    scheme = own["scheme"]
    tensors = tuple(own[name] for name in weight.tensor_names(scheme) if own[name] is not None)
    # Tensors of inference mode have no version, and what is made in it cannot be saved for a backward.
    versions = tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
    state = (torch.is_inference_mode_enabled(), *versions)
    kept: _PickedMatrices | None = own.get("matrices")
    if (
        kept is None
        or kept.state != state
        or kept.scheme is not scheme
        or any(a is not b for a, b in zip(kept.tensors, tensors, strict=True))
    ):
        kept = own["matrices"] = _PickedMatrices(tensors, state, scheme, {})
    matrix = kept.by_number.get(e)
    if matrix is not None:
        return matrix
    picked: QuantizedTensor = run_below(type(weight), torch.Tensor.__getitem__, (weight, e), {})
    memory = {t.untyped_storage().data_ptr() for t in tensors}
    if not all(t.untyped_storage().data_ptr() in memory for t in picked.inner_tensors.values()):
        return picked  # its memory, that of the weight once more, is not kept
    # By itself, not as a view that autograd tracks: the weight is frozen.
    matrix = kept.by_number[e] = type(picked)(picked.inner_tensors, picked.scheme)
    return matrix
