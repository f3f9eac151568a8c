"""aten operators that copy, move, convert, compare or allocate whole quantized tensors."""

from typing import Any

import torch
from torch import Tensor

from ..primitives import Scheme, is_compiling
from .base import QuantizedTensor
from .dispatch import implements_aten, implements_function

aten = torch.ops.aten


@implements_aten(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Any, kwargs: Any) -> Tensor:
    alias = args[0].map_inner(lambda tensor: tensor)
    if args[0]._copied_parts:
        vars(alias)["_copied_parts"] = True
    return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs, alias)


@implements_aten(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Tensor:
    return args[0].map_inner(torch.clone)


@implements_aten(aten._to_copy.default, aten.empty_like.default)
def _moved(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`.to(...)`: move the inner tensors, and set the logical dtype, which is that of the results of kernels and of
    `dequantize`. Codes and scales keep their dtypes, so a move or conversion and back changes no number. And the same
    without their values."""
    tensor: QuantizedTensor = args[0]
    dtype = _logical_dtype(tensor, kwargs)
    kwargs.pop("memory_format", None)
    device = torch.device(kwargs.get("device") or tensor.device)
    return tensor.moved(device, lambda inner: func(inner, **kwargs), dtype)


@implements_aten(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Copy the codes of a quantized tensor of the same spec, or quantize floats with the spec of the target. A copy
    from another spec, or into a plain tensor, would change the numbers or their form silently: it is an error."""
    target, source = args[0], args[1]
    check_copy(target, source)
    if target.scheme.shape != tuple(source.shape):
        raise ValueError(f"copy_: the target has shape {target.scheme.shape}, the source {tuple(source.shape)}")
    check_owns_its_scales(target, source)
    if not target.trains:
        _check_finite(target, source)
    if not isinstance(source, QuantizedTensor) or source.scheme.spec != target.scheme.spec:
        source = target.quantized_like(source)
    if source.device != target.device:
        source = source.to(target.device)  # packs the codes for that device
    for name, inner in target.inner_tensors.items():
        inner.copy_(getattr(source, name))
    count_write(target)
    return target


def _check_finite(target: QuantizedTensor, source: Tensor) -> None:
    """Raise `ValueError` if `source` has NaN or infinite values, which would make such scales in a frozen weight."""
    frozen = isinstance(source, QuantizedTensor) and not source.trains  # checked when it was quantized
    if frozen or source.is_meta or is_compiling():
        return
    values = source.dequantize() if isinstance(source, QuantizedTensor) else source
    if bool(values.isfinite().all()):
        return
    raise ValueError(
        "copy_: the source has values that are NaN or infinite, which no code represents; the frozen weight of "
        f"shape {target.scheme.shape} ({target.scheme.weight}) is unchanged"
    )


def check_copy(target: Tensor, source: Tensor) -> None:
    """Raise `ValueError` if `target.copy_(source)` would dequantize a quantized tensor, or quantize it once more."""
    if not isinstance(source, QuantizedTensor) or not isinstance(source.scheme, Scheme):
        return  # a float tensor, or a weight in training, which holds floats
    into = "a float tensor"
    if isinstance(target, QuantizedTensor):
        into = f"a weight quantized as {target.scheme.weight}"
        ranks = {getattr(scheme, "rank", 0) for scheme in (target.scheme, source.scheme)}
        if same_numbers(target.scheme.weight, source.scheme.weight) and len(ranks) == 1:
            return
    raise ValueError(
        f"copy_ of a weight quantized as {source.scheme.weight} into {into} would change its numbers or lose its "
        "codes; use load_state_dict(..., assign=True) to keep it quantized, or .dequantize() it first"
    )


def same_numbers(one: Any, other: Any) -> bool:
    """Whether codes of two specs stand for the same numbers: the specs differ at most in the rounding of updates."""
    return bool(one.to_nearest() == other.to_nearest())


def count_write(target: QuantizedTensor) -> None:
    """Bump the versions of the inner tensors, so that caches made from the old numbers are rebuilt; torch does not do
    so below autograd."""
    base = target._base
    for tensor in (target, base) if isinstance(base, QuantizedTensor) else (target,):
        for inner in tensor.inner_tensors.values():
            if not inner.is_inference():
                torch.autograd.graph.increment_version(inner)


def check_owns_its_scales(target: QuantizedTensor, source: Tensor) -> None:
    """Raise `ValueError` if a write into the view `target` would miss its base, or change scales outside the view."""
    base = target._base
    if not isinstance(base, QuantizedTensor):
        if target._copied_parts:
            raise ValueError(
                f"copy_ into a part of shape {target.scheme.shape} of a tensor would not change that tensor: its "
                f"scales are quantized, or its codes packed, with the rest, and the part has its own ({target!r}); "
                "copy_ into the whole tensor. A checkpoint of shards, whose scales are in floating point, loads into "
                "shards, or into a model quantized with double_quantize=False"
            )
        return
    of_base = base.inner_tensors
    for name, inner in target.inner_tensors.items():
        if name not in of_base or inner.untyped_storage()._cdata != of_base[name].untyped_storage()._cdata:
            raise ValueError(
                f"copy_ into a part of shape {target.scheme.shape} of a tensor of shape {base.scheme.shape} would not "
                f"change that tensor: the part has its own {name} ({base!r}); copy_ into the whole tensor"
            )
    scale, base_scale = target.scales()[0], base.scales()[0]
    if scale.numel() * base.numel() != base_scale.numel() * target.numel() and not same_scales(target, source):
        raise ValueError(
            f"copy_ into a part of shape {target.scheme.shape} of a tensor of shape {base.scheme.shape} would change "
            f"the scales of the rest ({base.scheme.weight}); write whole blocks"
        )


def same_scales(one: QuantizedTensor, other: Tensor) -> bool:
    """Whether two tensors are quantized by one spec and with the same scales, zero points or tables."""
    if not isinstance(other, QuantizedTensor) or other.scheme.spec != one.scheme.spec:
        return False
    pairs = zip(one.scales(), other.scales(), strict=True)
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)  # type: ignore[union-attr, arg-type]


@implements_aten(aten.zeros_like.default)
def _zeros_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor: QuantizedTensor = args[0]
    dtype = _logical_dtype(tensor, kwargs)
    zeros = torch.zeros(tensor.scheme.shape, dtype=dtype, device=kwargs.get("device") or tensor.device)
    like: QuantizedTensor = tensor.to(zeros.device, dtype)  # type: ignore[assignment]
    return like.quantized_like(zeros)


@implements_aten(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the dequantized values are equal; codes and scales may differ."""
    return torch.equal(_dequantized(args[0]), _dequantized(args[1]))


@implements_aten(aten.eq.Tensor)
def _eq(func: Any, args: Any, kwargs: Any) -> Tensor:
    return torch.eq(_dequantized(args[0]), _dequantized(args[1]))


@implements_function(torch.Tensor.is_pinned)
def _is_pinned(tensor: QuantizedTensor, device: Any = None) -> bool:
    return all(inner.is_pinned() for inner in tensor.inner_tensors.values())


implements_aten(aten.is_pinned.default)(lambda func, args, kwargs: _is_pinned(args[0]))


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
    """Remove `dtype` from the arguments of a conversion or an allocation, and return it."""
    dtype: torch.dtype = kwargs.pop("dtype", None) or tensor.scheme.dtype
    if dtype != tensor.scheme.dtype and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise TypeError(f"{type(tensor).__name__} takes a floating-point dtype of 16 bits or more, got {dtype}")
    return dtype


def _dequantized(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
