"""Validation of the inner tensors of a quantized tensor, whose names, shapes and dtypes follow from its scheme.

Kernels take sizes from the scheme and addresses from the inner tensors, so both must agree. `check_inner_tensors`
checks whatever comes from a pickle, a checkpoint or a caller, and each call of `F.linear`, `F.embedding` or a
convolution, so that no kernel reads past tensors that were changed in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..primitives.double_quant import scale_tensor_shapes

FLOATS = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
)
"""Dtypes allowed for scales, tables and zero points in floating point."""


INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
"""Dtypes allowed for zero points that are codes."""


class Form(NamedTuple):
    """Required shape and allowed dtypes of one inner tensor."""

    shape: Sequence[int]
    dtypes: Collection[torch.dtype]

    def __str__(self) -> str:
        kinds = {FLOATS: "floating point", INTEGERS: "integers"}
        dtypes = kinds.get(frozenset(self.dtypes)) or " or ".join(sorted(map(str, self.dtypes)))
        return f"{tuple(self.shape)} of {dtypes}"


Forms = Mapping[str, tuple[Form, ...]]
"""The allowed forms of each inner tensor of a scheme, by name; there may be no other tensors."""


def scale_forms(weight: Any, shape: Sequence[int]) -> dict[str, tuple[Form, ...]]:
    """Forms of the tensors that represent the scales of a tensor of this shape, quantized by `weight`.

    `weight` is a `QuantSpec` or a `CodebookSpec`; see `primitives.double_quant`.
    """
    spec = weight.scale_spec
    shapes = scale_tensor_shapes(weight.scale_shape(shape), spec)
    forms: dict[str, tuple[Form, ...]] = {name: (Form(shape, FLOATS),) for name, shape in shapes.items()}
    return forms if spec is None else {**forms, "scale": (Form(shapes["scale"], {spec.dtype.storage}),)}


def check_inner_tensors(tensors: Mapping[str, Any], forms: Forms, scheme: Any) -> None:
    """Raise `ValueError` if `tensors` do not have the names, shapes and dtypes of `forms`.

    Args:
        tensors: by name; None counts as missing.
        forms: the forms of `scheme`.
        scheme: shown in the error message.
    """
    for name, alternatives in forms.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ValueError(f"{name} is missing: {_described(scheme)} has one")
        if not any(tensor.shape == shape and tensor.dtype in dtypes for shape, dtypes in alternatives):
            wanted = " or ".join(map(str, alternatives))
            raise ValueError(
                f"{name} of {_described(scheme)} has shape {wanted}, got {tuple(tensor.shape)} of {tensor.dtype}"
            )
        if not is_backed(tensor):
            raise ValueError(f"{name} of {_described(scheme)} has no memory: its storage was resized")
    for name, tensor in tensors.items():
        if tensor is not None and name not in forms:
            raise ValueError(f"{name} is given: {_described(scheme)} has no {name}")


def check_plain_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a value is neither None nor a plain strided tensor, or they are on several devices."""
    devices = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            raise ValueError(f"{name} must be a plain strided tensor, got a {type(tensor).__name__}")
        devices[tensor.device] = name
    if len(devices) != 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"the inner tensors must be on one device, got {found or 'none'}")


def _described(scheme: Any) -> str:
    return f"a tensor of shape {scheme.shape} with {scheme.spec}, {scheme.layout}"


def is_backed(tensor: Tensor) -> bool:
    """Whether the storage holds all elements of the tensor; `untyped_storage().resize_` can shrink it."""
    size = tensor.untyped_storage().nbytes()
    if size >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize and tensor.is_contiguous():
        return True
    if not tensor.numel():
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return size >= (tensor.storage_offset() + last + 1) * tensor.itemsize
