"""torchao's configurations for training: low precision, and quantization-aware training."""

from dataclasses import dataclass
from typing import Any

import torch

from ... import recipes, training
from ...primitives import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerToken
from ...recipes.base import Recipe, WeightRecipe
from . import configs, translate
from .functions import E4M3
from .translate import arguments, only, refuse

__all__ = [
    "BitNetTrainingConfig", "FakeQuantizeConfig", "Float8FakeQuantizeConfig", "Int4WeightFakeQuantizeConfig",
    "Int8MixedPrecisionTrainingConfig", "Int8WeightOnlyQuantizedTrainingConfig", "IntxFakeQuantizeConfig", "QATConfig",
    "bitnet_training", "int8_mixed_precision_training", "int8_weight_only_quantized_training",
    "precompute_bitnet_scale_for_fsdp", "precompute_float8_dynamic_scale_for_fsdp",
]  # fmt: skip


def Int8MixedPrecisionTrainingConfig(
    output: bool = True, grad_input: bool = True, grad_weight: bool = True, module_swap: bool = False, *,
    config: Recipe | None = None,
) -> Recipe:  # fmt: skip
    """`int8_mixed_precision_training`; torchao 0.6 has these as fields of its argument `config`. Modules keep their
    class whatever `module_swap` says, and no number depends on it."""
    if config is not None or isinstance(output, Recipe):
        return config or output  # type: ignore[return-value]
    flags = training.Int8MixedPrecisionTrainingConfig(output, grad_input, grad_weight)
    return training.int8_mixed_precision_training(flags)


int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig
Int8WeightOnlyQuantizedTrainingConfig = int8_weight_only_quantized_training = (
    training.int8_weight_only_quantized_training
)
BitNetTrainingConfig = bitnet_training = training.bitnet_training
precompute_bitnet_scale_for_fsdp = precompute_float8_dynamic_scale_for_fsdp = training.precompute_scales_for_fsdp


@dataclass(frozen=True)
class FakeQuantize:
    """One operand of `QATConfig`, from the configuration `name`: its codes, and whether their scales are trained."""

    name: str
    dtype: Any
    granularity: Granularity
    mapping: MappingType = MappingType.SYMMETRIC
    learned: bool = False


def _granularity(value: Any) -> Granularity | None:
    words = {"per_token": PerToken(), "per_channel": PerAxis(0), "per_group": None}
    return words[value] if isinstance(value, str) and value in words else translate.granularity(value)


@arguments(
    granularity=_granularity, mapping_type=translate.mapping, scale_precision=only(torch.float32),
    zero_point_precision=only(torch.int32, torch.int8), eps=only(None, torch.finfo(torch.float32).eps),
    zero_point_domain=lambda value: only("INT", "NONE")(getattr(value, "name", value)),
)  # fmt: skip
def IntxFakeQuantizeConfig(
    dtype: Any, granularity: Any = None, mapping_type: Any = None, scale_precision: torch.dtype = torch.float32,
    zero_point_precision: torch.dtype = torch.int32, zero_point_domain: Any = "INT", is_dynamic: bool = True,
    range_learning: bool = False, eps: float | None = None, *, group_size: int | None = None,
    is_symmetric: bool | None = None,
) -> FakeQuantize:  # fmt: skip
    """Integers; `granularity` is also one of ``"per_token"``, ``"per_channel"`` and ``"per_group"``."""
    name = "IntxFakeQuantizeConfig"
    if not is_dynamic and not range_learning:
        raise refuse(name, "is_dynamic", is_dynamic, "qat(recipe, observer=...) has static activations")
    if mapping_type is not None and is_symmetric is not None:
        raise ValueError(f"{name}: mapping_type and is_symmetric say the same; leave one out")
    if mapping_type is None:
        mapping_type = MappingType.ASYMMETRIC if is_symmetric is False else MappingType.SYMMETRIC
    if (granularity is None) == (group_size is None):
        raise ValueError(f"{name}: takes a granularity, or group_size; got {granularity!r} and {group_size!r}")
    granularity = granularity or PerGroup(group_size)  # type: ignore[arg-type]
    return FakeQuantize(name, dtype, granularity, mapping_type, range_learning)


