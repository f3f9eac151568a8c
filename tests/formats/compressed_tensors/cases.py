"""Recipes by the scheme in which vLLM serves their weights, and groups as the package itself writes them."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import qtorch
from qtorch import LinearSpec, MappingType, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec

SYMMETRIC, ASYMMETRIC, BF16 = MappingType.SYMMETRIC, MappingType.ASYMMETRIC, torch.bfloat16


class Case(NamedTuple):
    """A weight that is written.

    Attributes:
        recipe: a recipe, or a spec for what has none.
        served_as, expert_served_as: the scheme that vLLM takes for a linear layer and for an expert, None for none,
            without what all their names begin with.
        format: in which it is written.
    """

    recipe: qtorch.recipes.base.WeightRecipe | LinearSpec
    served_as: str
    format: str
    expert_served_as: str | None
    dtype: torch.dtype = BF16

    @property
    def id(self) -> str:
        return f"{self.recipe}, {self.dtype}"

    @property
    def scheme(self) -> str:
        return f"CompressedTensors{self.served_as}"

    @property
    def of_expert(self) -> str | None:
        return self.expert_served_as and f"CompressedTensors{self.expert_served_as}MoEMethod"

    def make(self, weight: torch.Tensor) -> Any:
        if isinstance(self.recipe, LinearSpec):
            return qtorch.AffineQuantizedTensor.from_float(weight.to(self.dtype), self.recipe)
        return self.recipe.apply(weight.to(self.dtype))


def asymmetric(dtype: str, granularity: Any) -> LinearSpec:
    spec = QuantSpec(dtype, granularity, ASYMMETRIC, scale_dtype=BF16)
    return LinearSpec(spec, layout=qtorch.PackedLayout() if spec.dtype.bits < 8 else None)


def float8(granularity: Any) -> QuantSpec:
    return QuantSpec("float8_e4m3fn", granularity, zero_point_domain=qtorch.ZeroPointDomain.NONE)


FLOAT8_BLOCKS = float8(PerBlock((32, 32)))
FLOAT8_GROUPS = replace(float8(PerGroup(32)), scale_dtype=torch.float32)
INT8_GROUPS = LinearSpec(QuantSpec("int8", PerGroup(32)), QuantSpec("int8", qtorch.PerToken(), quant_min=-127))
INT8_STATIC = "W8A8Int8(is_static_input_scheme=True)"
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, MXFP8, NVFP4 = "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"

CASES = [
    Case(qtorch.int8_weight_only(), "WNA16", PACKED, "WNA16", torch.float32),
    Case(qtorch.int8_weight_only(scale_dtype=BF16), "WNA16", PACKED, "WNA16"),
    Case(qtorch.int8_weight_only(scale_dtype=torch.float16), "WNA16", PACKED, "WNA16", torch.float16),
    *[Case(qtorch.intx_weight_only(f"int{bits}", 32), "WNA16", PACKED, "WNA16") for bits in range(2, 8)],
    Case(qtorch.intx_weight_only("int3", group_size=-1), "WNA16", PACKED, "WNA16"),
    Case(qtorch.intx_weight_only("int4", group_size=-1), "WNA16", PACKED, "WNA16", torch.float32),
    Case(qtorch.intx_weight_only("int4", 32, ASYMMETRIC), "WNA16", PACKED, "WNA16"),
    Case(qtorch.int4_weight_only(group_size=32), "WNA16", PACKED, "WNA16"),
    Case(qtorch.int4_weight_only(group_size=-1), "WNA16", PACKED, "WNA16", torch.float16),
    Case(asymmetric("uint8", PerGroup(32)), "WNA16", PACKED, "WNA16"),
    Case(asymmetric("uint8", PerRow()), "WNA16", PACKED, "WNA16"),
    Case(asymmetric("uint4", PerTensor()), "WNA16", PACKED, "WNA16"),
    Case(qtorch.int8_dynamic_activation_int8_weight(), "W8A8Int8", INT, "W8A8Int8"),
    Case(qtorch.int8_dynamic_activation_int8_weight(ASYMMETRIC), "W8A8Int8", INT, "W8A8Int8"),
    Case(qtorch.int8_static_activation_int8_weight(0.013), INT8_STATIC, INT, None),
    Case(qtorch.int8_dynamic_activation_int4_weight(), "W4A8Int", INT, "W4A8Int8"),
    Case(
        qtorch.int8_dynamic_activation_int4_weight(-1, act_mapping_type=MappingType.SYMMETRIC),
        "W4A8Int",
        INT,
        "W4A8Int8",
    ),
    Case(qtorch.int8_dynamic_activation_int4_weight(32, ASYMMETRIC, SYMMETRIC), "WNA8Int", PACKED, None),
    Case(INT8_GROUPS, "WNA8Int", PACKED, None),
    Case(qtorch.float8_dynamic_activation_int4_weight(group_size=32), "W4A8Fp8", PACKED, "W4A8Fp8"),
    Case(qtorch.float8_weight_only(), "W8A16Fp8", FLOAT, None),
    Case(qtorch.float8_weight_only(scale_dtype=BF16), "W8A16Fp8", FLOAT, None),
    Case(qtorch.float8_weight_only(granularity=PerTensor()), "W8A16Fp8", FLOAT, None),
    Case(LinearSpec(FLOAT8_BLOCKS), "W8A16Fp8", FLOAT, None),
    Case(LinearSpec(FLOAT8_BLOCKS, FLOAT8_GROUPS), "W8A8Fp8", FLOAT, "W8A8Fp8"),
    Case(qtorch.float8_dynamic_activation_float8_weight(), "W8A8Fp8", FLOAT, "W8A8Fp8"),
    Case(qtorch.float8_dynamic_activation_float8_weight(PerTensor()), "W8A8Fp8", FLOAT, "W8A8Fp8"),
    Case(qtorch.float8_static_activation_float8_weight(0.013), "W8A8Fp8", FLOAT, "W8A8Fp8"),
    Case(qtorch.mxfp4_weight_only(), "W4A4Mxfp4", MXFP4, "W4A4Mxfp4"),
    Case(qtorch.mxfp4_dynamic_activation_mxfp4_weight(), "W4A4Mxfp4", MXFP4, "W4A4Mxfp4"),
    Case(qtorch.mxfp8_weight_only(), "W8A8Mxfp8", MXFP8, "W8A8Mxfp8"),
    Case(qtorch.mxfp8_dynamic_activation_mxfp8_weight(), "W8A8Mxfp8", MXFP8, "W8A8Mxfp8"),
    Case(qtorch.nvfp4_weight_only(tensor_scale=2.0**-9), "W4A4Fp4(use_a16=True)", NVFP4, "W4A4Nvfp4"),
]


def args(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int{bits} in groups": (PACKED, args(bits, "int", "group", group_size=32)) for bits in range(2, 9)},
    **{f"asymmetric int{bits} in groups": (PACKED, args(bits, "int", "group", group_size=32, symmetric=False))
       for bits in range(2, 9)},
    **{f"int{bits} per channel": (PACKED, args(bits, "int", "channel")) for bits in (3, 4, 8)},
    "asymmetric int4 per channel": (PACKED, args(4, "int", "channel", symmetric=False)),
    "int8 per channel, in bytes": (INT, args(8, "int", "channel")),
    "int8 per tensor, in bytes": (INT, args(8, "int", "tensor")),
    "int4 in groups, in bytes": (INT, args(4, "int", "group", group_size=32)),
    "asymmetric int8 per channel, in bytes": (INT, args(8, "int", "channel", symmetric=False)),
    "naive int8": ("naive-quantized", args(8, "int", "channel")),
    "naive float8": ("naive-quantized", args(8, "float", "tensor")),
    "float8 per channel": (FLOAT, args(8, "float", "channel")),
    "float8 per tensor": (FLOAT, args(8, "float", "tensor")),
    "float8 in blocks": (FLOAT, args(8, "float", "block", block_structure=[32, 32])),
    "float8 in blocks beyond the edge": (FLOAT, args(8, "float", "block", block_structure=[64, 128])),
    "MXFP4": (MXFP4, args(4, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    "MXFP8": (MXFP8, args(8, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    "NVFP4": (NVFP4, args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")),
}  # fmt: skip
"""(format, arguments of the weight) of files that the package writes, by a word for them."""
