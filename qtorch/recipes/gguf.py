"""The block types of GGUF as recipes: what they make is written to a file of llama.cpp code for code (`save_gguf`).

    Q8_0                  w = q * d           d = max |w| / 127
    Q5_0, Q4_0            w = q * d           d = w_max / -16, w_max / -8, w_max the element of largest magnitude
    Q5_1, Q4_1            w = q * d + m       d = (max w - min w) / 31, / 15,   m = min w
    IQ4_NL                w = table[q] * d    d the smallest number for which the table covers the block

in blocks of 32 along a row, with d and m in fp16. They are those of `gguf.quants.quantize` bit for bit, but for a w_max
that occurs with both signs, of which the negative one counts here. Codes are the nearest to what the file stands for;
ggml chooses them before it rounds d and m, so that some of its codes are one off.

The K types have super-blocks of 256, whose groups have scales and offsets in a few bits each:

    Q6_K, Q3_K            w = q * (d * sc)               a signed sc for 16 elements
    Q5_K, Q4_K            w = q * (d * sc) - dmin * mn   sc and mn for 32 elements
    Q2_K                  the same                       sc and mn for 16 elements

ggml searches sc and mn; here the range of a group gives them, or what calibration finds.

Source: ggml/src/ggml-quants.c.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..primitives import CodebookSpec, LinearSpec, MappingType, PerGroup, QuantSpec, ZeroPointDomain, qdtype
from ..primitives.granularity import IndivisibleError
from ..primitives.layouts.plain import smallest_layout
from ..primitives.scale_rules import MinMaxRule, ScaleRule
from .base import WeightRecipe, register_recipe

BLOCK = 32
K = 256
"""Elements of a block, and of a super-block."""

SMALLEST = 2.0**-24
"""The smallest positive number of fp16."""

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class _Affine(WeightRecipe):
    dtype: ClassVar[str]
    mapping: ClassVar[MappingType]
    quant_min: ClassVar[int | None] = None

    scale_rule: ScaleRule = MinMaxRule()

    def linear_spec(self) -> LinearSpec:
        has_offset = self.mapping is MappingType.ASYMMETRIC
        domain = ZeroPointDomain.OFFSET if has_offset else ZeroPointDomain.NONE
        codes = qdtype(self.dtype), PerGroup(BLOCK), self.mapping, domain, self.scale_rule
        scales: Any = {"scale_dtype": torch.float16, "eps": SMALLEST, "preserve_zero": not has_offset}
        spec = QuantSpec(*codes, quant_min=self.quant_min, **scales)
        return LinearSpec(spec, layout=smallest_layout(spec.dtype))


@register_recipe("gguf_q8_0")
class GgufQ8_0(_Affine):
    """Weights in Q8_0 of GGUF: int8, 8.5 bits a weight; `scale_rule` as in ggml by default."""

    dtype, mapping, quant_min = "int8", MappingType.SYMMETRIC, -127


@register_recipe("gguf_q5_0")
class GgufQ5_0(_Affine):
    """Weights in Q5_0 of GGUF: signed codes of 5 bits, 5.5 bits a weight; `scale_rule` as in ggml by default."""

    dtype, mapping = "int5", MappingType.SYMMETRIC_SIGNED


@register_recipe("gguf_q5_1")
class GgufQ5_1(_Affine):
    """Weights in Q5_1 of GGUF: codes of 5 bits and an offset, 6 bits a weight; `scale_rule` as in ggml by default."""

    dtype, mapping = "uint5", MappingType.ASYMMETRIC


@register_recipe("gguf_q4_0")
class GgufQ4_0(_Affine):
    """Weights in Q4_0 of GGUF: signed codes of 4 bits, 4.5 bits a weight; `scale_rule` as in ggml by default."""

    dtype, mapping = "int4", MappingType.SYMMETRIC_SIGNED


@register_recipe("gguf_q4_1")
class GgufQ4_1(_Affine):
    """Weights in Q4_1 of GGUF: codes of 4 bits and an offset, 5 bits a weight; `scale_rule` as in ggml by default."""

    dtype, mapping = "uint4", MappingType.ASYMMETRIC


@register_recipe("gguf_iq4_nl")
class GgufIQ4_NL(WeightRecipe):
    """Weights in IQ4_NL of GGUF: 4-bit codes of a table whose steps grow with the magnitude, 4.5 bits a weight."""

    def linear_spec(self) -> LinearSpec:
        # The table has no 0, so that only a scale of 0 keeps zeros.
        spec = CodebookSpec(qdtype("uint4"), PerGroup(BLOCK), IQ4_TABLE, scale_dtype=torch.float16, eps=0.0)
        return LinearSpec(spec, layout=smallest_layout(spec.dtype))


def scaled_codes(
    dtype: str, group: int, scale: torch.dtype | None = torch.float16, of_scale: str | None = None
) -> QuantSpec:
    """q * scale; `of_scale` is the type of scales that are codes."""
    none = ZeroPointDomain.NONE
    scale_spec = scaled_codes(of_scale, K // group) if of_scale else None
    return QuantSpec(qdtype(dtype), PerGroup(group), zero_point_domain=none, scale_dtype=scale, scale_spec=scale_spec)


def with_offset(
    dtype: str, group: int, scale: torch.dtype | None = torch.float16, of_scale: str | None = None
) -> QuantSpec:
    """q * scale + offset."""
    spec, offset = scaled_codes(dtype, group, scale, of_scale), ZeroPointDomain.OFFSET
    return replace(spec, mapping=MappingType.ASYMMETRIC, zero_point_domain=offset, preserve_zero=False)


@dataclass(frozen=True)
class _KType(WeightRecipe):
    of_type: ClassVar[QuantSpec]

    scale_rule: ScaleRule = MinMaxRule()

    def linear_spec(self) -> LinearSpec:
        assert self.of_type.scale_spec is not None
        of_scale = replace(self.of_type.scale_spec, eps=SMALLEST)
        spec = replace(self.of_type, scale_rule=self.scale_rule, scale_spec=of_scale)
        return LinearSpec(spec, layout=smallest_layout(spec.dtype))

    def check_form(self, weight: torch.Tensor) -> None:
        super().check_form(weight)
        if weight.shape[-1] % K:
            found = f"super-blocks of {K} do not divide a row of {weight.shape[-1]}"
            raise IndivisibleError(f"{self.name}: {found}; those of gguf_q4_0() have 32")


@register_recipe("gguf_q6_k")
class GgufQ6_K(_KType):
    """Weights in Q6_K of GGUF: signed codes of 6 bits, scales in 8, 6.5625 bits a weight; `scale_rule` of groups."""

    of_type = scaled_codes("int6", 16, None, "int8")


@register_recipe("gguf_q5_k")
class GgufQ5_K(_KType):
    """Weights in Q5_K of GGUF: codes of 5 bits and offsets, 5.5 bits a weight in a file; `scale_rule` of groups."""

    of_type = with_offset("uint5", 32, None, "uint6")


@register_recipe("gguf_q4_k")
class GgufQ4_K(_KType):
    """Weights in Q4_K of GGUF: codes of 4 bits and offsets, 4.5 bits a weight in a file; `scale_rule` of groups."""

    of_type = with_offset("uint4", 32, None, "uint6")


@register_recipe("gguf_q3_k")
class GgufQ3_K(_KType):
    """Weights in Q3_K of GGUF: signed codes of 3 bits, 3.4375 bits a weight in a file; `scale_rule` of groups."""

    of_type = scaled_codes("int3", 16, None, "int6")


@register_recipe("gguf_q2_k")
class GgufQ2_K(_KType):
    """Weights in Q2_K of GGUF: codes of 2 bits and offsets, 2.625 bits a weight in a file; `scale_rule` of groups."""

    of_type = with_offset("uint2", 16, None, "uint4")
