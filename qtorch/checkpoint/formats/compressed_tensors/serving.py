"""Recipes whose weights vLLM serves with the same numbers: what has to be chosen before the codes are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....model.install import check_model
from ....model.targets import Target, find_targets
from ....recipes.base import Recipe
from ....recipes.mx import Nvfp4WeightOnly, shared_tensor_scale
from ...stacked_experts import is_fused
from .config_groups import JOINED

NOT_QUANTIZED = ("gate", "router", "shared_expert_gate", "lm_head", "embed_out", "score")
"""Last names of linear layers that a single recipe leaves alone: routers, which vLLM does not quantize, and heads."""

_HALVES = (torch.bfloat16, torch.float16)


def recipes_for_vllm(model: nn.Module, recipe: Recipe | Mapping[str, Recipe | None]) -> dict[str, Recipe]:
    """Recipes for `quantize_`, by name, that make weights which vLLM serves with exactly these numbers.

    - Scales per channel get the dtype of the model, to which vLLM rounds them, where the recipe has a `scale_dtype`.
    - The scales of NVFP4 tensors become powers of two, which files hold exactly, and layers that vLLM joins share one.
    - The fused experts of a mixture are quantized too; routers and the head are not.

    Args:
        model: with weights in floating point; nothing of it is changed.
        recipe: one recipe, or a mapping of names to recipes, whose choice of layers is kept.

    Returns:
        A mapping with the name of every weight that is to be quantized.

    Raises:
        ValueError: a key of the mapping has no effect.
        TypeError: `model` is not a module.
    """
    check_model("recipes_for_vllm", model)
    targets: list[Target[Recipe]] = find_targets(model, recipe, None)
    chosen: dict[str, tuple[Recipe, Tensor]] = {}
    for target in targets:
        asked = target.slot
        given = asked.recipe
        if not isinstance(recipe, Mapping):
            if _is_left_out(model, target):
                continue
            given = recipe if given is None and is_fused(asked.name) and target.parameter.dim() == 3 else given
        if given is not None:
            name = asked.module_name if asked.kind.is_layer and asked.module_name else asked.name
            chosen[name] = given, target.parameter
    scales = tensor_scales(chosen)
    return {name: adapted(given, weight.dtype, scales.get(name)) for name, (given, weight) in chosen.items()}


def _is_left_out(model: nn.Module, target: Target[Recipe]) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    return any(
        slot.module is head or slot.module_name.rpartition(".")[2] in NOT_QUANTIZED
        for slot in target.slots
        if slot.kind.name == "linear"
    )


def adapted(recipe: Recipe, dtype: torch.dtype, tensor_scale: float | None) -> Recipe:
    """The recipe, and those that it holds, with the options that make its weights exact."""
    changes: dict[str, Any] = {}
    for name in [field.name for field in fields(recipe)]:  # type: ignore[arg-type]
        value = getattr(recipe, name)
        if isinstance(value, Recipe):
            changes[name] = adapted(value, dtype, tensor_scale)
        elif name == "scale_dtype" and value is None and dtype in _HALVES:
            changes[name] = dtype
        elif name == "tensor_scale" and value is None and tensor_scale is not None:
            changes[name] = tensor_scale
    changes = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    return replace(recipe, **changes) if changes else recipe  # type: ignore[type-var]


def tensor_scales(chosen: Mapping[str, tuple[Recipe, Tensor]]) -> dict[str, float]:
    """The scale of every tensor in NVFP4, shared by those that vLLM joins."""
    absmax = {
        name: float(weight.detach().abs().max()) if weight.numel() else 0.0
        for name, (recipe, weight) in chosen.items()
        if is_nvfp4(recipe) and not weight.is_meta
    }
    return {name: shared_tensor_scale(max(absmax.get(other, 0.0) for other in _joined_with(name))) for name in absmax}


def is_nvfp4(recipe: Any) -> bool:
    """Whether a recipe, or one that it holds, makes NVFP4 weights."""
    if isinstance(recipe, Nvfp4WeightOnly):
        return True
    return is_dataclass(recipe) and any(is_nvfp4(getattr(recipe, field.name)) for field in fields(recipe))


def _joined_with(module: str) -> Iterable[str]:
    """Names of the modules that vLLM may join with a module, itself included."""
    parent, dot, last = module.rpartition(".")
    for names in JOINED:
        if last in names:
            return [f"{parent}{dot}{name}" for name in names]
    return [module]
