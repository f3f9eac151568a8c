"""Operators by which FSDP2 makes a shard of a quantized tensor: `new_zeros`, `new_empty`, `as_strided`, a flat view.

What is gathered from shards is in `gathering`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..primitives import Scheme, is_compiling
from ..primitives.layouts import smallest_layout
from . import copying, matrix_weight, ops
from .base import QuantizedTensor
from .dispatch import calling_frame, implements_aten, implements_function, run_below
from .gathering import as_sent, names_of_rows

aten = torch.ops.aten

FSDP = "torch.distributed.fsdp"
RECEIVES_FLOATS = ("torch.distributed._state_dict_utils", "_broadcast_tensors")


@implements_aten(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Zeros quantized like the tensor, with another number of rows; what rows share (a table) is copied."""
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
    names, forms = names_of_rows(kind, like.scheme), copying.forms_of(kind, scheme)
    inner = {
        name: torch.zeros(tuple(forms[name][0].shape), dtype=part.dtype, device=kwargs.get("device") or part.device)
        if name in names
        else part.to(kwargs.get("device") or part.device, copy=True)
        for name, part in like.inner_tensors.items()
    }
    return kind(inner, replace(scheme, dtype=kwargs.get("dtype") or scheme.dtype))


@implements_aten(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The tensor itself, which is all that FSDP2 asks for."""
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if (tuple(size), tuple(stride), offset or 0) != (tensor.scheme.shape, tensor.stride(), 0):
        raise NotImplementedError(
            f"as_strided of shape {tuple(size)} of a quantized tensor of shape {tensor.scheme.shape}, which has no "
            "memory of that order; .dequantize() gives a float tensor"
        )
    alias = tensor.map_inner(lambda inner: inner)
    return torch.utils._python_dispatch.return_and_correct_aliasing(aten.alias.default, (tensor,), {}, alias)


@implements_function(torch.Tensor.view)
def view(tensor: Any, *size: Any, **kwargs: Any) -> Any:
    """`Tensor.view`. FSDP2 keeps a flat view of each shard, which it reads of plain tensors alone. Of packed codes it
    would be a copy, and across blocks of several rows there is none, so FSDP2 gets the shard itself."""
    if size == (-1,) and isinstance(tensor.scheme, Scheme) and not is_compiling() and _called_by_fsdp():
        return tensor.detach()
    return run_below(type(tensor), torch.Tensor.view, (tensor, *size), kwargs)


def _called_by_fsdp() -> bool:
    frame = calling_frame()
    return frame is not None and frame.f_globals.get("__name__", "").startswith(FSDP)


# Collectives that DTensor calls on quantized tensors: scatter, broadcast, all-gather and wait, of each inner tensor.
# Bytes are sent where a backend may not take the dtype (small floats). What is gathered is on every rank the tensor
# that was cut, bit for bit: tensors that all shards share, such as the scale of the whole, must be equal.


@implements_aten(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Rows of zeros at the end: DTensor pads shards of different sizes, and cuts them off again."""
    tensor, padding = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    shape = tensor.scheme.shape
    if value or any(padding[:-1]) or len(padding) != 2 * len(shape):
        raise NotImplementedError(
            f"{func} of a quantized tensor of shape {shape} by {list(padding)} and {value}: only rows of zeros at the "
            "end can be added (shards of different sizes along the first axis); .dequantize() gives a float tensor"
        )
    padded: Tensor = tensor.new_zeros((shape[0] + padding[-1], *shape[1:]))
    if shape[0]:
        padded[: shape[0]].copy_(tensor)
    return padded


def _receive(func: Any, inner: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Fill the bytes of an inner tensor by a collective, which has ended when its work is returned."""
    received = as_sent(inner.contiguous())
    _, work = func([received], *args, **kwargs)
    work.wait()
    if not inner.is_contiguous():
        inner.copy_(received.view(inner.dtype))
    return work


def _scatter(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, *rest = args
    (output,) = outputs
    for name, inner in output.inner_tensors.items():
        sent = [[as_sent(getattr(part, name).contiguous()) for part in parts] for parts in inputs]
        work = _receive(func, inner, sent, *rest, **kwargs)
    ops.count_write(output)
    return outputs, work


def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, *rest = args
    frame = calling_frame()
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != RECEIVES_FLOATS:
        frame = frame.f_back
    if frame is not None:
        raise NotImplementedError(
            f"set_model_state_dict: broadcast_from_rank0=True sends floats, the weight is {tensors[0].scheme.weight}; "
            "give every rank the whole state_dict, with full_state_dict=True alone"
        )
    for tensor in tensors:
        for inner in tensor.inner_tensors.values():
            work = _receive(func, inner, *rest, **kwargs)
        ops.count_write(tensor)
    return tensors, work


def _all_gather(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The shards of all ranks one after the other along the first axis. All ranks raise the error."""
    tensor, ranks, *rest = args
    # A module that qtorch does not import defines it; what has called this one has.
    if hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):
        implements_aten(torch.ops._c10d_functional._wrap_tensor_autograd.default)(_wait)
        matrix_weight.AS_A_WHOLE.add(torch.ops._c10d_functional._wrap_tensor_autograd.default)
    kind: Any = type(tensor)
    shape = tensor.scheme.shape
    scheme = replace(tensor.scheme, shape=(shape[0] * ranks, *shape[1:]))
    names = names_of_rows(kind, tensor.scheme)
    gathered = {}
    for name, inner in tensor.inner_tensors.items():
        flat = as_sent(inner.contiguous()).reshape(1, -1)
        whole = torch.ops._c10d_functional.wait_tensor(func(flat, ranks, *rest, **kwargs)).view(inner.dtype)
        if name in names:
            gathered[name] = whole.view(ranks * inner.shape[0], *inner.shape[1:])
        elif not all(torch.equal(as_sent(row), flat[0]) for row in whole):
            raise ValueError(
                f"the shards of a weight quantized as {tensor.scheme.weight} differ in their {name}, so that they "
                "cannot be gathered along its rows; quantize the weight before it is sharded along its first axis"
            )
        else:
            gathered[name] = inner
    return kind(gathered, scheme)


def _wait(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The tensor itself: `_all_gather` has waited."""
    tensor: Tensor = args[0]
    return tensor


if torch.distributed.is_available():
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    for _overload, _handler in (
        (c10d.scatter_.default, _scatter),
        (c10d.broadcast_.default, _broadcast),
        (functional.all_gather_into_tensor.default, _all_gather),
        (functional.wait_tensor.default, _wait),
    ):
        implements_aten(_overload)(_handler)
        matrix_weight.AS_A_WHOLE.add(_overload)
