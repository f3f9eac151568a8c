"""torchao's `autoquant`, and its lists of candidates as recipes of qtorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ... import recipes
from ...allocation import fastest
from ...primitives import PerRow, PerTensor
from ...quantize_api import quantize_
from ...recipe import WeightRecipe
from .arguments import only, refuse

made: Any = recipes
"""The recipes; they are attributes that a type checker does not see."""

DEFAULT_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [
    None,
    made.int8_weight_only(),
    made.int8_dynamic_activation_int8_weight(),
]
DEFAULT_INT4_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [
    None,
    made.int8_dynamic_activation_int8_weight(),
    made.int4_weight_only(group_size=64),
]
OTHER_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = [
    None,
    made.float8_weight_only(),
    made.float8_dynamic_activation_float8_weight(granularity=PerRow()),
    made.float8_dynamic_activation_float8_weight(granularity=PerTensor()),
]
ALL_AUTOQUANT_CLASS_LIST: list[WeightRecipe | None] = list(
    dict.fromkeys(DEFAULT_AUTOQUANT_CLASS_LIST + DEFAULT_INT4_AUTOQUANT_CLASS_LIST + OTHER_AUTOQUANT_CLASS_LIST)
)


def autoquant(
    model: nn.Module,
    example_input: Any = None,
    qtensor_class_list: Sequence[WeightRecipe | None] = DEFAULT_AUTOQUANT_CLASS_LIST,
    filter_fn: Any = None,
    mode: Any = None,
    manual: bool = False,
    set_inductor_config: bool = True,
    supress_autoquant_errors: bool = True,
    min_sqnr: float | None = None,
) -> nn.Module:
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
    only("autoquant", "manual", manual, (False,))
    if mode is not None and list(mode)[:1] != ["interpolate"]:
        raise refuse("autoquant", "mode", mode, "layers are timed as they run; leave it out")
    if wrong := [each for each in qtensor_class_list if each is not None and not isinstance(each, WeightRecipe)]:
        raise refuse("autoquant", "qtensor_class_list", wrong, "it takes recipes, and None for floating point")
    example = (example_input,) if isinstance(example_input, Tensor) else example_input
    allocation = fastest(model, list(qtensor_class_list), example, filter_fn=filter_fn, min_sqnr=min_sqnr)
    if any(allocation.values()):
        quantize_(model, allocation)
    return model
