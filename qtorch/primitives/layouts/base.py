"""Layout: how the codes, scales and zero points of a quantized tensor are stored in memory.

A layout is a stateless bijection, ``unpack(pack(codes, scale, zero_point)) == (codes, scale, zero_point)`` exactly, and
implements no operations. To add a layout, add a file to this folder with a frozen dataclass that has a unique name and
is decorated with `register_layout`.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import dataclass_transform

from ..double_quant import scale_tensor_shapes
from ..jsonable import jsonable
from ..spec import QuantSpec, Scheme

# Kernels take sizes from the scheme and addresses from the inner tensors, so both must agree. `check_inner_tensors`
# checks what comes from a pickle, a checkpoint or a caller, and each call of `F.linear`, `F.embedding` or a
# convolution, so that no kernel reads past tensors that were changed in the meantime.

FLOATS = frozenset(kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point)
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
    """Forms of the tensors that represent the scales of a tensor of this shape; `weight` is a `QuantSpec` or a
    `CodebookSpec`, see `primitives.double_quant`."""
    spec = weight.scale_spec
    shapes = scale_tensor_shapes(weight.scale_shape(shape), spec)
    forms: dict[str, tuple[Form, ...]] = {name: (Form(shape, FLOATS),) for name, shape in shapes.items()}
    return forms if spec is None else {**forms, "scale": (Form(shapes["scale"], {spec.dtype.storage}),)}


def check_inner_tensors(tensors: Mapping[str, Any], forms: Forms, scheme: Any) -> None:
    """Raise `ValueError` if `tensors`, of which None counts as missing, do not have the names, shapes and dtypes of
    `forms`; the message shows `scheme`."""
    for name, alternatives in forms.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ValueError(f"{name} is missing: {_described(scheme)} has one")
        if not any(tensor.shape == shape and tensor.dtype in dtypes for shape, dtypes in alternatives):
            allowed, found = " or ".join(map(str, alternatives)), f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"{name} of {_described(scheme)} has shape {allowed}, got {found}")
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


Plain = tuple[Tensor, Tensor, Tensor | None]
"""(codes in their storage dtype, scale, zero point or None), unpacked."""


class Layout:
    """Base class of layouts. A layout that changes the codes alone overrides `pack_qdata` and `unpack_qdata`; any other
    one `pack` and `unpack`.

    Attributes:
        name: the name by which kernels select layouts.
        tensors: names of the inner tensors that `pack` returns; those it leaves out are None.
        any_codes: whether it can hold all codes of the schemes that it accepts. Otherwise a view that has to unpack the
            codes gets the plain layout.
        traces_views: whether torch.export sees views of the inner tensors; see `dtypes.views`.
    """

    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]] = ("qdata", "scale", "zero_point")
    any_codes: ClassVar[bool] = True
    traces_views: ClassVar[bool] = False

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        """Inner tensors by name."""
        codes, *others = plain
        parts = zip(self.tensors, (self.pack_qdata(codes, scheme), *others), strict=True)
        return {name: tensor for name, tensor in parts if tensor is not None}

    def unpack(self, tensors: Mapping[str, Any], scheme: Scheme) -> Plain:
        """Inverse of `pack`; every name of `tensors` is present, None for those that `pack` left out."""
        return self.unpack_qdata(tensors["qdata"], scheme), tensors["scale"], tensors["zero_point"]

    def pack_qdata(self, codes: Tensor, scheme: Scheme) -> Tensor:
        """The packed codes; by default the codes as they are."""
        return codes

    def unpack_qdata(self, qdata: Tensor, scheme: Scheme) -> Tensor:
        """Inverse of `pack_qdata`."""
        return qdata

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        """The forms that the first tensor of `tensors`, the packed codes, may have for this scheme."""
        raise NotImplementedError

    def forms(self, scheme: Scheme) -> Forms:
        """The forms of the tensors that `pack` returns. By default scales and zero points are separate tensors."""
        weight, shape = scheme.weight, scheme.codes_shape
        forms = {self.tensors[0]: self.codes_forms(scheme), **scale_forms(weight, shape)}
        if weight.has_zero_point:
            dtypes = FLOATS if weight.zero_point_domain.is_real else INTEGERS
            if weight.quantizes_zero_points:
                assert weight.scale_spec is not None
                dtypes = frozenset({weight.scale_spec.dtype.storage})
                forms["zero_point_scale"] = forms["scale_scale"]
            forms["zero_point"] = (Form(weight.scale_shape(shape), dtypes),)
        return forms

    def check_spec(self, weight: QuantSpec) -> None:
        """Raise `ValueError` if the layout cannot hold tensors quantized by this spec; by default it can."""

    def check(self, scheme: Scheme) -> None:
        """Raise `ValueError` if the layout cannot hold a tensor of this scheme."""
        self.check_spec(scheme.weight)

    def packing(self, device: torch.device) -> Hashable:
        """Key of the packed form on `device`, or None if the form does not depend on the device.

        Tensors are unpacked to be moved to a device with another key, and to be pickled unless the key is None.
        """
        return None

    @property
    def whole_convolutions(self) -> bool:
        """Whether kernels of ``conv`` take this layout even if the input is quantized; others take its windows."""
        return False

    def joins_rows(self, ndim: int) -> bool:
        """Whether the packed tensors of two slices along the first of `ndim` axes, one after the other, are those of
        the whole. Otherwise FSDP2 shards such a weight in the smallest layout that does."""
        return self.packed_axis is not None and self.packed_axis != -ndim

    @property
    def packed_axis(self) -> int | None:
        """The axis, counted from the end, along which the first tensor is packed, or None if it cannot be viewed.

        Along the other axes the packed codes can be sliced and permuted like codes. The other tensors are those of the
        plain layout.
        """
        return None

    def can_view(self, qdata: Tensor) -> bool:
        """Whether `qdata`, the first tensor, is packed along `packed_axis`; the packing of a device may differ."""
        return self.packed_axis is not None

    def with_packed_axis(self, axis: int) -> "Layout":
        """The layout after a view has moved the packed axis to `axis`."""
        raise NotImplementedError


L = TypeVar("L", bound=type[Layout])

LAYOUTS: dict[str, type[Layout]] = {}


def check_layout(value: object) -> None:
    """Raise `ValueError` if `value`, which may come from a file, is not a layout."""
    if type(value) not in LAYOUTS.values():
        names = ", ".join(sorted(cls.__name__ for cls in LAYOUTS.values()))
        raise ValueError(f"a layout is one of {names}, got {value!r:.80}")


@dataclass_transform(frozen_default=True)
def register_layout(cls: L) -> L:
    """Class decorator: make a layout a frozen dataclass, unless it is one, readable from JSON, and register it under
    its name, which no other may have."""
    if LAYOUTS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"register_layout: the name {cls.name!r} is taken by {LAYOUTS[cls.name]!r}")
    jsonable(cls)
    return cls


def check_scheme(scheme: Scheme, spec_type: type) -> None:
    """Raise `ValueError` if the weight spec is not a `spec_type`, or the layout or shape of `scheme` is invalid."""
    if not isinstance(scheme.weight, spec_type):
        raise ValueError(f"takes a {spec_type.__name__}, got {scheme.weight!r}")
    if not isinstance(scheme.layout, Layout):
        raise ValueError(f"takes a layout such as PlainLayout(), got {scheme.layout!r}")
    if any(size < 0 for size in scheme.shape):
        raise ValueError(f"takes a shape without negative sizes, got {scheme.shape}")
    scheme.layout.check(scheme)
