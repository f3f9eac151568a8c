"""float8 weights, one scale per output channel; activations stay in their floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, PerRow, PerTensor, QDType, QuantSpec, ZeroPointDomain, qdtype
from ..recipe import WeightRecipe, register_recipe


def float8_type(dtype: torch.dtype, recipe: str) -> QDType:
    """The `QDType` of `dtype`, which must be a float8 type.

    Raises:
        ValueError: it is not; the message names `recipe`.
    """
    found = qdtype(dtype)
    if not found.name.startswith("float8_"):
        raise ValueError(f"{recipe} takes float8_e4m3fn, float8_e5m2 and their fnuz forms, got {found.name}")
    return found


def row_or_tensor(granularity: Granularity, recipe: str) -> Granularity:
    """`granularity`, which must be `PerRow()` or `PerTensor()`.

    Raises:
        ValueError: it is neither; the message names `recipe`.
    """
    if not isinstance(granularity, PerRow | PerTensor):
        raise ValueError(f"{recipe}: granularity is PerRow() or PerTensor(), got {granularity}")
    return granularity


@register_recipe("float8_weight_only")
@dataclass(frozen=True)
class Float8WeightOnly(WeightRecipe):
    """Weights in float8, with the largest magnitude of a channel at the largest code.

    Args:
        dtype: a float8 dtype of torch.
        granularity: which elements share a scale.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).

    Raises:
        ValueError: the dtype is not float8.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerRow()
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        dtype = float8_type(self.dtype, self.name)
        none, scale_dtype = ZeroPointDomain.NONE, self.scale_dtype
        return LinearSpec(QuantSpec(dtype, self.granularity, zero_point_domain=none, scale_dtype=scale_dtype))


float8_weight_only = Float8WeightOnly
