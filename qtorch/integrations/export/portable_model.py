"""`portable`: a copy of a quantized model that torch.export turns into operators of torch alone.

A quantized weight becomes plain buffers of its module, ``weight_qdata``, ``weight_scale``, ... `weight` itself becomes
a property, which puts them together when `forward` reads it: what `forward` then calls is dispatched as before, to the
kernels of the portable layout. The exported program holds codes and scales, and its nodes are operators of
``torch.ops.aten`` and ``torch.ops.quantized_decomposed``: it runs where qtorch is not installed.
"""

import copy
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...dtypes import ConvWeight, QuantizedTensor
from ...kernels.ops.portable import decomposed
from ...model.install import check_model
from ...primitives.layouts.portable import PortableLayout, is_per_row
from ...primitives.spec import Scheme

M = TypeVar("M", bound=nn.Module)

_SCHEMES = "_portable_schemes"
"""Attribute of the classes of portable modules: schemes of the weights, by attribute."""

ACTIVATIONS = ("integer", "qdq")


def portable(model: M, activations: str = "integer") -> M:
    """A copy of `model` for `torch.export.export`, `torch.onnx.export` and the compilers of other packages.

    The copy shares the parameters that are not quantized. It runs in eager mode too, slowly: it is for export.

    Args:
        model: a model with quantized weights; the model itself is not changed.
        activations: how products with quantized activations are written. ``"integer"``: products of codes, summed as
            integers. With a scale per row of the weight the result is equal bit for bit, with groups too. ``"qdq"``:
            both operands are quantized and dequantized, and a product in floating point follows: the pattern that
            XNNPACK, ONNX Runtime and OpenVINO look for to run integer kernels of their own. Weight-only layers are
            the same in both.

    Raises:
        ValueError: no weight is quantized, a weight is in training, or `activations` is another word.
        TypeError: `model` is not a module.
    """
    check_model("portable", model)
    if activations not in ACTIVATIONS:
        raise ValueError(f"portable: activations is 'integer' or 'qdq', got {activations!r}")
    decomposed()
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made: dict[int, tuple[type[QuantizedTensor], Scheme, dict[str, Tensor]]] = {}
    result = copy.deepcopy(model, memo)
    for name, module in result.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if not isinstance(parameter, QuantizedTensor):
                continue
            if parameter.trains:
                full = f"{name}.{attribute}" if name else attribute
                raise ValueError(f"portable: {full} is in training; call quantize_(model, convert()) first")
            if id(parameter) not in made:
                made[id(parameter)] = _parts(parameter, activations == "qdq")
            _install(module, attribute, *made[id(parameter)])
    if not made:
        raise ValueError(f"portable: no weight of this {type(model).__name__} is quantized; call quantize_ first")
    return result


def _parts(weight: QuantizedTensor, qdq: bool) -> tuple[type[QuantizedTensor], Scheme, dict[str, Tensor]]:
    """Type, scheme and inner tensors of a weight in the portable layout."""
    layout = PortableLayout(qdq)
    static: Any = getattr(weight, "act_scale", None)
    if qdq and static is not None and static.numel() == 1:
        zero_point: Any = getattr(weight, "act_zero_point", None)
        zero = 0 if zero_point is None else int(zero_point)
        layout = replace(layout, input_scale=float(static), input_zero_point=zero)
    whole = weight.scheme.activation is None or layout.whole_convolutions
    if isinstance(weight, ConvWeight) and whole and is_per_row(weight.scheme):
        layout = replace(layout, shape=weight.scheme.shape)
    with torch.no_grad():
        moved: QuantizedTensor = weight.detach().to_layout(layout)  # type: ignore[attr-defined]
    return type(moved), moved.scheme, {name: t.contiguous() for name, t in moved.inner_tensors.items()}


def _install(
    module: nn.Module, attribute: str, kind: type[QuantizedTensor], scheme: Scheme, tensors: dict[str, Tensor]
) -> None:
    """Replace a parameter by buffers and a property of a class of its own."""
    del module._parameters[attribute]
    for name, tensor in tensors.items():
        module.register_buffer(f"{attribute}_{name}", tensor)

    def weight(self: nn.Module) -> QuantizedTensor:
        return kind({name: cast(Tensor, self._buffers[f"{attribute}_{name}"]) for name in tensors}, scheme)

    base = type(module)
    members = {attribute: property(weight), _SCHEMES: {**getattr(base, _SCHEMES, {}), attribute: scheme}}
    module.__class__ = type(f"Portable{base.__name__.removeprefix('Portable')}", (base,), members)


def schemes_of(model: nn.Module) -> dict[str, Scheme]:
    """The schemes of the weights of a model that `portable` has made, by name."""
    return {
        f"{name}.{attribute}" if name else attribute: scheme
        for name, module in model.named_modules(remove_duplicate=False)
        for attribute, scheme in getattr(type(module), _SCHEMES, {}).items()
    }
