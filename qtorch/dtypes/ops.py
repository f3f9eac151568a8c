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
    dtype = kwargs.pop("dtype", None) or tensor.scheme.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"a {type(tensor).__name__} cannot be converted to {dtype}: its dtype is a floating-point one")
    kwargs.pop("memory_format", None)
    return tensor.map_inner(lambda inner: aten._to_copy.default(inner, **kwargs), replace(tensor.scheme, dtype=dtype))


@implements_aten(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In place from a quantized tensor of the same spec: its codes. From anything else: quantize it with this one's
    spec.
    Into a plain tensor: the dequantized values."""
    target, source = args[0], args[1]
    if not isinstance(target, AffineQuantizedTensor):
        return target.copy_(source.dequantize())
    if target.scheme.shape != tuple(source.shape):
        raise ValueError(f"copy_: the target has shape {target.scheme.shape}, the source {tuple(source.shape)}")
    same = isinstance(source, QuantizedTensor) and source.scheme.spec == target.scheme.spec
    if not same:
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        values = values.to(target.device, target.scheme.dtype)
        source = type(target).from_float(values, target.scheme.spec, target.act_scale, target.act_zero_point)
    for name, inner in target.inner_tensors.items():
        inner.copy_(getattr(source, name))
    return target


@implements_aten(aten.empty_like.default)
def _empty_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor = args[0]
    dtype = kwargs.pop("dtype", None) or tensor.scheme.dtype
    kwargs.pop("memory_format", None)
    return tensor.map_inner(lambda inner: torch.empty_like(inner, **kwargs), replace(tensor.scheme, dtype=dtype))


@implements_aten(aten.zeros_like.default)
def _zeros_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor: AffineQuantizedTensor = args[0]
    kwargs = {
        "dtype": tensor.scheme.dtype,
        "device": tensor.device,
        **{k: v for k, v in kwargs.items() if v is not None},
    }
    kwargs.pop("memory_format", None)
    zeros = torch.zeros(tensor.scheme.shape, **kwargs)
    return type(tensor).from_float(zeros, tensor.scheme.spec, tensor.act_scale, tensor.act_zero_point)


@implements_aten(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Same values, compared as codes where the specs agree."""
    a, b = args
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and a.scheme == b.scheme:
        x, y = a.inner_tensors, b.inner_tensors
        return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
    return torch.equal(_dequantized(a), _dequantized(b))


@implements_aten(aten.eq.Tensor)
def _eq(func: Any, args: Any, kwargs: Any) -> Tensor:
    return torch.eq(_dequantized(args[0]), _dequantized(args[1]))


@implements_aten(aten.is_pinned.default)
def _is_pinned_aten(func: Any, args: Any, kwargs: Any) -> bool:
    return _is_pinned(args[0])


@implements_function(torch.Tensor.is_pinned)
def _is_pinned(tensor: QuantizedTensor, *args: Any) -> bool:
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


def _dequantized(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
