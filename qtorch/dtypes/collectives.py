"""Collectives that DTensor calls on quantized tensors: scatter, broadcast, all-gather and wait, of each inner tensor.

Bytes are sent where a backend may not take the dtype (small floats). What is gathered is on every rank the tensor that
was cut, bit for bit: tensors that all shards share, such as the scale of the whole, must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .dispatch import implements_aten
from .gathering import as_sent, names_of_rows
from .matrix_weight import AS_A_WHOLE
from .ops import count_write

aten = torch.ops.aten


@implements_aten(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Rows of zeros at the end: DTensor pads shards of different sizes, and cuts them off again.

    Raises:
        NotImplementedError: another axis is padded, or with another value.
    """
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


def _scatter(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, *rest = args
    (output,) = outputs
    works = []
    for name, inner in output.inner_tensors.items():
        received = as_sent(inner.contiguous())
        sent = [[as_sent(getattr(part, name).contiguous()) for part in parts] for parts in inputs]
        _, work = func([received], sent, *rest, **kwargs)
        if not inner.is_contiguous():
            work.wait()
            inner.copy_(received.view(inner.dtype))
        works.append(work)
    count_write(output)
    return outputs, _last(works)


def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, *rest = args
    works = []
    for tensor in tensors:
        for inner in tensor.inner_tensors.values():
            if inner.is_contiguous():
                works.append(func([as_sent(inner)], *rest, **kwargs)[1])
                continue
            received = as_sent(inner.contiguous())
            work = func([received], *rest, **kwargs)[1]
            work.wait()
            inner.copy_(received.view(inner.dtype))
            works.append(work)
        count_write(tensor)
    return tensors, _last(works)


def _all_gather(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The shards of all ranks one after the other along the first axis.

    Raises:
        ValueError: what they share differs from rank to rank. All ranks raise it.
    """
    tensor, ranks, *rest = args
    # A module that qtorch does not import defines it; what has called this one has.
    if hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):
        implements_aten(torch.ops._c10d_functional._wrap_tensor_autograd.default)(_wait)
        AS_A_WHOLE.add(torch.ops._c10d_functional._wrap_tensor_autograd.default)
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


def _last(works: Sequence[Any]) -> Any:
    for work in works[:-1]:
        work.wait()
    return works[-1]


if torch.distributed.is_available():
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    implements_aten(c10d.scatter_.default)(_scatter)
    implements_aten(c10d.broadcast_.default)(_broadcast)
    implements_aten(functional.all_gather_into_tensor.default)(_all_gather)
    implements_aten(functional.wait_tensor.default)(_wait)
    AS_A_WHOLE.update(
        (
            c10d.scatter_.default,
            c10d.broadcast_.default,
            functional.all_gather_into_tensor.default,
            functional.wait_tensor.default,
        )
    )
