"""Recipes by the scheme in which vLLM serves their weights, and groups as the package itself writes them."""

from typing import Any, NamedTuple

import torch

from qtorch import (
    AffineQuantizedTensor,
    LinearSpec,
    MappingType,
    PackedLayout,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    QuantSpec,
    ZeroPointDomain,
    float8_dynamic_activation_float8_weight,
    float8_dynamic_activation_int4_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_static_activation_int8_weight,
    int8_weight_only,
    intx_weight_only,
    mxfp4_dynamic_activation_mxfp4_weight,
    mxfp4_weight_only,
    mxfp8_dynamic_activation_mxfp8_weight,
    mxfp8_weight_only,
    nvfp4_weight_only,
)
from qtorch.primitives import qdtype
from qtorch.recipes.base import WeightRecipe

BF16 = torch.bfloat16


class Case(NamedTuple):
    """A weight that is written.

    Attributes:
        recipe: a recipe, or a spec for what has none.
        scheme, of_expert: that vLLM takes for a linear layer and for an expert; None for none.
        format: in which it is written.
        kernel: that runs on a CPU when the weight has been read, None where that depends on the machine.
    """

    recipe: WeightRecipe | LinearSpec
    scheme: str
    format: str
    of_expert: str | None
    dtype: torch.dtype = BF16

    @property
    def id(self) -> str:
        return f"{self.recipe}, {self.dtype}"

    def make(self, weight: torch.Tensor) -> Any:
        if isinstance(self.recipe, LinearSpec):
            return AffineQuantizedTensor.from_float(weight.to(self.dtype), self.recipe)
        return self.recipe.apply(weight.to(self.dtype))


def asymmetric(dtype: str, granularity: Any) -> LinearSpec:
    spec = QuantSpec(qdtype(dtype), granularity, MappingType.ASYMMETRIC, scale_dtype=BF16)
    return LinearSpec(spec, layout=PackedLayout() if qdtype(dtype).bits < 8 else None)


def blocks(activation: bool) -> LinearSpec:
    none, e4m3 = ZeroPointDomain.NONE, qdtype("float8_e4m3fn")
    inputs = QuantSpec(e4m3, PerGroup(32), zero_point_domain=none) if activation else None
    return LinearSpec(QuantSpec(e4m3, PerBlock((32, 32)), zero_point_domain=none), inputs)


def int8_groups_with_int8_inputs() -> LinearSpec:
    return LinearSpec(QuantSpec(qdtype("int8"), PerGroup(32)), QuantSpec(qdtype("int8"), PerToken(), quant_min=-127))


WNA16, WNA16_EXPERTS = "CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
W8A16_FP8 = "CompressedTensorsW8A16Fp8"
W8A8_FP8, W8A8_FP8_EXPERTS = "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Fp8MoEMethod"

