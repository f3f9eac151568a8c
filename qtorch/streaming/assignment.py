"""Which recipe each tensor of a checkpoint gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.experts import joined_in_models
from ..checkpoint.source import Contents, Source
from ..dtypes.joining import shares_scales
from ..formats.compressed_tensors.config import METHOD
from ..formats.compressed_tensors.serving import adapted, is_nvfp4, tensor_scales
from ..formats.transformers_folder.save import TransformersFormat
from ..misfit import OnMisfit, choose
from ..recipe import Recipe, WeightRecipe
from ..targets import Reach, Target, find_targets
from .skeleton import is_head_or_router, skeleton

_HEAD = "a head or a router; ask for it by name"


def assign(
    contents: Mapping[str, Contents],
    recipe: Recipe | Mapping[str, Recipe | None],
    source: Source,
    config: Mapping[str, Any],
    format: str,
    reach: Reach = "linear",
    on_misfit: OnMisfit = "error",
) -> dict[str, Target[Recipe]]:
    """The target of each weight of two or more axes that is not quantized, by its name.

    Args:
        contents: what is stored under each name.
        recipe: see `quantize_checkpoint`.
        source: for the largest magnitudes of weights in NVFP4, if engines join them.
        config: contents of config.json.
        format: in which the weights will be stored: recipes are completed as engines need it.
        reach, on_misfit: see the arguments `targets` and `on_misfit` of `quantize_`.

    Raises:
        ValueError: a weight cannot have its recipe, or an entry of the mapping has no effect.
    """
    floats = {name: of for name, of in contents.items() if of.scheme is None}
    model = skeleton(floats, config.get("model_type"))
    targets: list[Target[Recipe]] = find_targets(model, recipe, None, reach)
    for target in targets:
        slot = target.asked
        if (
            not isinstance(recipe, Mapping)
            and reach != "all"
            and slot.is_linear
            and is_head_or_router(slot.module_name)
        ):
            slot.recipe, slot.reason = None, _HEAD
    choose(targets, on_misfit, _check)
    chosen = [target for target in targets if target.recipe is not None]
    if not chosen:
        raise ValueError("quantize_checkpoint: nothing to quantize: no linear layer in floating point")
    _place(chosen)
    if format == METHOD:
        _complete(chosen, source)
    problems = [problem for target in chosen if (problem := _problem(target))]
    if format == TransformersFormat.name:
        problems += _apart({target.slots[0].name: target.recipe for target in targets})
    if problems:
        more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("quantize_checkpoint: " + "\n".join(problems[:8]) + more + "\nnothing is written")
    return {target.slots[0].name: target for target in targets}


def _place(chosen: list[Target[Recipe]]) -> None:
    """Let recipes that treat the first and the last weights in a way of their own know where they are."""
    for recipe in dict.fromkeys(target.recipe for target in chosen):
        assert recipe is not None
        group = [target for target in chosen if target.recipe == recipe]
        for index, target in enumerate(group):
            target.asked.recipe = recipe.placed(index, len(group))


def _complete(chosen: list[Target[Recipe]], source: Source) -> None:
    """What `recipes_for_vllm` does for a model."""
    by_name: dict[str, tuple[Recipe, Tensor]] = {}
    for target in chosen:
        recipe, slot = target.recipe, target.asked
        assert recipe is not None
        absmax = torch.zeros(1, dtype=torch.float32, device="cpu")
        if is_nvfp4(recipe):
            absmax = source.tensor(slot.name).abs().max().reshape(1)
        by_name[slot.label] = recipe, absmax
    scales = tensor_scales(by_name)
    for target in chosen:
        slot = target.asked
        assert slot.recipe is not None
        slot.recipe = adapted(slot.recipe, slot.parameter.dtype, scales.get(slot.label))


def _apart(recipes: Mapping[str, Recipe | None]) -> list[str]:
    """What keeps transformers from joining the experts of a layer as they were if the model had been quantized."""
    problems = []
    for names in joined_in_models(recipes):
        asked = list(dict.fromkeys(recipes[name] for name in names))
        where = f"{names[0]} to {names[-1]}: transformers joins these experts in one parameter"
        if len(asked) > 1:
            problems.append(f"{where}, and they have different recipes: {', '.join(map(str, asked))}")
        elif isinstance(asked[0], WeightRecipe) and shares_scales(asked[0].linear_spec().weight):
            problems.append(
                f"{where}, whose scales of {asked[0]} are found together; ask for scales per row or group alone "
                "(nf4_weight_only(double_quantize=False)), or for format='qtorch', or load the float model with "
                "quantization_config=QtorchConfig(...) and save that"
            )
    return problems


def _problem(target: Target[Recipe]) -> str | None:
    assert target.recipe is not None
    try:
        _check(target.recipe, target)
    except (ValueError, TypeError) as error:
        return f"{target.asked.label}: {error}"
    return None


def _check(recipe: Recipe, target: Target[Recipe]) -> None:
    """Raise `ValueError` or `TypeError` unless the recipe can quantize a tensor of this shape without its module."""
    slot, shape = target.asked, tuple(target.parameter.shape)
    if recipe.data is not None and not recipe.in_order:
        raise ValueError(f"{recipe} runs the model on data; use quantize_")
    if recipe.trains or not isinstance(recipe, WeightRecipe):
        raise ValueError(f"{recipe} is not a recipe for inference; use quantize_")
    if len(shape) > 3 or (len(shape) == 3 and slot.kind.name != "experts"):
        raise ValueError(f"has shape {shape}; the weights of convolutions need their layer: use quantize_")
    matrix = slot.kind.matrix_shape(shape)
    recipe.check_form(torch.empty(matrix, dtype=slot.parameter.dtype, device="meta"))
