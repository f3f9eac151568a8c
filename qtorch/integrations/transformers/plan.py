"""Plan: which weights `from_pretrained` quantizes while it loads them, decided on the model without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...explain import problem_of
from ...kernels.im2col import to_matrix
from ...kernels.registry import choose
from ...model_size import get_model_size_in_bytes
from ...recipe import Recipe, WeightRecipe
from ...report import LayerReport, QuantizeReport
from ...targets import Slot, Target, find_targets, is_asked_by_name
from .config import QtorchConfig


class Plan:
    """The weights of a model on the meta device with their recipes, as `quantize_` would assign them.

    Attributes:
        targets: the weights to quantize while they are loaded, by every name that they have.
        trained: those that are loaded in floating point, since they are to be trained: recipe by name.

    Raises:
        ValueError: recipes do not fit (all are named), or cannot be applied while loading.
    """

    def __init__(self, model: Any, config: QtorchConfig) -> None:
        if not config.is_recipe:
            raise ValueError(
                f"QtorchConfig: recipe is a recipe, or a mapping from names to recipes; got {config.recipe!r:.80}"
            )
        for recipe in config.recipe.values() if isinstance(config.recipe, dict) else [config.recipe]:
            _check_recipe(recipe)
        self._all = _tied(find_targets(model, config.recipe, None), model)
        skipped = HfQuantizer.get_modules_to_not_convert(
            model, config.modules_to_not_convert, sorted(model._keep_in_fp32_modules or ())
        )
        for target in self._all:
            _skip(target, skipped, config)
        asked = [target for target in self._all if target.recipe is not None]
        if not asked:
            raise ValueError(f"QtorchConfig: no weight of {type(model).__name__} is left to quantize")
        for recipe in dict.fromkeys(target.recipe for target in asked):
            group = [target for target in asked if target.recipe == recipe]
            for index, target in enumerate(group):
                assert recipe is not None
                target.asked.recipe = recipe.placed(index, len(group))
        _check(asked)
        self.trained = {target.asked.name: target.recipe for target in asked if target.recipe and target.recipe.trains}
        self.targets = {
            slot.name: target for target in asked if target.asked.name not in self.trained for slot in target.slots
        }
        self._rows = {id(target): _skipped(target) for target in self._all}

    def quantize(self, name: str, weight: Tensor) -> Tensor:
        """The quantized tensor that takes the place of `weight`.

        Raises:
            ValueError: the recipe does not take the weight.
        """
        target = self.targets[name]
        recipe = target.recipe
        assert recipe is not None
        loaded = replace(target.asked, parameter=nn.Parameter(weight, requires_grad=False))
        recipe.check_target(Target([loaded]))
        made: Tensor = recipe.make(Target([loaded]), weight)
        kernel = choose(problem_of(made, loaded.module, weight.dtype, weight.device.type)).name  # type: ignore[arg-type]
        self._rows[id(target)] = replace(
            self._rows[id(target)],
            action="quantized",
            detail=str(recipe),
            bytes_before=weight.nbytes,
            bytes_after=made.nbytes,
            kernel=kernel,
        )
        return made

    def report(self, model: nn.Module) -> QuantizeReport:
        """What has been done; there are no SQNRs, since the float weights are gone."""
        rows = tuple(self._rows.values())
        size = get_model_size_in_bytes(model)
        saved = sum(row.bytes_before - row.bytes_after for row in rows if row.action == "quantized")
        elements = sum(parameter.numel() for parameter in model.parameters())
        return QuantizeReport(rows, False, elements, 0, size + saved, size)


def _tied(targets: list[Target[Recipe]], model: Any) -> list[Target[Recipe]]:
    """The targets with those joined that transformers will tie after loading."""
    by_name = {slot.name: target for target in targets for slot in target.slots}
    for alias, name in model.all_tied_weights_keys.items():
        one, other = by_name.get(name), by_name.get(alias)
        if one is not None and other is not None and one is not other:
            one.slots += other.slots
            by_name |= {slot.name: one for slot in other.slots}
    return list({id(target): target for target in by_name.values()}.values())


def _skip(target: Target[Recipe], skipped: Sequence[str], config: QtorchConfig) -> None:
    """Take the recipe from what `skipped` names, unless the mapping asks for what is skipped by default by its name.

    Raises:
        ValueError: the names of a tied weight have different recipes.
    """
    names = [name for slot in target.slots for name in (slot.name, slot.label)]
    if target.recipe is None or all(should_convert_module(name, list(skipped)) for name in names):
        return
    by_default = config.modules_to_not_convert is None
    keys = config.recipe if isinstance(config.recipe, dict) else ()
    for slot in target.slots:
        if slot.recipe is not None and not (by_default and any(is_asked_by_name(key, slot) for key in keys)):
            slot.recipe, slot.refused = None, True
            slot.reason = "left by default: output layer, tied or last module" if by_default else _SKIPPED
    asked = {str(slot.recipe): slot.label for slot in target.slots if slot.recipe is not None}
    if len(asked) > 1:
        what = ", ".join(f"{label}: {recipe}" for recipe, label in asked.items())
        raise ValueError(f"QtorchConfig: a tied weight takes one recipe, got different ones: {what}")


_SKIPPED = "modules_to_not_convert"


def _check_recipe(recipe: Recipe | None) -> None:
    """Raise `ValueError` for a recipe that takes more than the float weight."""
    if recipe is not None:
        recipe.check_complete()
    if recipe is not None and (recipe.data is not None or recipe.statistics):
        raise ValueError(f"QtorchConfig: {recipe} needs data: load the model in floating point, then call quantize_")
    if recipe is not None and recipe.selects:
        raise ValueError(f"QtorchConfig: {recipe} changes weights that are quantized: call quantize_ after loading")


def _check(targets: Sequence[Target[Recipe]]) -> None:
    problems = []
    for target in targets:
        recipe = target.recipe
        assert recipe is not None
        if obstacle := next(filter(None, (slot.obstacle for slot in target.slots)), None):
            problems.append(f"{target.asked.label}: {obstacle}")
        elif isinstance(recipe, WeightRecipe) and not recipe.trains:
            parameter = target.parameter.detach()
            try:
                recipe.check_form(to_matrix(parameter) if target.asked.is_conv else parameter)
            except (ValueError, TypeError) as error:
                problems.append(f"{target.asked.label}: {error}")
    if problems := list(dict.fromkeys(problems)):
        more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("QtorchConfig: " + "\n".join(problems[:8]) + more)


def _skipped(target: Target[Recipe]) -> LayerReport:
    slot: Slot[Recipe] = target.asked
    size = target.parameter.nbytes
    also = tuple(other.name for other in target.slots if other is not slot)
    return LayerReport(slot.name, tuple(target.parameter.shape), "skipped", slot.reason, size, size, also=also)