CASES = [
    Case(int8_weight_only(), WNA16, PACKED, WNA16_EXPERTS, torch.float32),
    Case(int8_weight_only(scale_dtype=BF16), WNA16, PACKED, WNA16_EXPERTS),
    Case(int8_weight_only(scale_dtype=torch.float16), WNA16, PACKED, WNA16_EXPERTS, torch.float16),
    *[Case(intx_weight_only(f"int{bits}", group_size=32), WNA16, PACKED, WNA16_EXPERTS) for bits in range(2, 8)],
    Case(intx_weight_only("int3", group_size=-1), WNA16, PACKED, WNA16_EXPERTS),
    Case(intx_weight_only("int4", group_size=-1), WNA16, PACKED, WNA16_EXPERTS, torch.float32),
    Case(intx_weight_only("int4", 32, MappingType.ASYMMETRIC), WNA16, PACKED, WNA16_EXPERTS),
    Case(int4_weight_only(group_size=32), WNA16, PACKED, WNA16_EXPERTS),
    Case(int4_weight_only(group_size=-1), WNA16, PACKED, WNA16_EXPERTS, torch.float16),
    Case(asymmetric("uint8", PerGroup(32)), WNA16, PACKED, WNA16_EXPERTS),
    Case(asymmetric("uint8", PerRow()), WNA16, PACKED, WNA16_EXPERTS),
    Case(asymmetric("uint4", PerTensor()), WNA16, PACKED, WNA16_EXPERTS),
    Case(
        int8_dynamic_activation_int8_weight(),
        "CompressedTensorsW8A8Int8",
        INT,
        "CompressedTensorsW8A8Int8MoEMethod",
    ),
    Case(
        int8_dynamic_activation_int8_weight(MappingType.ASYMMETRIC),
        "CompressedTensorsW8A8Int8",
        INT,
        "CompressedTensorsW8A8Int8MoEMethod",
    ),
    Case(
        int8_static_activation_int8_weight(0.013),
        "CompressedTensorsW8A8Int8(is_static_input_scheme=True)",
        INT,
        None,
    ),
    Case(
        int8_dynamic_activation_int4_weight(),
        "CompressedTensorsW4A8Int",
        INT,
        "CompressedTensorsW4A8Int8MoEMethod",
    ),
    Case(
        int8_dynamic_activation_int4_weight(-1, act_mapping_type=MappingType.SYMMETRIC),
        "CompressedTensorsW4A8Int",
        INT,
        "CompressedTensorsW4A8Int8MoEMethod",
    ),
    Case(
        int8_dynamic_activation_int4_weight(32, MappingType.ASYMMETRIC, MappingType.SYMMETRIC),
        "CompressedTensorsWNA8Int",
        PACKED,
        None,
    ),
    Case(int8_groups_with_int8_inputs(), "CompressedTensorsWNA8Int", PACKED, None),
    Case(
        float8_dynamic_activation_int4_weight(group_size=32),
        "CompressedTensorsW4A8Fp8",
        PACKED,
        "CompressedTensorsW4A8Fp8MoEMethod",
    ),
    Case(float8_weight_only(), W8A16_FP8, FLOAT, None),
    Case(float8_weight_only(scale_dtype=BF16), W8A16_FP8, FLOAT, None),
    Case(float8_weight_only(granularity=PerTensor()), W8A16_FP8, FLOAT, None),
    Case(blocks(activation=False), W8A16_FP8, FLOAT, None),
    Case(blocks(activation=True), W8A8_FP8, FLOAT, W8A8_FP8_EXPERTS),
    Case(float8_dynamic_activation_float8_weight(), W8A8_FP8, FLOAT, W8A8_FP8_EXPERTS),
    Case(float8_dynamic_activation_float8_weight(PerTensor()), W8A8_FP8, FLOAT, W8A8_FP8_EXPERTS),
    Case(float8_static_activation_float8_weight(0.013), W8A8_FP8, FLOAT, W8A8_FP8_EXPERTS),
    Case(
        mxfp4_weight_only(),
        "CompressedTensorsW4A4Mxfp4",
        "mxfp4-pack-quantized",
        "CompressedTensorsW4A4Mxfp4MoEMethod",
    ),
    Case(
        mxfp4_dynamic_activation_mxfp4_weight(),
        "CompressedTensorsW4A4Mxfp4",
        "mxfp4-pack-quantized",
        "CompressedTensorsW4A4Mxfp4MoEMethod",
    ),
    Case(mxfp8_weight_only(), "CompressedTensorsW8A8Mxfp8", "mxfp8-quantized", "CompressedTensorsW8A8Mxfp8MoEMethod"),
    Case(
        mxfp8_dynamic_activation_mxfp8_weight(),
        "CompressedTensorsW8A8Mxfp8",
        "mxfp8-quantized",
        "CompressedTensorsW8A8Mxfp8MoEMethod",
    ),
    Case(
        nvfp4_weight_only(tensor_scale=2.0**-9),
        "CompressedTensorsW4A4Fp4(use_a16=True)",
        "nvfp4-pack-quantized",
        "CompressedTensorsW4A4Nvfp4MoEMethod",
    ),
]


def args(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int{bits} in groups": (PACKED, args(bits, "int", "group", group_size=32)) for bits in range(2, 9)},
    **{
        f"asymmetric int{bits} in groups": (PACKED, args(bits, "int", "group", group_size=32, symmetric=False))
        for bits in range(2, 9)
    },
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
    "MXFP4": ("mxfp4-pack-quantized", args(4, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    "MXFP8": ("mxfp8-quantized", args(8, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    "NVFP4": (
        "nvfp4-pack-quantized",
        args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
    ),
}
"""(format, arguments of the weight) of files that the package writes, by a word for them."""
