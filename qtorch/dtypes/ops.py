"""aten operators on a quantized tensor as a whole: copy, move, convert, compare, allocate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from .affine_quantized_tensor import AffineQuantizedTensor
from .base import QuantizedTensor, implements_aten, implements_function

aten = torch.ops.aten


@implements_aten(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Any, kwargs: Any) -> Tensor:
    return return_and_correct_aliasing(func, args, kwargs, args[0].map_inner(lambda tensor: tensor))


@implements_aten(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Tensor:
    return args[0].map_inner(torch.clone)


@implements_aten(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`.to(...)`. The logical dtype changes what `dequantize` and kernels give; codes and scales stay as they are, so
    that a move or a conversion there and back changes no number."""
    tensor: QuantizedTensor = args[0]
    dtype = _logical_dtype(tensor, kwargs)
    kwargs.pop("memory_format", None)
    return tensor.map_inner(lambda inner: aten._to_copy.default(inner, **kwargs), replace(tensor.scheme, dtype=dtype))


@implements_aten(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In place from a quantized tensor of the same spec: its codes. From anything else: quantize it with this one's
    spec. Into a plain tensor: the dequantized values."""
    target, source = args[0], args[1]
    if not isinstance(target, AffineQuantizedTensor):
        return target.copy_(source.dequantize())
    if target.scheme.shape != tuple(source.shape):
        raise ValueError(f"copy_: the target has shape {target.scheme.shape}, the source {tuple(source.shape)}")
    _check_owns_its_scales(target)
    if not isinstance(source, QuantizedTensor) or source.scheme.spec != target.scheme.spec:
        source = _quantized_like(target, source)
    for name, inner in target.inner_tensors.items():
        inner.copy_(getattr(source, name))
    return target


def _quantized_like(target: AffineQuantizedTensor, source: Tensor) -> AffineQuantizedTensor:
    """`source` with the spec, activation and layout of `target`."""
    spec = target.scheme.spec
    activation = (target.act_scale, target.act_zero_point)
    make = type(target).from_plain
    if isinstance(source, AffineQuantizedTensor) and source.scheme.weight == spec.weight:
        return make(*source.plain(), spec, source.scheme.dtype, *activation)
    values = source.dequantize() if isinstance(source, QuantizedTensor) else source
    values = values.to(target.device, target.scheme.dtype)
    # The codes are those for the scale as it will be stored: after .to(dtype), not what the spec would choose now.
    weight = replace(spec.weight, scale_dtype=target.plain()[1].dtype)
    scale, zero_point = weight.choose_qparams(values)
    return make(weight.quantize(values, scale, zero_point), scale, zero_point, spec, values.dtype, *activation)


def _check_owns_its_scales(target: AffineQuantizedTensor) -> None:
    base = target._base
    if not isinstance(base, AffineQuantizedTensor):
        return
    scale, base_scale = target.plain()[1], base.plain()[1]
    if scale.numel() * base.numel() != base_scale.numel() * target.numel():
        raise ValueError(
            f"copy_ into a part of shape {target.scheme.shape} of a tensor of shape {base.scheme.shape} would change "
            f"the scales of the rest ({base.scheme.weight}); write whole blocks"
        )


@implements_aten(aten.empty_like.default)
def _empty_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor = args[0]
    dtype = _logical_dtype(tensor, kwargs)
    kwargs.pop("memory_format", None)
    return tensor.map_inner(lambda inner: torch.empty_like(inner, **kwargs), replace(tensor.scheme, dtype=dtype))


@implements_aten(aten.zeros_like.default)
def _zeros_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor: AffineQuantizedTensor = args[0]
    dtype = _logical_dtype(tensor, kwargs)
    zeros = torch.zeros(tensor.scheme.shape, dtype=dtype, device=kwargs.get("device") or tensor.device)
    activation = [None if t is None else t.to(zeros.device) for t in (tensor.act_scale, tensor.act_zero_point)]
    return type(tensor).from_float(zeros, tensor.scheme.spec, *activation)


@implements_aten(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Same values, whatever the codes."""
    return torch.equal(_dequantized(args[0]), _dequantized(args[1]))


@implements_aten(aten.eq.Tensor)
def _eq(func: Any, args: Any, kwargs: Any) -> Tensor:
    return torch.eq(_dequantized(args[0]), _dequantized(args[1]))


@implements_aten(aten.is_pinned.default)
def _is_pinned_aten(func: Any, args: Any, kwargs: Any) -> bool:
    return _is_pinned(args[0])


@implements_function(torch.Tensor.is_pinned)
def _is_pinned(tensor: QuantizedTensor, device: Any = None) -> bool:
    return all(inner.is_pinned() for inner in tensor.inner_tensors.values())


@implements_aten(aten._pin_memory.default)
def _pin_memory(func: Any, args: Any, kwargs: Any) -> Tensor:
    return args[0].map_inner(lambda inner: inner.pin_memory())


@implements_function(torch.Tensor.share_memory_)
def _share_memory_(tensor: QuantizedTensor) -> QuantizedTensor:
    for inner in tensor.inner_tensors.values():
        inner.share_memory_()
    return tensor


@implements_function(torch.Tensor.is_shared)
def _is_shared(tensor: QuantizedTensor) -> bool:
    return all(inner.is_shared() for inner in tensor.inner_tensors.values())


def _logical_dtype(tensor: QuantizedTensor, kwargs: dict[str, Any]) -> torch.dtype:
    """Takes `dtype` out of the arguments of a conversion or an allocation."""
    dtype: torch.dtype = kwargs.pop("dtype", None) or tensor.scheme.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"{type(tensor).__name__}: {dtype} is no floating-point dtype of 16 bits or more")
    return dtype


def _dequantized(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
