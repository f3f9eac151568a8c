"""A quantized weight as the compiled kernels read it: a `structs.Weight`, made and checked once."""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...primitives import CodebookSpec, Scheme, ZeroPointDomain, qdtype
from ...primitives.layouts.base import is_backed
from ...primitives.layouts.packed import packed_length
from ..config import generation
from ..linear.scaled import INTEGERS
from ..ops.weight_only_mm import code_arguments
from ..registry import Problem, can_add, needs_matrix, needs_rows, register
from . import variants
from .code_values import TABLE, VECTORS, CodeValues, QuantizedScales, tensors_of_scales, vector_fields
from .compiled_library import TYPES, library, missing
from .memory import address
from .structs import Weight

SCALE_TYPES = {**TYPES, torch.float8_e8m0fnu: 8}  # of scales and zero points, as in src/number.h
SIZES = {number: dtype.itemsize for dtype, number in SCALE_TYPES.items()}  # of an element, in bytes

W = TypeVar("W", bound="CompiledWeight")


def register_compiled(op: str, **conditions: Any) -> Callable[[Any], Any]:
    """Decorator: `register` a compiled kernel for integer weights, plain or packed unless it says otherwise."""
    common = {"layout": ("plain", "packed"), "weight": INTEGERS, "device": "cpu", "priority": 30}
    return register(op, **{**common, **conditions})


class CompiledWeight:
    """A weight as the compiled kernels read it, made and checked once: checking the tensors on each call would take
    longer than a small layer. It is valid while its tensors exist unchanged.

    Attributes:
        about: what it was made from besides tensors.
        code_values: of codes that are no integers, or None.
        fields: the struct; None if the kernels cannot read the tensors as they lie in memory.
        compiled: the library; None if it is missing or cannot read the tensors.
    """

    _made: ClassVar[dict[int, Any]] = {}  # by the identity of the codes

    def __init_subclass__(cls) -> None:
        cls._made = {}

    def __init__(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any,
        scales: QuantizedScales | None = None,
    ) -> None:  # fmt: skip
        """See `of`. Raises `ValueError` if the tensors are not those of such a weight."""
        zeros = None if zero_point is None else self.as_matrix(zero_point)
        self.code_values = CodeValues.of(about[2], about[4], zeros)
        bytes_or_numbers = scale if scales is None or scale.itemsize > 1 else scale.view(torch.uint8)
        matrices = (self.as_matrix(codes), self.as_matrix(bytes_or_numbers), None if about[4] == TABLE else zeros)
        _check(*matrices, *about[:4])
        if about[4] == TABLE:
            _check_table(zeros, matrices[1].numel(), *about[:3])
        if scales is not None:
            scales.check(scale)
        made, key = self._made, id(codes)
        self._codes = weakref.ref(codes, lambda _: made.pop(key, None))
        self._scale = weakref.ref(scale)
        self._zero_point = None if zero_point is None else weakref.ref(zero_point)
        self._grouped = matrices[1].shape[1] > 1
        self._form_of_scales = None if scales is None else scales.form
        self._of_scales: tuple[Tensor | None, ...] = () if scales is None else scales.tensors
        tensors = _there(codes, scale, zero_point, *self._of_scales)
        # Tensors of inference mode do not count writes.
        self._inference = any(t.is_inference() for t in tensors)
        if self._inference:
            self._state = inference_state(*tensors)
        else:  # `resize_`, `t_` and the like change the version too
            self._state = counted_state(*tensors)
        self._generation = generation.number
        self.about = about
        self.fields = _fields(*matrices, *about[:6])
        if self.fields is not None and self.code_values is not None:
            self.fields = self.fields._replace(shift=0.0, **self.code_values.fields())
        if self.fields is not None and about[4] == VECTORS:
            self.fields = self.fields._replace(**vector_fields(int(about[5])))
        if self.fields is not None and scales is not None:
            self._numbers_of_scales = scales.read()  # whose memory the struct names
            self.fields = self.fields._replace(**scales.fields(self._numbers_of_scales))
        self.compiled = library() if self.fields else None

    def key(self, kind: str | torch.dtype) -> str:
        """The key of `variants` for this weight and an activation of this kind."""
        n, k, _, packed, domain = self.about[:5]
        if domain == VECTORS:
            return f"vectors {str(kind).removeprefix('torch.')}"
        if self.code_values is not None:
            return f"{'units' if self.code_values.unit else 'values'} {str(kind).removeprefix('torch.')}"
        return variants.key_of(kind, packed, self._grouped, n * k, has_short_groups(self.fields))

    @staticmethod
    def as_matrix(tensor: Tensor) -> Tensor:
        """An inner tensor as the matrix that the kernels read."""
        return tensor

    @classmethod
    def of(
        cls: type[W], codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any,
        scales: QuantizedScales | None = None,
    ) -> W:  # fmt: skip
        """The weight with these tensors, made at the first call.

        Args:
            codes: (N, K) in the storage dtype of the type, or packed by `pack_codes` along K.
            scale: (N, G) or (1, 1).  zero_point: like scale, or None; or a table, see `CodeValues.of_table`.
            about: N, K, the name of a `QDType`, whether codes are packed, the name of a `ZeroPointDomain`, or `TABLE`,
                the code of a FLOAT zero point, (low + high + 1) / 2; and what a subclass adds. For vectors: packed
                int2, `VECTORS`, and the length of the blocks that are rotated.
            scales: if `scale` and `zero_point` are codes of scales.
        """
        found = cls._made.get(id(codes))
        form, tensors = (None, ()) if scales is None else (scales.form, scales.tensors)
        if (
            found is None
            or found.about != about
            or found._form_of_scales != form
            or not found.is_of(codes, scale, zero_point, *tensors)
        ):
            more = {} if scales is None else {"scales": scales}
            found = cls._made[id(codes)] = cls(codes, scale, zero_point, *about, **more)
        return found

    def tensors_of(self, weight: Any) -> tuple[Any, ...]:
        """Arguments of `is_of`; a look-up table is in the place of zero points."""
        third = weight.zero_point if self.about[4] != TABLE else weight.table
        return weight.qdata, weight.scale, third, *(tensors_of_scales(weight) if self._of_scales else ())

    @classmethod
    def made_of(cls: type[W], codes: Tensor) -> W | None:
        """The one that `of` made last of these codes."""
        return cls._made.get(id(codes))

    def is_of(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *of_scales: Tensor | None) -> bool:
        """Whether it was made from these tensors, with those of `QuantizedScales`, they have neither moved nor been
        written to since, and the choice of kernels has not changed."""
        # Written out: this runs on each call.
        if not (
            codes is self._codes()
            and scale is self._scale()
            and codes is not None
            and scale is not None  # a dead weak reference returns None
            and (self._zero_point and self._zero_point()) is zero_point
            and self._generation == generation.number
        ):
            return False
        if of_scales or self._of_scales:
            if len(of_scales) != len(self._of_scales) or not all(map(operator.is_, of_scales, self._of_scales)):
                return False
            tensors = _there(codes, scale, zero_point, *of_scales)
            state = inference_state(*tensors) if self._inference else counted_state(*tensors)
        elif self._inference:
            state = inference_state(*((codes, scale) if zero_point is None else (codes, scale, zero_point)))
        elif zero_point is None:
            state = (codes.data_ptr(), codes._version, scale.data_ptr(), scale._version)
        else:
            zeros = zero_point.data_ptr()
            state = (codes.data_ptr(), codes._version, scale.data_ptr(), scale._version, zeros, zero_point._version)
        return self._state == state


