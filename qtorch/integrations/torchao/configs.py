"""The configurations of torchao 0.18 as functions of the same names and arguments. They return recipes of qtorch;
`FqnToConfig` returns a mapping. Both are what `quantize_` takes.

`set_inductor_config` and `version`, the version of torchao's tensor classes, are accepted everywhere and change
nothing. Whatever has no equivalent raises a `ValueError` that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import recipes
from ...dtypes import PackedLayout, TensorCoreTiledLayout
from ...primitives import MappingType, PerAxis, PerGroup, PerRow, PerTensor, ZeroPointDomain
from ...recipes.base import Recipe, WeightRecipe
from . import functions
from .functions import E4M3
from .translate import granularity_of, group_size_of, mapping_of, only, refuse, scale_of, word

made: Any = recipes
"""The recipes; they are attributes that a type checker does not see."""


def Int8WeightOnlyConfig(
    group_size: int | None = None, granularity: Any = PerRow(), set_inductor_config: bool = True, version: int = 2
) -> WeightRecipe:
    """`int8_weight_only`."""
    if group_size is None and granularity is not None:
        size = group_size_of("Int8WeightOnlyConfig", "granularity", granularity)
        group_size = None if size == -1 else size
    return functions.int8_weight_only(group_size)


def Int4WeightOnlyConfig(
    group_size: int = 128,
    set_inductor_config: bool = True,
    int4_packing_format: Any = "plain",
    int4_choose_qparams_algorithm: Any = "tinygemm",
    int4_tile_packed_ntile: int = 8,
    version: int = 2,
) -> WeightRecipe:
    """`int4_weight_only`: with real zero points for the format ``"tile_packed_to_4d"``, else with integer ones."""
    name = "Int4WeightOnlyConfig"
    formats = ("plain", "tile_packed_to_4d")
    only(name, "int4_packing_format", int4_packing_format, formats, f"the formats are {', '.join(formats)}")
    only(name, "int4_choose_qparams_algorithm", int4_choose_qparams_algorithm, ("tinygemm", "hqq"))
    tiled = word(int4_packing_format) != "plain"
    arguments = {
        "zero_point_domain": ZeroPointDomain.FLOAT if tiled else ZeroPointDomain.INT,
        "layout": TensorCoreTiledLayout() if tiled else PackedLayout(),
        "use_hqq": word(int4_choose_qparams_algorithm) == "hqq",
    }
    recipe: WeightRecipe = made.int4_weight_only(group_size=group_size, **arguments)
    return recipe


def Int8DynamicActivationInt8WeightConfig(
    act_mapping_type: Any = MappingType.SYMMETRIC,
    weight_only_decode: bool = False,
    granularity: Any = PerRow(),
    set_inductor_config: bool = True,
    version: int = 2,
    reduce_range: bool | None = False,
    layout: Any = None,
) -> WeightRecipe:
    """`int8_dynamic_activation_int8_weight`."""
    name = "Int8DynamicActivationInt8WeightConfig"
    _only_rows(name, granularity)
    only(name, "reduce_range", bool(reduce_range), (False,))
    return functions.int8_dynamic_activation_int8_weight(layout, act_mapping_type, weight_only_decode)


def Int8StaticActivationInt8WeightConfig(
    act_quant_scale: torch.Tensor | float | None = None,
    act_quant_zero_point: Any = None,
    granularity: Any = PerTensor(),
    act_mapping_type: Any = MappingType.SYMMETRIC,
    set_inductor_config: bool = True,
    version: int = 1,
    reduce_range: bool | None = False,
) -> WeightRecipe:
    """`int8_static_activation_int8_weight`: one scale for the activation, one per row for the weight."""
    name = "Int8StaticActivationInt8WeightConfig"
    only(name, "act_quant_zero_point", act_quant_zero_point, (None,))
    only(name, "act_mapping_type", mapping_of(name, "act_mapping_type", act_mapping_type), (MappingType.SYMMETRIC,))
    only(name, "reduce_range", bool(reduce_range), (False,))
    recipe: WeightRecipe = made.int8_static_activation_int8_weight(scale_of(name, "act_quant_scale", act_quant_scale))
    return recipe


def Int8DynamicActivationIntxWeightConfig(
    weight_dtype: torch.dtype = torch.int8,
    weight_granularity: Any = PerGroup(32),
    weight_mapping_type: Any = MappingType.SYMMETRIC,
    weight_scale_dtype: torch.dtype | None = None,
    act_mapping_type: Any = MappingType.ASYMMETRIC,
    intx_packing_format: Any = "unpacked_to_int8",
    intx_choose_qparams_algorithm: Any = "affine",
    version: int = 2,
) -> WeightRecipe:
    """`int8_dynamic_activation_int4_weight` for int4, `int8_dynamic_activation_int8_weight` for int8 per row."""
    name = "Int8DynamicActivationIntxWeightConfig"
    _only_plain_intx(name, weight_scale_dtype, intx_packing_format, intx_choose_qparams_algorithm)
    size = group_size_of(name, "weight_granularity", weight_granularity)
    mapping = mapping_of(name, "weight_mapping_type", weight_mapping_type)
    of_input = mapping_of(name, "act_mapping_type", act_mapping_type)
    if str(weight_dtype) == "torch.int4":
        return functions.int8_dynamic_activation_int4_weight(size, None, mapping, of_input)
    if weight_dtype == torch.int8 and size == -1 and mapping is MappingType.SYMMETRIC:
        return functions.int8_dynamic_activation_int8_weight(None, of_input)
    instead = "recipes have torch.int4 in groups and torch.int8 per row; a LinearSpec describes the others"
    raise refuse(name, "weight_dtype", weight_dtype, instead)


def Int8DynamicActivationInt4WeightConfig(
    group_size: int = 32, act_mapping_type: Any = MappingType.ASYMMETRIC, set_inductor_config: bool = True, **more: Any
) -> WeightRecipe:
    """`int8_dynamic_activation_int4_weight`."""
    return functions.int8_dynamic_activation_int4_weight(group_size, act_mapping_type=act_mapping_type, **more)


def IntxWeightOnlyConfig(
    weight_dtype: torch.dtype = torch.int8,
    granularity: Any = PerAxis(0),
    mapping_type: Any = MappingType.SYMMETRIC,
    scale_dtype: torch.dtype | None = None,
    intx_packing_format: Any = "unpacked_to_int8",
    intx_choose_qparams_algorithm: Any = "affine",
    version: int = 2,
) -> WeightRecipe:
    """`intx_weight_only` for 1 to 7 bits, `int8_weight_only` for 8."""
    name = "IntxWeightOnlyConfig"
    _only_plain_intx(name, scale_dtype, intx_packing_format, intx_choose_qparams_algorithm)
    size = group_size_of(name, "granularity", granularity)
    mapping = mapping_of(name, "mapping_type", mapping_type)
    if weight_dtype == torch.int8:
        only(name, "mapping_type", mapping, (MappingType.SYMMETRIC,))
        return functions.int8_weight_only(None if size == -1 else size)
    recipe: WeightRecipe = made.intx_weight_only(weight_dtype, group_size=size, mapping_type=mapping)
    return recipe


def UIntxWeightOnlyConfig(
    group_size: int | None = 128,
    bit_width: int = 4,
    packing_bitwidth: int | None = None,
    set_inductor_config: bool = True,
) -> WeightRecipe:
    """`uintx_weight_only`."""
    only("UIntxWeightOnlyConfig", "packing_bitwidth", packing_bitwidth, (None,))
    recipe: WeightRecipe = made.uintx_weight_only(f"uint{bit_width}", -1 if group_size is None else group_size)
    return recipe


def Float8WeightOnlyConfig(
    weight_dtype: torch.dtype = E4M3, set_inductor_config: bool = True, version: int = 2, granularity: Any = None
) -> WeightRecipe:
    """`float8_weight_only`."""
    kind = PerRow() if granularity is None else granularity_of("Float8WeightOnlyConfig", "granularity", granularity)
    recipe: WeightRecipe = made.float8_weight_only(weight_dtype, kind)
    return recipe


def Float8DynamicActivationFloat8WeightConfig(
    activation_dtype: torch.dtype = E4M3,
    weight_dtype: torch.dtype = E4M3,
    granularity: Any = None,
    packing_format: Any = "plain",
    mm_config: Any = None,
    activation_value_lb: float | None = None,
    activation_value_ub: float | None = None,
    kernel_preference: Any = "auto",
    set_inductor_config: bool = True,
    version: int = 2,
    alg_id: int = 0,
) -> WeightRecipe:
    """`float8_dynamic_activation_float8_weight`, or its form with 2:4 sparsity for the sparse packing formats."""
    name = "Float8DynamicActivationFloat8WeightConfig"
    only(name, "activation_value_lb", activation_value_lb, (None,))
    only(name, "activation_value_ub", activation_value_ub, (None,))
    only(name, "kernel_preference", kernel_preference, ("auto",), "qtorch.explain shows which kernel runs")
    if word(packing_format) == "plain":
        mm = None if _is_default_mm(mm_config) else mm_config
        return functions.float8_dynamic_activation_float8_weight(activation_dtype, weight_dtype, granularity, mm)
    only(name, "packing_format", packing_format, ("sparse_2d_data_2d_metadata", "sparse_1d_data_1d_metadata"))
    kind = PerRow() if granularity is None else granularity_of(name, "granularity", granularity)
    recipe: WeightRecipe = made.float8_dynamic_activation_float8_semi_sparse_weight(kind)
    return recipe


def Float8StaticActivationFloat8WeightConfig(
    act_quant_scale: torch.Tensor | float | None = None,
    activation_dtype: torch.dtype = E4M3,
    weight_dtype: torch.dtype = E4M3,
    granularity: Any = None,
    mm_config: Any = None,
    kernel_preference: Any = "auto",
    set_inductor_config: bool = True,
    step: Any = None,
    quantize_and_dequantize_output: bool = False,
    output_act_quant_scale: Any = None,
) -> WeightRecipe:
    """`float8_static_activation_float8_weight`."""
    name = "Float8StaticActivationFloat8WeightConfig"
    only(name, "kernel_preference", kernel_preference, ("auto",), "qtorch.explain shows which kernel runs")
    only(name, "step", step, (None,), "docs/guides/static_activations.md shows how to calibrate")
    only(name, "quantize_and_dequantize_output", quantize_and_dequantize_output, (False,))
    only(name, "output_act_quant_scale", output_act_quant_scale, (None,))
    mm = None if _is_default_mm(mm_config) else mm_config
    scale = scale_of(name, "act_quant_scale", act_quant_scale)
    return functions.float8_static_activation_float8_weight(scale, activation_dtype, weight_dtype, granularity, mm)


def Float8DynamicActivationInt4WeightConfig(
    int4_packing_format: Any = "plain", group_size: int = 128, **more: Any
) -> WeightRecipe:
    """`float8_dynamic_activation_int4_weight`; the packing formats, which differ in memory only, are one."""
    recipe: WeightRecipe = made.float8_dynamic_activation_int4_weight(group_size=group_size, **more)
    return recipe


def MXDynamicActivationMXWeightConfig(
    block_size: int = 32,
    activation_dtype: torch.dtype = E4M3,
    weight_dtype: torch.dtype = E4M3,
    kernel_preference: Any = "auto",
    scaling_mode: Any = "floor",
) -> WeightRecipe:
    """`mxfp8_dynamic_activation_mxfp8_weight` or `mxfp4_dynamic_activation_mxfp4_weight`."""
    name = "MXDynamicActivationMXWeightConfig"
    only(name, "block_size", block_size, (32,))
    only(name, "activation_dtype", activation_dtype, (weight_dtype,), "activation and weight have the same format")
    known = {E4M3: made.mxfp8_dynamic_activation_mxfp8_weight}
    if (float4 := getattr(torch, "float4_e2m1fn_x2", None)) is not None:
        known[float4] = made.mxfp4_dynamic_activation_mxfp4_weight
    if weight_dtype not in known:
        raise refuse(name, "weight_dtype", weight_dtype, f"it is one of {', '.join(map(str, known))}")
    recipe: WeightRecipe = known[weight_dtype]()
    return recipe


def NVFP4DynamicActivationNVFP4WeightConfig(
    use_triton_kernel: bool = True, use_dynamic_per_tensor_scale: bool = True, step: Any = None
) -> WeightRecipe:
    """`nvfp4_dynamic_activation_nvfp4_weight`."""
    only(
        "NVFP4DynamicActivationNVFP4WeightConfig", "use_dynamic_per_tensor_scale", use_dynamic_per_tensor_scale, (True,)
    )
    only("NVFP4DynamicActivationNVFP4WeightConfig", "step", step, (None,))
    recipe: WeightRecipe = made.nvfp4_dynamic_activation_nvfp4_weight()
    return recipe


def NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale: bool = True) -> WeightRecipe:
    """`nvfp4_weight_only`."""
    only("NVFP4WeightOnlyConfig", "use_dynamic_per_tensor_scale", use_dynamic_per_tensor_scale, (True,))
    recipe: WeightRecipe = made.nvfp4_weight_only()
    return recipe


def NF4WeightOnlyConfig(block_size: int = 64, scaler_block_size: int = 256) -> WeightRecipe:
    """`nf4_weight_only`."""
    only("NF4WeightOnlyConfig", "scaler_block_size", scaler_block_size, (256,))
    recipe: WeightRecipe = made.nf4_weight_only(block_size)
    return recipe


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


def _only_rows(name: str, granularity: Any) -> None:
    if granularity is not None and granularity_of(name, "granularity", granularity) != PerRow():
        raise refuse(name, "granularity", granularity, "it has a scale per token and per output channel, PerRow()")


def _only_plain_intx(name: str, scale_dtype: Any, packing_format: Any, algorithm: Any) -> None:
    only(name, "scale_dtype", scale_dtype, (None,))
    only(name, "intx_packing_format", packing_format, ("unpacked_to_int8",), "use layout=... of the recipe")
    only(name, "intx_choose_qparams_algorithm", algorithm, ("affine",), "use use_hqq=True of intx_weight_only")


def _is_default_mm(config: Any) -> bool:
    """Whether a `Float8MMConfig` of torchao changes no more than speed."""
    return config is None or not (getattr(config, "emulate", False) or getattr(config, "pad_inner_dim", False))
