"""torchao's configurations for training: low precision, and quantization-aware training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import recipes, training
from ...primitives import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerToken
from ...recipes.base import Recipe, WeightRecipe
from . import configs
from .functions import E4M3
from .translate import granularity_of, mapping_of, only, refuse, word

made: Any = recipes
"""The recipes; they are attributes that a type checker does not see."""


def Int8MixedPrecisionTrainingConfig(
    output: bool = True,
    grad_input: bool = True,
    grad_weight: bool = True,
    module_swap: bool = False,
    *,
    config: Recipe | None = None,
) -> Recipe:
    """`int8_mixed_precision_training`; torchao 0.6 has these as fields of its argument `config`. Modules keep their
    class whatever `module_swap` says, and no number depends on it."""
    if config is not None or isinstance(output, Recipe):
        return config or output  # type: ignore[return-value]
    flags = training.Int8MixedPrecisionTrainingConfig(output, grad_input, grad_weight)
    recipe: Recipe = training.int8_mixed_precision_training(flags)
    return recipe


def Int8WeightOnlyQuantizedTrainingConfig() -> Recipe:
    """`int8_weight_only_quantized_training`."""
    recipe: Recipe = training.int8_weight_only_quantized_training()
    return recipe


def BitNetTrainingConfig() -> Recipe:
    """`bitnet_training`."""
    recipe: Recipe = training.bitnet_training()
    return recipe


int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig
int8_weight_only_quantized_training = Int8WeightOnlyQuantizedTrainingConfig
bitnet_training = BitNetTrainingConfig


@dataclass(frozen=True)
class FakeQuantize:
    """One operand of `QATConfig`, from a configuration of fake quantization.

    Attributes:
        name: of the configuration.
        dtype, granularity, mapping: of the codes.
        learned: whether its scales are trained.
    """

    name: str
    dtype: Any
    granularity: Granularity
    mapping: MappingType = MappingType.SYMMETRIC
    learned: bool = False


def IntxFakeQuantizeConfig(
    dtype: Any,
    granularity: Any = None,
    mapping_type: Any = None,
    scale_precision: torch.dtype = torch.float32,
    zero_point_precision: torch.dtype = torch.int32,
    zero_point_domain: Any = "INT",
    is_dynamic: bool = True,
    range_learning: bool = False,
    eps: float | None = None,
    *,
    group_size: int | None = None,
    is_symmetric: bool | None = None,
) -> FakeQuantize:
    """Integers; `granularity` is also one of ``"per_token"``, ``"per_channel"`` and ``"per_group"``."""
    name = "IntxFakeQuantizeConfig"
    only(name, "scale_precision", scale_precision, (torch.float32,))
    only(name, "zero_point_precision", zero_point_precision, (torch.int32, torch.int8))
    only(name, "zero_point_domain", getattr(zero_point_domain, "name", zero_point_domain), ("INT", "NONE"))
    only(name, "eps", eps, (None, torch.finfo(torch.float32).eps))
    if not is_dynamic and not range_learning:
        raise refuse(name, "is_dynamic", is_dynamic, "qat(recipe, observer=...) has static activations")
    if mapping_type is not None and is_symmetric is not None:
        raise ValueError(f"{name}: mapping_type and is_symmetric say the same; leave one out")
    if mapping_type is None:
        mapping_type = MappingType.ASYMMETRIC if is_symmetric is False else MappingType.SYMMETRIC
    words: dict[Any, Any] = {"per_token": PerToken(), "per_channel": PerAxis(0)}
    if group_size is not None and granularity in (None, "per_group"):
        granularity = PerGroup(group_size)
    elif group_size is not None or granularity in (None, "per_group"):
        raise ValueError(f"{name}: takes a granularity, or group_size; got {granularity!r} and {group_size!r}")
    kind = words[granularity] if granularity in tuple(words) else granularity_of(name, "granularity", granularity)
    return FakeQuantize(name, dtype, kind, mapping_of(name, "mapping_type", mapping_type), range_learning)


def Float8FakeQuantizeConfig(
    dtype: torch.dtype = E4M3,
    granularity: Any = PerRow(),
    hp_value_lb: float | None = None,
    hp_value_ub: float | None = None,
) -> FakeQuantize:
    """Float8 with a scale per row or per tensor."""
    name = "Float8FakeQuantizeConfig"
    only(name, "hp_value_lb", hp_value_lb, (None,))
    only(name, "hp_value_ub", hp_value_ub, (None,))
    return FakeQuantize(name, dtype, granularity_of(name, "granularity", granularity))


def Int4WeightFakeQuantizeConfig(group_size: int = 128, activation_dtype: torch.dtype = E4M3) -> FakeQuantize:
    """The weight of `float8_dynamic_activation_int4_weight`, or of `int4_weight_only` for activations in bf16."""
    name = "Int4WeightFakeQuantizeConfig"
    only(name, "activation_dtype", activation_dtype, (E4M3, torch.bfloat16))
    return FakeQuantize(name, activation_dtype, PerGroup(group_size))


FakeQuantizeConfig = IntxFakeQuantizeConfig
"""Its name in torchao 0.7."""


def QATConfig(
    base_config: Recipe | None = None,
    activation_config: FakeQuantize | None = None,
    weight_config: FakeQuantize | None = None,
    *,
    step: Any = "prepare",
) -> Recipe:
    """`qat` of the base, or of the recipe that the two configurations describe, for the step ``"prepare"``, `lsq` of it
    where the scales of the weight are learned; `convert()` for ``"convert"``."""
    name = "QATConfig"
    only(name, "step", str(word(step)).lower(), ("prepare", "convert"))
    if base_config is not None and (activation_config is not None or weight_config is not None):
        raise ValueError(f"{name}: takes base_config, or activation_config and weight_config, not both")
    if str(word(step)).lower() == "convert":
        return training.convert()
    if base_config is None and isinstance(weight_config, FakeQuantize):
        base_config = _described(activation_config, weight_config)
    if not isinstance(base_config, WeightRecipe):
        argument, value = ("base_config", base_config) if weight_config is None else ("weight_config", weight_config)
        raise refuse(name, argument, value, "give base_config=, a recipe, or weight_config=IntxFakeQuantizeConfig(...)")
    learned = weight_config is not None and weight_config.learned
    recipe: Recipe = training.lsq(recipe=base_config) if learned else training.qat(base_config)
    return recipe


def _described(activation: FakeQuantize | None, weight: FakeQuantize) -> WeightRecipe:
    """The recipe of these operands.

    Raises:
        ValueError: there is none.
    """
    kinds = weight.name, None if activation is None else activation.name
    rows = activation is not None and activation.granularity in (PerToken(), PerRow()) and not activation.learned
    recipe: WeightRecipe
    if kinds == ("IntxFakeQuantizeConfig", None):
        unsigned = str(weight.dtype).startswith("torch.uint") and weight.mapping is MappingType.ASYMMETRIC
        if unsigned and isinstance(weight.granularity, PerGroup):
            recipe = made.uintx_weight_only(weight.dtype, weight.granularity.group_size)
            return recipe
        return configs.IntxWeightOnlyConfig(weight.dtype, weight.granularity, weight.mapping)
    if activation is None or not rows:
        pass
    elif kinds == ("IntxFakeQuantizeConfig", "IntxFakeQuantizeConfig") and activation.dtype == torch.int8:
        of = weight.dtype, weight.granularity, weight.mapping, None, activation.mapping
        return configs.Int8DynamicActivationIntxWeightConfig(*of)
    elif kinds == ("Int4WeightFakeQuantizeConfig", "Float8FakeQuantizeConfig") and activation.dtype == weight.dtype:
        recipe = made.float8_dynamic_activation_int4_weight(group_size=weight.granularity.group_size)  # type: ignore[attr-defined]
        return recipe
    if kinds == ("Int4WeightFakeQuantizeConfig", None) and weight.dtype == torch.bfloat16:
        recipe = made.int4_weight_only(weight.granularity.group_size)  # type: ignore[attr-defined]
        return recipe
    if kinds == ("Float8FakeQuantizeConfig", None):
        return configs.Float8WeightOnlyConfig(weight.dtype, granularity=weight.granularity)
    if activation is not None and set(kinds) == {"Float8FakeQuantizeConfig"}:
        of_both = (activation.granularity, weight.granularity)
        return configs.Float8DynamicActivationFloat8WeightConfig(activation.dtype, weight.dtype, of_both)
    raise refuse("QATConfig", "activation_config", activation, f"no recipe has it with {weight}: give base_config=")
