"""int4 weights in groups; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import Layout, PackedLayout
from ..primitives import LinearSpec, MinMaxRule, ScaleRule, ZeroPointDomain, qdtype
from ..recipe import WeightRecipe, register_recipe
from .intx_weight_only import rule_or_hqq, unsigned_spec


@register_recipe("int4_weight_only")
@dataclass(frozen=True)
class Int4WeightOnly(WeightRecipe):
    """Weights in asymmetric 4-bit codes, with a scale and a zero point per group of input channels.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        zero_point_domain: INT, zero points are codes; FLOAT, the convention of the tinygemm kernels; see
            `ZeroPointDomain` for others.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory: `PackedLayout()`, half a byte per code; `TensorCoreTiledLayout()`, the
            same for the tinygemm kernels, which needs the FLOAT domain and groups of 32, 64, 128 or 256.
        use_hqq: short for `scale_rule=HQQRule()`.

    Raises:
        ValueError: the layout cannot hold such weights, or use_hqq is given with another scale rule.
    """

    group_size: int = 128
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    use_hqq: bool = False

    def linear_spec(self) -> LinearSpec:
        rule = rule_or_hqq(self.scale_rule, self.use_hqq, self.name)
        return unsigned_spec(qdtype("uint4"), self.group_size, self.zero_point_domain, rule, self.layout)


int4_weight_only = Int4WeightOnly
