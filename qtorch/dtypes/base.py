"""QuantizedTensor: the base class of quantized tensors.

A quantized tensor wraps plain inner tensors (codes, scales, ...) and a `Scheme`, its metadata. It behaves as a tensor
of the shape and dtype of the scheme. Operations reach it in two ways:

    torch functions (`F.linear`, `torch.matmul`)    the table `dispatch.FUNCTIONS`, before autograd
    aten operators (`aten.slice`, `aten._to_copy`)  the table `dispatch.ATEN`, below autograd

An operation in neither table raises an error that names it; nothing is dequantized silently.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..kernels.conv import Window
from ..kernels.cpu.compiled_library import library
from ..kernels.custom_ops import implementations
from ..kernels.registry import names
from ..primitives import LinearSpec, QuantSpec, Scheme, double_quant, to_json, tracing
from ..primitives.layouts import Layout, PlainLayout
from ..primitives.layouts.base import LAYOUTS, Forms, Plain, check_inner_tensors, check_plain_tensors, check_scheme
from . import gathering, views
from .copying import Copied, forms_of, rebuild
from .dispatch import ATEN, FUNCTIONS, LEFT_OUT, calling_frame, calling_package, run, run_below

__all__ = ["QuantizedTensor", "rebuild"]

Q = TypeVar("Q", bound="QuantizedTensor")

_TYPE_OF_SPEC: "dict[type, type[QuantizedTensor]]" = {}

SCALES_OF_SCALES = ("scale_scale", "scale_mean", "zero_point_scale")
"""Inner tensors of a tensor with double quantization; see `primitives.double_quant`."""

_WHOLE = ("__class__", "__dict__", "scheme")
"""Attributes that are exchanged together, with the inner tensors, or not at all."""

_ABSENT = object()

HINTS = {
    "peft": ". For adapters whose layers were made before the weight was quantized, call "
    "qtorch.integrations.peft.prepare_for_adapters(model, gradient_checkpointing=False). Those that decompose the "
    "weights of the model (FRoD), need a float model: dequantize_(model)"
}
"""Package that calls an operator that is not implemented -> what to do there."""


class QuantizedTensor(Copied, gathering.Gathered, views.Viewed, torch.Tensor):
    """Base class of quantized tensors. A subclass names its inner tensors in `tensor_names`.

    Attributes:
        spec_type: class of the weight specs that the subclass stores.
        scheme_type: class of its schemes.
        per_block: name of the inner tensor that has one element, or one table, per block, beside the scale.
        trains: whether it can require a gradient; such a class implements `linear`, `conv` and `embedding`.
        scheme: metadata; hashable, without tensors.
        fast_linear, fast_grouped, fast_conv: functions that a kernel sets for the next calls, see `linear`; neither
            copied nor saved.
        matrices: single experts that were picked, see `experts`; neither copied nor saved.
    """

    spec_type: ClassVar[type]
    scheme_type: ClassVar[type] = Scheme
    per_block: ClassVar[str]
    trains: ClassVar[bool] = False
    scheme: Scheme
    scale: Tensor
    scale_scale: Tensor | None
    fast_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor | None] | None = None
    fast_grouped: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None
    fast_conv: Callable[..., Tensor | None] | None = None
    matrices: Any = None
    _copied_parts: bool = False

    @staticmethod
    def __new__(
        cls: type[Q], tensors: Mapping[str, Tensor | None] | Q, scheme: Scheme | None = None,
        requires_grad: bool = False,
    ) -> Q:  # fmt: skip
        tensors, scheme = parts_of(cls, tensors, scheme)
        device = next(t for t in tensors.values() if t is not None).device
        return make_wrapper(cls, scheme.shape, dtype=scheme.dtype, device=device)

    def __init__(
        self: Q, tensors: Mapping[str, Tensor | None] | Q, scheme: Scheme | None = None, requires_grad: bool = False
    ) -> None:
        """Make a tensor from inner tensors and their scheme, or a parameter from a quantized tensor.

        The second is for frameworks that call ``type(p)(data, requires_grad=...)`` to make a parameter like `p`.
        """
        source = tensors
        tensors, scheme = parts_of(type(self), tensors, scheme)
        own = vars(self)
        own["scheme"] = scheme
        for name in self.tensor_names(scheme):
            own[name] = tensors.get(name)
        if isinstance(source, QuantizedTensor):
            own.update(source._extra_state())
            self._is_param = True
            if requires_grad and self.trains:
                self.requires_grad_()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: an inner tensor that fits the scheme, or one that the class does not have. torch sets those
        of a file too (`_set_obj_state`).

        Raises:
            ValueError: an inner tensor does not fit the scheme.
            TypeError: the class has an attribute of this name. Those of torch, such as `grad`, can be set all the same,
                and those that kernels keep, such as `fast_linear`, to None.
        """
        known = getattr(type(self), name, _ABSENT)
        if name in _WHOLE:
            can_be_set = getattr(calling_frame(), "f_globals", {}).get("__name__") == "torch.utils"  # swap_tensors
        elif name in self.tensor_names(self.scheme):
            tensors = {**self.inner_tensors, name: value}
            if value is not None:
                check_plain_tensors(tensors)
                if value.device != self.device:
                    raise ValueError(f"{name} must be on {self.device}, got one on {value.device}")
            check_inner_tensors(tensors, forms_of(type(self), self.scheme), self.scheme)
            can_be_set = True
        elif known is None:
            can_be_set = value is None
        else:
            can_be_set = known is _ABSENT or (hasattr(type(known), "__set__") and not isinstance(known, property))
        if not can_be_set:
            raise TypeError(f"{type(self).__name__}.{name} belongs to the class and cannot be assigned")
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "spec_type" in vars(cls):
            _TYPE_OF_SPEC[cls.spec_type] = cls

    def __dir__(self) -> list[str]:
        """With the inner tensors of all layouts: torch.export asks one tensor for those of all in its class."""
        return [*super().__dir__(), *(name for layout in LAYOUTS.values() for name in layout.tensors)]

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        """Names of the inner tensors, optional ones included."""
        raise NotImplementedError

    @classmethod
    def forms(cls, scheme: Any) -> Forms:
        """The shapes and dtypes that the inner tensors of a scheme must have, by name."""
        check_scheme(scheme, cls.spec_type)
        return {**scheme.layout.forms(scheme), **cls._forms_beside_layout(scheme)}

    @classmethod
    def _forms_beside_layout(cls, scheme: Any) -> Forms:
        """`forms` of the inner tensors that are the same in every layout."""
        raise NotImplementedError

    def check_inner_tensors(self, memory: bool = True) -> None:
        """Raise `ValueError` if the inner tensors do not match the scheme."""
        tensors = vars(self)
        scheme = tensors["scheme"]
        device = None
        # Quantized scales are dequantized in torch operators before a kernel sees them.
        memory = memory or tensors.get("scale_scale") is not None
        # Written without helpers for speed: it runs on each call of a layer.
        for name, alternatives in forms_of(type(self), scheme).items():
            tensor = tensors[name]
            shape, dtypes = alternatives[0]
            if tensor is None or tensor.shape != shape or tensor.dtype not in dtypes:
                check_inner_tensors({name: tensor}, {name: alternatives}, scheme)
            if not memory:
                continue
            if tensor.untyped_storage().nbytes() < tensor.nbytes:
                check_inner_tensors({name: tensor}, {name: alternatives}, scheme)
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                check_plain_tensors(self.inner_tensors)

    @classmethod
    def from_float(cls: type[Q], input: Tensor, spec: Any) -> Q:
        """Quantize `input` by a `LinearSpec` or by the spec of the weight alone."""
        raise NotImplementedError

    @classmethod
    def complete(cls, spec: Any) -> LinearSpec:
        """A `LinearSpec` with a layout, from one or from the spec of the weight alone."""
        linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
        return replace(linear, layout=PlainLayout()) if linear.layout is None else linear

    @classmethod
    def _from_codes(
        cls: type[Q], codes: Tensor, others: Mapping[str, Tensor | None], spec: LinearSpec, dtype: torch.dtype
    ) -> Q:
        """Make a tensor from unpacked codes and the other inner tensors in their stored form."""
        spec = cls.complete(spec)
        scheme = Scheme(spec, tuple(codes.shape), dtype)
        spec.layout.check(scheme)
        forms = {**PlainLayout().forms(scheme), **cls._forms_beside_layout(scheme)}
        check_inner_tensors({"qdata": codes, **others}, forms, scheme)
        packed = spec.layout.pack((codes, others["scale"], others.get("zero_point")), scheme)
        return cls({**others, **packed}, scheme)

    def plain(self) -> Plain:
        """(codes, scale, zero point or table), unpacked: the arguments of the spec's `dequantize`."""
        raise NotImplementedError

    def dense_scale(self, rows: Tensor | None = None) -> Tensor:
        """The scale in floating point, of the given rows of blocks or of all, in layouts that store it as a tensor."""
        if rows is None and self.scale_scale is None:
            return self.scale
        return double_quant.dequantize_scale(self.inner_tensors, self.scheme.weight.scale_spec, rows)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """(scale, other tensor per block or None), without unpacking codes if possible.

        The second, zero points or tables, may have further axes after those of the scale.
        """
        raise NotImplementedError

    def with_plain(self: Q, plain: Plain, spec: LinearSpec | None = None) -> Q:
        """A tensor of these codes and scales, by default in the same layout, with the same logical dtype."""
        raise NotImplementedError

    def with_packed(self: Q, qdata: Tensor, scale: Tensor, other: Tensor | None, scheme: Scheme) -> Q:
        """`with_plain` from codes that are already packed for the layout of `scheme`."""
        # A layout with a packed axis stores the other tensors like the plain layout; see `Layout.packed_axis`.
        tensors = {name: t for name, t in self.inner_tensors.items() if name not in SCALES_OF_SCALES}
        tensors |= {scheme.layout.tensors[0]: qdata, "scale": scale}
        if other is not None:
            tensors[self.per_block] = other
        return type(self)(tensors, replace(scheme, spec=with_dense_scales(scheme.spec)))

    def with_activation(self: Q, activation: QuantSpec | None) -> Q:
        """The same weight, with its input quantized by `activation`."""
        raise NotImplementedError

    def quantized_like(self: Q, source: Tensor) -> Q:
        """`source`, floats or quantized, with the spec, scale dtype, activation and layout of this tensor."""
        spec = self.scheme.spec
        activation = {name: t for name, t in self.inner_tensors.items() if name.startswith("act_")}
        if isinstance(source, quantized_type(spec.weight)) and source.scheme.weight == spec.weight:
            codes, others = source.canonical()
            others = {name: t for name, t in others.items() if not name.startswith("act_")}
            return self._from_codes(codes, others | activation, spec, source.scheme.dtype)
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        values = values.to(self.device, self.scheme.dtype)
        if spec.weight.scale_spec is None:
            # Codes must fit the scale as it will be stored, in its present dtype, which .to may have changed.
            spec = replace(spec, weight=replace(spec.weight, scale_dtype=self.scales()[0].dtype))
        result = self.from_float(values, spec, **activation)
        return type(self)(result.inner_tensors, replace(result.scheme, spec=self.scheme.spec))

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(codes, the other tensors by name) in the form in which they are saved, the same for every layout."""
        raise NotImplementedError

    @classmethod
    def from_canonical(cls: type[Q], codes: Tensor, others: dict[str, Tensor], scheme: Scheme) -> Q:
        """Inverse of `canonical`."""
        return cls._from_codes(codes.contiguous(), others, scheme.spec, scheme.dtype)

    def to_layout(self: Q, layout: Layout) -> Q:
        """The same numbers in another layout."""
        scheme = replace(self.scheme, spec=replace(self.scheme.spec, layout=layout))
        return self.from_canonical(*self.canonical(), scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain float tensor, in the logical dtype unless `dtype` is given."""
        if not tracing.is_compiling():
            self.check_inner_tensors()
        return self.scheme.weight.dequantize(*self.plain(), dtype or self.scheme.dtype)

    def linear(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` with this weight, for classes that train."""
        raise NotImplementedError

    def conv(self, input: Tensor, window: Window) -> Tensor:
        """The convolution, without bias, of an input (B, C, *sizes) with this weight, for classes that train."""
        raise NotImplementedError

    def embedding(self, ids: Tensor, **options: Any) -> Tensor:
        """`F.embedding` with this table, for classes that train."""
        raise NotImplementedError

    @property
    @tracing.starts_no_graph  # compiled autograd flattens tensors of the eager forward
    def inner_tensors(self) -> dict[str, Tensor]:
        """The inner tensors that are present, by name."""
        own = vars(self)  # of all ways the fastest: guards of compiled graphs ask on each call
        return {name: own[name] for name in self.tensor_names(own["scheme"]) if own[name] is not None}

    def map_inner(self: Q, function: Callable[[Tensor], Tensor], scheme: Scheme | None = None) -> Q:
        """A tensor of the same class with `function` applied to each inner tensor."""
        return type(self)({name: function(part) for name, part in self.inner_tensors.items()}, scheme or self.scheme)

    def moved(self: Q, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Q:
        """The tensor on `device`, to which `move` moves an inner tensor, with the logical dtype `dtype`."""
        return self.map_inner(move, replace(self.scheme, dtype=dtype))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size of the inner tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inner_tensors.values())

    @tracing.starts_no_graph
    def __tensor_flatten__(self) -> tuple[list[str], Scheme]:
        return list(self.inner_tensors), self.scheme

    @classmethod
    @tracing.starts_no_graph
    def __tensor_unflatten__(
        cls: type[Q], tensors: dict[str, Tensor], scheme: Scheme, outer_size: Any, outer_stride: Any
    ) -> Q:
        # While a compiler traces, they are fake tensors with symbolic sizes, which are not checked.
        if all(type(tensor) is Tensor for tensor in tensors.values()):
            check_inner_tensors(tensors, forms_of(cls, scheme), scheme)
        return cls(tensors, scheme)

    def _stable_hash_for_caching(self) -> str:
        """A part of the keys of torch's graph caches on disk: torch identifies a graph by its operations before
        lowering, such as `F.linear`, and qtorch lowers them by its version and the registered kernels."""
        compiled = library() if self.device.type == "cpu" else None
        lowering = [_sources(), "" if compiled is None else compiled.instruction_set, *names(), *implementations()]
        inner = [(name, *map(str, (t.dtype, t.shape, t.stride(), t.device))) for name, t in self.inner_tensors.items()]
        parts = [type(self).__name__, *lowering, self.requires_grad, inner, to_json(self.scheme)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scheme = self.scheme
        grad = ", requires_grad=True" if self.requires_grad else ""
        # A compiler that logs what it traces has symbolic sizes, which take no format.
        size = f"{self.nbytes:,}" if isinstance(self.nbytes, int) else str(self.nbytes)
        return (
            f"{type(self).__name__}({scheme.spec}, layout={scheme.layout}, shape={scheme.shape}, "
            f"dtype={scheme.dtype}, device={self.device}, {size} bytes{grad})"
        )

    @classmethod
    @tracing.starts_no_graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return run(handler, args, kwargs or {})
        return run_below(cls, func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = ATEN.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        # Under inference mode composite operators (aten.linear, aten.flatten) arrive without being decomposed.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise NotImplementedError(
                f"{func} is not implemented for {cls.__name__}; call .dequantize() first if you want a float tensor; "
                f"{LEFT_OUT}{HINTS.get(calling_package(), '')}"
            )
        return result


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def with_dense_scales(spec: LinearSpec) -> LinearSpec:
    """The spec, with scales that are not quantized."""
    return spec if spec.weight.scale_spec is None else replace(spec, weight=replace(spec.weight, scale_spec=None))


def parts_of(
    cls: type[QuantizedTensor], tensors: Any, scheme: Scheme | None
) -> tuple[Mapping[str, Tensor | None], Scheme]:
    """Inner tensors and scheme from the arguments of a constructor."""
    if scheme is not None:
        return tensors, scheme
    if not isinstance(tensors, cls):
        raise TypeError(
            f"{cls.__name__} takes inner tensors and a scheme, or a {cls.__name__}, got a {type(tensors).__name__}; "
            f"{cls.__name__}.from_float quantizes a float tensor"
        )
    return tensors.inner_tensors, tensors.scheme


def make_wrapper(cls: type, shape: Sequence[int], **options: Any) -> Any:
    """A tensor of class `cls` without memory, which raises when its address is read. Never an inference tensor, which
    could not be a view of a normal one."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make_wrapper(cls, shape, **options)
    wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def quantized_type(spec: Any) -> type[QuantizedTensor]:
    """The class of the tensors that are quantized by `spec`.

    Raises:
        ValueError: no class stores such a spec.
    """
    for kind in type(spec).__mro__:
        if kind in _TYPE_OF_SPEC:
            return _TYPE_OF_SPEC[kind]
    raise ValueError(f"no quantized tensor has a {type(spec).__name__}: {spec!r}")
