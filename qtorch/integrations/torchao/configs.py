"""The configurations of torchao 0.18 as functions of the same names and arguments. They return recipes of qtorch;
`FqnToConfig` returns a mapping. Both are what `quantize_` takes.

`set_inductor_config` and `version`, the version of torchao's tensor classes, are accepted everywhere and change
nothing. Whatever has no equivalent raises a `ValueError` that says so.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ... import recipes
from ...primitives import MappingType, PerAxis, PerGroup, PerRow, PerTensor
from ...recipes.base import Recipe, WeightRecipe
from . import functions, translate
from .functions import E4M3
from .translate import arguments, none, only, refuse

__all__ = [
    "AOPerModuleConfig", "Float8DynamicActivationFloat8WeightConfig", "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig", "Float8WeightOnlyConfig", "FqnToConfig", "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig", "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig", "Int8StaticActivationInt8WeightConfig", "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig", "MXDynamicActivationMXWeightConfig", "ModuleFqnToConfig", "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4WeightOnlyConfig", "UIntxWeightOnlyConfig",
]  # fmt: skip


def _rows(value: Any) -> Any:
    if value is not None and translate.granularity(value) != PerRow():
        raise ValueError("it has a scale per token and per output channel, PerRow()")


def Int8WeightOnlyConfig(
    group_size: int | None = None, granularity: Any = PerRow(), set_inductor_config: bool = True, version: int = 2
) -> WeightRecipe:
    """`int8_weight_only`."""
    if group_size is None and granularity is not None:
        return IntxWeightOnlyConfig(granularity=granularity)
    return recipes.int8_weight_only(group_size=group_size)


@arguments(
    int4_packing_format=only("plain", "tile_packed_to_4d", instead="the formats are plain, tile_packed_to_4d"),
    int4_choose_qparams_algorithm=only("tinygemm", "hqq"),
)
def Int4WeightOnlyConfig(
    group_size: int = 128, set_inductor_config: bool = True, int4_packing_format: Any = "plain",
    int4_choose_qparams_algorithm: Any = "tinygemm", int4_tile_packed_ntile: int = 8, version: int = 2,
) -> WeightRecipe:  # fmt: skip
    """`int4_weight_only`: with real zero points for the format ``"tile_packed_to_4d"``, else with integer ones."""
    use_hqq = int4_choose_qparams_algorithm == "hqq"
    if int4_packing_format == "plain":
        return recipes.int4_weight_only(group_size, use_hqq=use_hqq)
    return functions.int4_weight_only(group_size, use_hqq=use_hqq)


@arguments(granularity=_rows)
def Int8DynamicActivationInt8WeightConfig(
    act_mapping_type: Any = MappingType.SYMMETRIC, weight_only_decode: bool = False, granularity: Any = PerRow(),
    set_inductor_config: bool = True, version: int = 2, reduce_range: bool | None = False, layout: Any = None,
) -> WeightRecipe:  # fmt: skip
    """`int8_dynamic_activation_int8_weight`."""
    return functions.int8_dynamic_activation_int8_weight(layout, act_mapping_type, weight_only_decode)


@arguments(act_quant_zero_point=none, act_mapping_type=translate.symmetric)
def Int8StaticActivationInt8WeightConfig(
    act_quant_scale: torch.Tensor | float | None = None, act_quant_zero_point: Any = None,
    granularity: Any = PerTensor(), act_mapping_type: Any = MappingType.SYMMETRIC, set_inductor_config: bool = True,
    version: int = 1, reduce_range: bool | None = False,
) -> WeightRecipe:  # fmt: skip
    """`int8_static_activation_int8_weight`: one scale for the activation, one per row for the weight."""
    return recipes.int8_static_activation_int8_weight(act_quant_scale)  # type: ignore[arg-type]


@arguments(weight_granularity=translate.group_size)
def Int8DynamicActivationIntxWeightConfig(
    weight_dtype: torch.dtype = torch.int8, weight_granularity: Any = PerGroup(32),
    weight_mapping_type: Any = MappingType.SYMMETRIC, weight_scale_dtype: torch.dtype | None = None,
    act_mapping_type: Any = MappingType.ASYMMETRIC, intx_packing_format: Any = "unpacked_to_int8",
    intx_choose_qparams_algorithm: Any = "affine", version: int = 2,
) -> WeightRecipe:  # fmt: skip
    """`int8_dynamic_activation_int4_weight` for int4, `int8_dynamic_activation_int8_weight` for int8 per row."""
    if str(weight_dtype) == "torch.int4":
        return recipes.int8_dynamic_activation_int4_weight(weight_granularity, weight_mapping_type, act_mapping_type)
    if (weight_dtype, weight_granularity, weight_mapping_type) == (torch.int8, -1, MappingType.SYMMETRIC):
        return recipes.int8_dynamic_activation_int8_weight(act_mapping_type)
    instead = "recipes have torch.int4 in groups and torch.int8 per row; a LinearSpec describes the others"
    raise refuse("Int8DynamicActivationIntxWeightConfig", "weight_dtype", weight_dtype, instead)


def Int8DynamicActivationInt4WeightConfig(
    group_size: int = 32, act_mapping_type: Any = MappingType.ASYMMETRIC, set_inductor_config: bool = True, **more: Any
) -> WeightRecipe:
    """`int8_dynamic_activation_int4_weight`."""
    return functions.int8_dynamic_activation_int4_weight(group_size, act_mapping_type=act_mapping_type, **more)


@arguments(granularity=translate.group_size)
def IntxWeightOnlyConfig(
    weight_dtype: torch.dtype = torch.int8, granularity: Any = PerAxis(0), mapping_type: Any = MappingType.SYMMETRIC,
    scale_dtype: torch.dtype | None = None, intx_packing_format: Any = "unpacked_to_int8",
    intx_choose_qparams_algorithm: Any = "affine", version: int = 2,
) -> WeightRecipe:  # fmt: skip
    """`intx_weight_only` for 1 to 7 bits, `int8_weight_only` for 8."""
    if weight_dtype != torch.int8:
        return recipes.intx_weight_only(weight_dtype, granularity, mapping_type)
    if mapping_type is not MappingType.SYMMETRIC:
        raise refuse("IntxWeightOnlyConfig", "mapping_type", mapping_type, "int8 weights are SYMMETRIC")
    return recipes.int8_weight_only(group_size=None if granularity == -1 else granularity)


@arguments()
def UIntxWeightOnlyConfig(
    group_size: int | None = 128,
    bit_width: int = 4,
    packing_bitwidth: int | None = None,
    set_inductor_config: bool = True,
) -> WeightRecipe:
    """`uintx_weight_only`."""
    return recipes.uintx_weight_only(f"uint{bit_width}", -1 if group_size is None else group_size)


@arguments(granularity=translate.granularity)
def Float8WeightOnlyConfig(
    weight_dtype: torch.dtype = E4M3, set_inductor_config: bool = True, version: int = 2, granularity: Any = None
) -> WeightRecipe:
    """`float8_weight_only`."""
    return recipes.float8_weight_only(weight_dtype, granularity or PerRow())


@arguments(
    granularity=translate.granularity,
    packing_format=only("plain", "sparse_2d_data_2d_metadata", "sparse_1d_data_1d_metadata"),
    kernel_preference=translate.default_kernel,
)
def Float8DynamicActivationFloat8WeightConfig(
    activation_dtype: torch.dtype = E4M3, weight_dtype: torch.dtype = E4M3, granularity: Any = None,
    packing_format: Any = "plain", mm_config: Any = None, activation_value_lb: float | None = None,
    activation_value_ub: float | None = None, kernel_preference: Any = "auto", set_inductor_config: bool = True,
    version: int = 2, alg_id: int = 0,
) -> WeightRecipe:  # fmt: skip
    """`float8_dynamic_activation_float8_weight`, or its form with 2:4 sparsity for the sparse packing formats."""
    if packing_format == "plain":
        return functions.float8_dynamic_activation_float8_weight(activation_dtype, weight_dtype, granularity)
    return recipes.float8_dynamic_activation_float8_semi_sparse_weight(granularity or PerRow())


@arguments(
    granularity=translate.granularity,
    kernel_preference=translate.default_kernel,
    step=only(None, instead="docs/guides/static_activations.md shows how to calibrate"),
    quantize_and_dequantize_output=only(False),
)
def Float8StaticActivationFloat8WeightConfig(
    act_quant_scale: torch.Tensor | float | None = None, activation_dtype: torch.dtype = E4M3,
    weight_dtype: torch.dtype = E4M3, granularity: Any = None, mm_config: Any = None, kernel_preference: Any = "auto",
    set_inductor_config: bool = True, step: Any = None, quantize_and_dequantize_output: bool = False,
    output_act_quant_scale: Any = None,
) -> WeightRecipe:  # fmt: skip
    """`float8_static_activation_float8_weight`."""
    of_both = activation_dtype, weight_dtype
    return functions.float8_static_activation_float8_weight(act_quant_scale, *of_both, granularity)


def Float8DynamicActivationInt4WeightConfig(
    int4_packing_format: Any = "plain", group_size: int = 128, **more: Any
) -> WeightRecipe:
    """`float8_dynamic_activation_int4_weight`; the packing formats, which differ in memory only, are one."""
    return recipes.float8_dynamic_activation_int4_weight(group_size=group_size, **more)


@arguments(block_size=only(32))
def MXDynamicActivationMXWeightConfig(
    block_size: int = 32, activation_dtype: torch.dtype = E4M3, weight_dtype: torch.dtype = E4M3,
    kernel_preference: Any = "auto", scaling_mode: Any = "floor",
) -> WeightRecipe:  # fmt: skip
    """`mxfp8_dynamic_activation_mxfp8_weight` or `mxfp4_dynamic_activation_mxfp4_weight`."""
    name = "MXDynamicActivationMXWeightConfig"
    if activation_dtype != weight_dtype:
        raise refuse(name, "activation_dtype", activation_dtype, "activation and weight have the same format")
    if weight_dtype == E4M3:
        return recipes.mxfp8_dynamic_activation_mxfp8_weight()
    if weight_dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return recipes.mxfp4_dynamic_activation_mxfp4_weight()
    raise refuse(name, "weight_dtype", weight_dtype, "it is torch.float8_e4m3fn or torch.float4_e2m1fn_x2")


@arguments(step=none)
def NVFP4DynamicActivationNVFP4WeightConfig(
    use_triton_kernel: bool = True, use_dynamic_per_tensor_scale: bool = True, step: Any = None
) -> WeightRecipe:
    """`nvfp4_dynamic_activation_nvfp4_weight`."""
    return recipes.nvfp4_dynamic_activation_nvfp4_weight()


@arguments()
def NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale: bool = True) -> WeightRecipe:
    """`nvfp4_weight_only`."""
    return recipes.nvfp4_weight_only()


@arguments(scaler_block_size=only(256))
def NF4WeightOnlyConfig(block_size: int = 64, scaler_block_size: int = 256) -> WeightRecipe:
    """`nf4_weight_only`."""
    return recipes.nf4_weight_only(block_size)


def FqnToConfig(
    fqn_to_config: Mapping[str, Recipe | None] | None = None,
    module_fqn_to_config: Mapping[str, Recipe | None] | None = None,
    version: int = 1,
) -> dict[str, Recipe | None]:
    """The mapping that `quantize_` takes: names come first, as in torchao, then regular expressions, without their
    ``re:``, then ``_default`` as ``.*``."""
    given = fqn_to_config or module_fqn_to_config or {}
    names = {key: value for key, value in given.items() if not key.startswith("re:") and key != "_default"}
    patterns = {key.removeprefix("re:"): value for key, value in given.items() if key.startswith("re:")}
    default = {".*": given["_default"]} if given.get("_default") is not None else {}
    return {**names, **patterns, **default}


ModuleFqnToConfig = AOPerModuleConfig = FqnToConfig
