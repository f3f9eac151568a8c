"""The functions of torchao 0.6 and 0.7 that make configurations, with their arguments. They return recipes of qtorch.

`set_inductor_config`, which later versions added, is accepted everywhere: qtorch does not change the configuration of
inductor. Whatever has no equivalent raises a `ValueError` that says so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import quantize_api, recipes
from ...calibration.allocation import fastest
from ...dtypes import Layout, PackedLayout, SemiSparseLayout, TensorCoreTiledLayout
from ...primitives import MappingType, PerRow, PerTensor, ZeroPointDomain
from ...recipes.base import WeightRecipe
from . import translate
from .translate import arguments, only, refuse

__all__ = [
    "ALL_AUTOQUANT_CLASS_LIST", "DEFAULT_AUTOQUANT_CLASS_LIST", "DEFAULT_INT4_AUTOQUANT_CLASS_LIST",
    "OTHER_AUTOQUANT_CLASS_LIST", "autoquant", "float8_dynamic_activation_float8_weight",
    "float8_static_activation_float8_weight", "float8_weight_only", "fpx_weight_only", "int4_weight_only",
    "int8_dynamic_activation_int4_weight", "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight", "int8_weight_only", "uintx_weight_only",
]  # fmt: skip

E4M3 = torch.float8_e4m3fn


def int8_weight_only(group_size: int | None = None, set_inductor_config: bool = True) -> WeightRecipe:
    """`qtorch.int8_weight_only`: a scale per row, or per group."""
    return recipes.int8_weight_only(group_size=group_size)


@arguments()
def int4_weight_only(
    group_size: int = 128, layout: Any = None, use_hqq: bool = False, zero_point_domain: Any = None,
    set_inductor_config: bool = True, *, layout_type: Any = None,
) -> WeightRecipe:  # fmt: skip
    """`qtorch.int4_weight_only` with real zero points, as in torchao, whose default layout is that of tinygemm."""
    found = _layout("int4_weight_only", layout, layout_type) or TensorCoreTiledLayout()
    if found.name not in ("tensor_core_tiled", "packed"):
        raise refuse("int4_weight_only", "layout", found, "TensorCoreTiledLayout or PackedLayout")
    domain = ZeroPointDomain[getattr(zero_point_domain, "name", "FLOAT")]
    return recipes.int4_weight_only(group_size, domain, layout=found, use_hqq=use_hqq)


@arguments()
def int8_dynamic_activation_int4_weight(
    group_size: int = 32, layout: Any = None, mapping_type: Any = MappingType.SYMMETRIC,
    act_mapping_type: Any = MappingType.ASYMMETRIC, set_inductor_config: bool = True,
) -> WeightRecipe:  # fmt: skip
    """`qtorch.int8_dynamic_activation_int4_weight`."""
    found = layout or PackedLayout()
    return recipes.int8_dynamic_activation_int4_weight(group_size, mapping_type, act_mapping_type, layout=found)


@arguments(weight_only_decode=only(False))
def int8_dynamic_activation_int8_weight(
    layout: Any = None, act_mapping_type: Any = MappingType.SYMMETRIC, weight_only_decode: bool = False,
    set_inductor_config: bool = True, *, layout_type: Any = None,
) -> WeightRecipe:  # fmt: skip
    """`qtorch.int8_dynamic_activation_int8_weight`, or its form with 2:4 sparsity for the semi-sparse layout."""
    name = "int8_dynamic_activation_int8_weight"
    found = _layout(name, layout, layout_type)
    if found is None:
        return recipes.int8_dynamic_activation_int8_weight(act_mapping_type)
    if found != SemiSparseLayout():
        raise refuse(name, "layout", found, "it has the plain and the semi-sparse layout")
    return recipes.int8_dynamic_activation_int8_semi_sparse_weight(act_mapping_type)


int8_dynamic_activation_int8_semi_sparse_weight = recipes.int8_dynamic_activation_int8_semi_sparse_weight
"""It also prunes."""


def float8_weight_only(weight_dtype: torch.dtype = E4M3, set_inductor_config: bool = True) -> WeightRecipe:
    """`qtorch.float8_weight_only`."""
    return recipes.float8_weight_only(weight_dtype)


@arguments(granularity=translate.granularity)
def float8_dynamic_activation_float8_weight(
    activation_dtype: torch.dtype = E4M3, weight_dtype: torch.dtype = E4M3, granularity: Any = None,
    mm_config: Any = None, set_inductor_config: bool = True,
) -> WeightRecipe:  # fmt: skip
    """`qtorch.float8_dynamic_activation_float8_weight`; the default is a scale per tensor, as in torchao."""
    return recipes.float8_dynamic_activation_float8_weight(granularity or PerTensor(), activation_dtype, weight_dtype)


@arguments(granularity=translate.granularity)
def float8_static_activation_float8_weight(
    scale: torch.Tensor | float | None = None, activation_dtype: torch.dtype = E4M3, weight_dtype: torch.dtype = E4M3,
    granularity: Any = None, mm_config: Any = None, set_inductor_config: bool = True,
) -> WeightRecipe:  # fmt: skip
    """`qtorch.float8_static_activation_float8_weight`."""
    found = granularity or PerTensor()
    return recipes.float8_static_activation_float8_weight(scale, activation_dtype, weight_dtype, found)  # type: ignore[arg-type]


@arguments(pack_dim=only(-1))
def uintx_weight_only(
    dtype: Any, group_size: int = 64, pack_dim: int = -1, use_hqq: bool = False, set_inductor_config: bool = True
) -> WeightRecipe:
    """`qtorch.uintx_weight_only`."""
    return recipes.uintx_weight_only(dtype, group_size, use_hqq=use_hqq)


def fpx_weight_only(ebits: int, mbits: int, set_inductor_config: bool = True) -> WeightRecipe:
    """`qtorch.fpx_weight_only`."""
    return recipes.fpx_weight_only(ebits, mbits)


def _layout(function: str, layout: Layout | None, layout_type: Layout | None) -> Layout | None:
    """The layout, which torchao 0.6 calls `layout_type`."""
    if layout is not None and layout_type is not None:
        raise ValueError(f"{function}: layout and layout_type are two names of one argument, got both")
    return layout or layout_type


_W8, _W8A8 = recipes.int8_weight_only(), recipes.int8_dynamic_activation_int8_weight()
_F8, _F8A8 = recipes.float8_weight_only(), recipes.float8_dynamic_activation_float8_weight
DEFAULT_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [None, _W8, _W8A8]
DEFAULT_INT4_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [None, _W8A8, recipes.int4_weight_only(group_size=64)]
OTHER_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [None, _F8, _F8A8(PerRow()), _F8A8(PerTensor())]
ALL_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = list(
    dict.fromkeys(DEFAULT_AUTOQUANT_CLASS_LIST + DEFAULT_INT4_AUTOQUANT_CLASS_LIST + OTHER_AUTOQUANT_CLASS_LIST)
)


@arguments(manual=only(False))
def autoquant(
    model: nn.Module, example_input: Any = None,
    qtensor_class_list: Sequence[WeightRecipe | None] = DEFAULT_AUTOQUANT_CLASS_LIST, filter_fn: Any = None,
    mode: Any = None, manual: bool = False, set_inductor_config: bool = True, supress_autoquant_errors: bool = True,
    min_sqnr: float | None = None,
) -> nn.Module:  # fmt: skip
    """Quantize each linear layer in place by the recipe under which it takes least time; see `allocation.fastest`.

    Layers are timed as they run here, eagerly, and not compiled as in torchao.

    Args:
        model: any module.
        example_input: a tensor, or a tuple or list of the arguments of the model. torchao can also wait for the first
            call of the model; here it is needed.
        qtensor_class_list: recipes, None for floating point; one of the lists of this file, for example.
        filter_fn: (module, name) -> bool.
        min_sqnr: see `fastest`.

    Raises:
        ValueError: `example_input` is missing, or an argument has no equivalent.
    """
    if example_input is None:
        raise refuse("autoquant", "example_input", None, "give an input of the model to measure with")
    if mode is not None and list(mode)[:1] != ["interpolate"]:
        raise refuse("autoquant", "mode", mode, "layers are timed as they run; leave it out")
    if not all(isinstance(each, WeightRecipe | None) for each in qtensor_class_list):
        raise refuse("autoquant", "qtensor_class_list", qtensor_class_list, "it takes recipes, and None for a float")
    example = (example_input,) if isinstance(example_input, Tensor) else example_input
    allocation = fastest(model, list(qtensor_class_list), example, filter_fn=filter_fn, min_sqnr=min_sqnr)
    if any(allocation.values()):
        quantize_api.quantize_(model, allocation)
    return model