@arguments(granularity=translate.granularity)
def Float8FakeQuantizeConfig(
    dtype: torch.dtype = E4M3,
    granularity: Any = PerRow(),
    hp_value_lb: float | None = None,
    hp_value_ub: float | None = None,
) -> FakeQuantize:
    """Float8 with a scale per row or per tensor."""
    return FakeQuantize("Float8FakeQuantizeConfig", dtype, granularity)


@arguments(activation_dtype=only(E4M3, torch.bfloat16))
def Int4WeightFakeQuantizeConfig(group_size: int = 128, activation_dtype: torch.dtype = E4M3) -> FakeQuantize:
    """The weight of `float8_dynamic_activation_int4_weight`, or of `int4_weight_only` for activations in bf16."""
    return FakeQuantize("Int4WeightFakeQuantizeConfig", activation_dtype, PerGroup(group_size))


FakeQuantizeConfig = IntxFakeQuantizeConfig
"""Its name in torchao 0.7."""


@arguments(step=translate.step("prepare", "convert"))
def QATConfig(
    base_config: Recipe | None = None, activation_config: FakeQuantize | None = None,
    weight_config: FakeQuantize | None = None, *, step: Any = "prepare",
) -> Recipe:  # fmt: skip
    """`qat` of the base, or of the recipe that the two configurations describe, for the step ``"prepare"``, `lsq` of it
    where the scales of the weight are learned; `convert()` for ``"convert"``."""
    name = "QATConfig"
    if base_config is not None and (activation_config is not None or weight_config is not None):
        raise ValueError(f"{name}: takes base_config, or activation_config and weight_config, not both")
    if step == "convert":
        return training.convert()
    if base_config is None and isinstance(weight_config, FakeQuantize):
        base_config = _described(activation_config, weight_config)
    if not isinstance(base_config, WeightRecipe):
        argument, value = ("base_config", base_config) if weight_config is None else ("weight_config", weight_config)
        raise refuse(name, argument, value, "give base_config=, a recipe, or weight_config=IntxFakeQuantizeConfig(...)")
    if weight_config is not None and weight_config.learned:
        return training.lsq(recipe=base_config)
    return training.qat(base_config)


def _described(activation: FakeQuantize | None, weight: FakeQuantize) -> WeightRecipe:
    """The recipe of these operands."""
    names = weight.name, None if activation is None else activation.name
    rows = activation is not None and activation.granularity in (PerToken(), PerRow()) and not activation.learned
    size = weight.granularity.group_size if isinstance(weight.granularity, PerGroup) else -1
    if names == ("IntxFakeQuantizeConfig", None):
        if str(weight.dtype).startswith("torch.uint") and weight.mapping is MappingType.ASYMMETRIC and size != -1:
            return recipes.uintx_weight_only(weight.dtype, size)
        return configs.IntxWeightOnlyConfig(weight.dtype, weight.granularity, weight.mapping)
    if names == ("Int4WeightFakeQuantizeConfig", None) and weight.dtype == torch.bfloat16:
        return recipes.int4_weight_only(size)
    if names == ("Float8FakeQuantizeConfig", None):
        return configs.Float8WeightOnlyConfig(weight.dtype, granularity=weight.granularity)
    if activation is not None and names == ("Float8FakeQuantizeConfig", "Float8FakeQuantizeConfig"):
        of_both = (activation.granularity, weight.granularity)
        return configs.Float8DynamicActivationFloat8WeightConfig(activation.dtype, weight.dtype, of_both)
    if activation is not None and rows:
        if names == ("IntxFakeQuantizeConfig", "IntxFakeQuantizeConfig") and activation.dtype == torch.int8:
            of_weight = weight.dtype, weight.granularity, weight.mapping
            return configs.Int8DynamicActivationIntxWeightConfig(*of_weight, act_mapping_type=activation.mapping)
        if names == ("Int4WeightFakeQuantizeConfig", "Float8FakeQuantizeConfig") and activation.dtype == weight.dtype:
            return recipes.float8_dynamic_activation_int4_weight(group_size=size)
    raise refuse("QATConfig", "activation_config", activation, f"no recipe has it with {weight}: give base_config=")
