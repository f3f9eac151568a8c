"""Codes that stand for numbers of a table, as the compiled kernels read them: those of weights that are no integers
(src/values.h), and those of scales that are quantized themselves (`read_scales` in src/weight.h)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives import PerGroup, QuantSpec, ZeroPointDomain, qparams
from ...primitives.double_quant import dequantize_scale, dequantize_zero_point, group_size, only_multiplies
from ...primitives.layouts.base import is_backed
from ...primitives.qdtype import QDTYPES, qdtype
from ...primitives.vector_spec import ENTRIES, signs
from ..custom_ops import number_of
from .compiled_library import TYPES
from .memory import address

FLOATS = tuple(kind.name for kind in QDTYPES.values() if kind.is_floating_point and kind.bits <= 8)
"""Types of codes whose numbers are in a table."""

TABLE = "TABLE"
"""In place of the domain of a zero point: what stands for it is the table of the weight."""
number_of(TABLE)  # which is then known in every process

VECTORS = "VECTORS"
"""In its place too: bytes stand for vectors (`primitives.vector_spec`)."""


class CodeValues(NamedTuple):
    """The numbers of codes.

    Attributes:
        table: (1, L) fp32, L at least 16; or (N * G, L) in a type of `TYPES`, one for each group. Contiguous.
        length: how many codes there are.
        exponent, mantissa, bias, special: of numbers that are computed, as in `Weight`; zeros for others.
        unit: such that 16 numbers are integers times it, at most 31 apart; 0 for others.
    """

    table: Tensor
    length: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    special: int = 0
    unit: float = 0.0

    @classmethod
    def of(cls, dtype: str, domain: str, table: Tensor | None) -> CodeValues | None:
        """Those of a weight; None for integers."""
        if domain == TABLE and table is not None:
            return cls.of_table(table)
        return cls.of_type(dtype) if dtype in FLOATS else None

    @classmethod
    def of_table(cls, table: Tensor) -> CodeValues:
        """Those of `table` (L,), or (N, G, L), one for each group."""
        length, tables = table.shape[-1], table.detach().reshape(-1, table.shape[-1])
        if len(tables) > 1:
            return cls((tables if tables.dtype in TYPES else tables.float()).contiguous(), length)
        found = cls(torch.nn.functional.pad(tables.float(), (0, max(0, 16 - length))).contiguous(), length)
        return found._replace(unit=_unit_of(found.table[0].tolist())) if length == 16 else found

    @classmethod
    @functools.cache
    def of_type(cls, dtype: str) -> CodeValues:
        """Those of a floating-point type of at most 8 bits."""
        kind = qdtype(dtype)
        codes = torch.arange(2**kind.bits, dtype=torch.uint8, device="cpu")
        numbers = kind.decode(codes.view(kind.storage))
        positive, negative = numbers.tensor_split(2)
        finite = int(positive.isfinite().sum())
        found = cls.of_table(numbers)
        if kind.bits <= 4 or not torch.equal(negative[:finite], -positive[:finite]):
            return found
        for mantissa in range(max(0, kind.bits - 6), kind.bits - 1):  # exponents of at most 5 bits, as fp16 has
            bias = 1 - mantissa - round(math.log2(positive[1]))
            computed = [_number(code, mantissa, bias) for code in range(min(finite, 31 << mantissa))]
            if positive[:finite].tolist() == computed:
                return found._replace(exponent=kind.bits - 1 - mantissa, mantissa=mantissa, bias=bias, special=finite)
        return found

    def fields(self) -> dict[str, Any]:
        """Of a `structs.Weight`."""
        of_table = {
            "values": address(self.table), "values_type": TYPES[self.table.dtype],
            "values_stride": self.length if len(self.table) > 1 else 0, "values_count": self.length,
        }  # fmt: skip
        computed = {name: getattr(self, name) for name in ("exponent", "mantissa", "bias", "special", "unit")}
        computed["unit_center"] = max(0, -round(float(self.table.min()) / self.unit)) if self.unit else 0
        return {"center": 0, **of_table, **computed}


class QuantizedScales(NamedTuple):
    """What makes numbers of scales that are quantized themselves, see `primitives.double_quant`; the codes are the
    scale of the weight, and its zero point.

    Attributes:
        dtype: name of the `QDType` of the codes.
        group: how many scales are quantized together.
        is_positive: whether scales are positive; else they are multiples of those of their groups, of any sign.
        scale, mean, zero_scale: the tensors scale_scale, scale_mean and zero_point_scale, None if there is none.
    """

    dtype: str
    group: int
    is_positive: bool
    scale: Tensor
    mean: Tensor | None
    zero_scale: Tensor | None

    @classmethod
    def of(cls, weight: Any) -> QuantizedScales | None:
        """Those of a quantized weight, None if its scales are numbers."""
        if weight.scale_scale is None:
            return None
        return cls(*_form_of_scales(weight.scheme.weight.scale_spec, weight.scale.numel()), *tensors_of_scales(weight))

    @property
    def form(self) -> tuple[str, int, bool]:
        """What is no tensor."""
        return self[:3]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The last three."""
        return self[3:]

    def check(self, codes: Tensor) -> None:
        """Raise `ValueError` if the compiled kernels would read other memory than that of scales of these codes."""
        count = -(-codes.numel() // self.group) if self.group > 0 else -1
        for tensor in self.tensors:
            if tensor is not None and (
                tensor.numel() != (1 if tensor is self.mean else count) or not (tensor.is_cpu and is_backed(tensor))
            ):
                raise ValueError(
                    f"{codes.numel()} scales in groups of {self.group} have {count} scales on the CPU, got "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
        if codes.itemsize > 1:
            raise ValueError(f"codes of scales are bytes, got {codes.dtype}")

    def read(self) -> list[Tensor]:
        """In fp32: numbers of the 256 bytes; the scales of scales, and those of zero points."""
        kind = qdtype(self.dtype)
        codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(kind.storage)
        numbers = [kind.decode(codes), self.scale, *([] if self.zero_scale is None else [self.zero_scale])]
        return [tensor.detach().float().contiguous() for tensor in numbers]

    def numbers(self, codes: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The scales and zero points that codes stand for, in fp32."""
        has_mean = self.is_positive and not qdtype(self.dtype).is_floating_point
        domain = ZeroPointDomain.INT if has_mean else ZeroPointDomain.NONE
        spec = QuantSpec(qdtype(self.dtype), PerGroup(self.group), zero_point_domain=domain)
        named = {"scale": codes, "scale_scale": self.scale, "scale_mean": self.mean}
        named |= {"zero_point": zero_point, "zero_point_scale": self.zero_scale}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        zeros = zero_point if self.zero_scale is None else dequantize_zero_point(tensors, spec)
        return dequantize_scale(tensors, spec), zeros

    def fields(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Of a `structs.Weight`, given what `read` gave."""
        values, scale, *zero = (address(tensor, torch.float32) for tensor in tensors)
        return {
            "scale_values": values, "scale_scale": scale, "zero_scale": zero[0] if zero else 0,
            "scale_group": self.group,
            "scale_mean": -0.0 if self.mean is None else float(self.mean),  # x + -0 is x, also where x is -0
            "scale_is_positive": self.is_positive,
        }  # fmt: skip


def vector_fields(rotation: int) -> dict[str, Any]:
    """Of a `structs.Weight` whose bytes stand for vectors, rotated in blocks of so many columns, 0 for none."""
    flips = address(_signs_of(rotation), torch.float32) if rotation else 0
    vectors = address(ENTRIES, torch.int8)
    return {"center": 0, "shift": 0.0, "vectors": vectors, "signs": flips, "rotation": rotation}


@functools.cache
def _signs_of(rotation: int) -> Tensor:
    return torch.tensor(signs(rotation), dtype=torch.float32, device="cpu")


def tensors_of_scales(weight: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensors of `QuantizedScales` of a quantized weight."""
    return weight.scale_scale, weight.scale_mean, getattr(weight, "zero_point_scale", None)


@functools.lru_cache(maxsize=1024)
def _form_of_scales(spec: qparams.Numerics, count: int) -> tuple[str, int, bool]:
    return spec.dtype.name, group_size(count, spec), not only_multiplies(spec)


def _unit_of(numbers: list[float]) -> float:
    """A power of two, see `CodeValues.unit`."""
    for unit in (1.0, 0.5, 0.25):
        integers = [number / unit for number in numbers]
        if all(map(float.is_integer, integers)) and max(0.0, *integers) - min(0.0, *integers) <= 31:
            return unit
    return 0.0


def _number(code: int, mantissa: int, bias: int) -> float:
    """What sign-less bits of an exponent and a mantissa stand for, subnormal numbers included."""
    exponent, fraction = divmod(code, 2**mantissa)
    return math.ldexp(fraction + (2**mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)