def _there(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def counted_state(*tensors: Tensor) -> tuple[int, ...]:
    """What changes when a tensor moves or is written to."""
    return tuple(value for t in tensors for value in (t.data_ptr(), t._version))


def inference_state(*tensors: Tensor) -> tuple[Any, ...]:
    """What may change of tensors of inference mode, which have no version."""
    return tuple(value for t in tensors for value in (t.data_ptr(), t.shape, t.stride()))


def _check(codes: Tensor, scale: Tensor, zero_point: Tensor | None, n: int, k: int, dtype: str, packed: bool) -> None:
    """Raise `ValueError` if the compiled kernels would read beyond the memory of a tensor."""
    kind = qdtype(dtype)
    wanted = (n, packed_length(k, kind.bits) if packed else k), torch.uint8 if packed else kind.storage
    if (tuple(codes.shape), codes.dtype) != wanted:
        raise ValueError(
            f"the codes of a weight of shape {(n, k)} in {kind} have shape {wanted[0]} and dtype {wanted[1]}, got "
            f"{tuple(codes.shape)} and {codes.dtype}"
        )
    groups = scale.shape[1] if scale.dim() == 2 else 0
    if not (groups and k % groups == 0 and scale.shape[0] == n) and scale.shape != (1, 1):
        raise ValueError(f"the scale of a weight of shape {(n, k)} has shape (N, groups) or (1, 1), got {scale.shape}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"a zero point has the shape of the scale, {tuple(scale.shape)}, got {zero_point.shape}")
    if not (codes.is_cpu and scale.is_cpu and (zero_point is None or zero_point.is_cpu)):
        raise ValueError(f"tensors of a weight {(n, k)} must be on the CPU, got {codes.device}, {scale.device}")
    if not (is_backed(codes) and is_backed(scale) and (zero_point is None or is_backed(zero_point))):
        raise ValueError(f"a weight of shape {(n, k)} has tensors whose memory was given back by a resized storage")


def _check_table(table: Tensor | None, blocks: int, n: int, k: int, dtype: str) -> None:
    wanted = 2 ** qdtype(dtype).bits
    if table is None or table.shape[-1:] != (wanted,) or table.numel() not in (wanted, blocks * wanted):
        raise ValueError(
            f"a weight of shape {(n, k)} in {blocks} groups has one table of {wanted} numbers, or one for each group, "
            f"got {None if table is None else tuple(table.shape)}"
        )
    if not (table.is_cpu and is_backed(table)):
        raise ValueError(f"the table of a weight of shape {(n, k)} must be on the CPU, got {table.device}")


def _fields(codes: Tensor, scale: Tensor, zero_point: Tensor | None, n: int, k: int, *about: Any) -> Weight | None:
    dtype, packed, domain, middle = about
    kind = qdtype(dtype)
    tensors = [scale] if zero_point is None else [scale, zero_point]
    has_rows = codes.stride(1) == 1 and (n == 1 or codes.stride(0) >= codes.shape[1])
    if not has_rows or not all(t.is_contiguous() and t.dtype in SCALE_TYPES for t in tensors):
        return None
    half = 2 ** (kind.bits - 1)
    zero_code = 0 if kind.is_signed else half
    groups = scale.shape[1]
    return Weight(
        codes=address(codes), row_bytes=codes.stride(0), bits=kind.bits if packed else 0,
        center=half if packed or not kind.is_signed else 0, n=n, k=k, group=k // groups, groups=groups,
        scale=address(scale), scale_type=SCALE_TYPES[scale.dtype], scale_stride=groups if scale.shape[0] > 1 else 0,
        zero=address(zero_point), zero_type=0 if zero_point is None else SCALE_TYPES[zero_point.dtype],
        zero_is_code=domain in (TABLE, VECTORS) or not ZeroPointDomain[domain].adds_zero_point,
        shift=zero_code - (middle if domain == "FLOAT" else 0.0),
    )  # fmt: skip


def has_short_groups(fields: Weight | None) -> bool:
    """Whether src/int_channels.h multiplies codes with the weight: 4 bits, in groups of 32, 64, 96 or 128."""
    return fields is not None and fields.bits == 4 and fields.group in (32, 64, 96, 128)


def part(whole: Weight, start: int, stop: int) -> Weight:
    """The struct of rows `start` to `stop` of a weight."""
    skipped = start * whole.scale_stride
    return whole._replace(
        codes=whole.codes + start * whole.row_bytes,
        n=stop - start,
        scale=whole.scale + skipped * SIZES[whole.scale_type],
        zero=whole.zero and whole.zero + skipped * SIZES[whole.zero_type],
        values=whole.values and whole.values + start * whole.groups * whole.values_stride * SIZES[whole.values_type],
        first_scale=whole.first_scale + skipped,
    )


@functools.lru_cache(maxsize=1024)
def form(scheme: Scheme) -> tuple[bool, str, float, float, str]:
    """Arguments of operators about a weight besides its tensors: packed, dtype, low, high and domain."""
    packed, of_weight = scheme.layout.packed_axis is not None, scheme.weight
    if isinstance(of_weight, CodebookSpec):
        return packed, f"uint{of_weight.dtype.bits}", 0.0, 0.0, TABLE
    return packed, *code_arguments(of_weight)


def check_bias(bias: Tensor | None, dtype: torch.dtype, n: int) -> None:
    """Raise `ValueError` if the kernels cannot add the bias to a result of this dtype with n columns."""
    if bias is not None and not can_add(bias, dtype, n):
        raise ValueError(f"takes a contiguous bias of shape {(n,)} in {dtype}, got {tuple(bias.shape)} in {bias.dtype}")


def supports(problem: Problem) -> str | None:
    """Why no compiled kernel supports the weight, or None."""
    if reason := needs_matrix(problem) or needs_rows(problem):
        return reason
    scheme = problem.scheme
    shape = scheme.weight.scale_shape(scheme.shape)
    if 0 in scheme.shape or (shape[0] != scheme.shape[0] and shape != (1, 1)):
        return f"takes scales per row, group of a row or tensor, the weight has {scheme.weight.granularity}"
    return missing()
