"""Operators by which FSDP2 makes a shard of a quantized tensor: `new_zeros`, `new_empty`, `as_strided`, a flat view.

What is gathered from shards is in `gathering`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ..layouts.plain import smallest_layout
from ..primitives.scheme import Scheme
from .base import QuantizedTensor
from .caller import calling_frame
from .copying import forms_of
from .dispatch import implements_aten, implements_function, run_below
from .gathering import names_of_rows

aten = torch.ops.aten

FSDP = "torch.distributed.fsdp"


@implements_aten(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Zeros quantized like the tensor, with another number of rows; what rows share (a table) is copied.

    Raises:
        NotImplementedError: the new shape differs in another axis.
        ValueError: the rows cut blocks, or the tensor cannot be cut into rows.
    """
    tensor, size = args[0], tuple(args[1])
    shape = tensor.scheme.shape
    rows = 0 if 0 in size else size[0] if size else None
    if rows is None or (rows and size[1:] != shape[1:]):
        raise NotImplementedError(
            f"{func}: a quantized tensor like one of shape {shape} has as many elements in all axes but the first, got "
            f"{size}; .dequantize() gives a float tensor"
        )
    if not tensor.scheme.layout.joins_rows(len(tensor.scheme.codes_shape)) or (
        tensor.scheme.layout.packing(tensor.device) is not None
    ):
        tensor = tensor.to_layout(smallest_layout(tensor.scheme.weight.dtype))
    block = tensor.scheme.weight.block_size(tensor.scheme.codes_shape)[0]
    if block not in (1, shape[0]) and rows % block:
        raise ValueError(
            f"shards of {rows} rows cut blocks of {block} rows ({tensor.scheme.weight}); take a number of ranks for "
            f"which the {shape[0]} rows divide into multiples of {block}"
        )
    # As a slice has them: scales in floating point, and no blocks larger than the tensor.
    like: QuantizedTensor = tensor[: min(rows, shape[0])] if rows else tensor[:]
    kind, scheme = type(like), replace(like.scheme, shape=(rows, *shape[1:]))
    names, forms = names_of_rows(kind, like.scheme), forms_of(kind, scheme)
    inner = {
        name: torch.zeros(tuple(forms[name][0].shape), dtype=part.dtype, device=kwargs.get("device") or part.device)
        if name in names
        else part.to(kwargs.get("device") or part.device, copy=True)
        for name, part in like.inner_tensors.items()
    }
    return kind(inner, replace(scheme, dtype=kwargs.get("dtype") or scheme.dtype))


@implements_aten(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The tensor itself, which is all that FSDP2 asks for.

    Raises:
        NotImplementedError: another shape, order or start.
    """
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if (tuple(size), tuple(stride), offset or 0) != (tensor.scheme.shape, tensor.stride(), 0):
        raise NotImplementedError(
            f"as_strided of shape {tuple(size)} of a quantized tensor of shape {tensor.scheme.shape}, which has no "
            "memory of that order; .dequantize() gives a float tensor"
        )
    alias = tensor.map_inner(lambda inner: inner)
    return return_and_correct_aliasing(aten.alias.default, (tensor,), {}, alias)


@implements_function(torch.Tensor.view)
def view(tensor: Any, *size: Any, **kwargs: Any) -> Any:
    """`Tensor.view`. FSDP2 keeps a flat view of each shard, which it reads of plain tensors alone. Of packed codes it
    would be a copy, and across blocks of several rows there is none, so FSDP2 gets the shard itself."""
    if size == (-1,) and isinstance(tensor.scheme, Scheme) and not torch.compiler.is_compiling() and _called_by_fsdp():
        return tensor.detach()
    return run_below(type(tensor), torch.Tensor.view, (tensor, *size), kwargs)


def _called_by_fsdp() -> bool:
    frame = calling_frame()
    return frame is not None and frame.f_globals.get("__name__", "").startswith(FSDP)
