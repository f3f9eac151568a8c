"""What differs between versions of transformers, back to 5.0. The other files see it as in the newest one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import core_model_loading
from transformers.quantizers.base import HfQuantizer

from ..wrappers import around

EXPERTS = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
"""Attributes of a module of experts -> what they are before the version that has them (5.3 the first)."""


def of_experts(module: Any, name: str) -> bool:
    """An attribute of a module of experts."""
    return bool(getattr(module, name, EXPERTS[name]))


def experts_implementations(model: Any) -> dict[str, str | None]:
    """`model.get_experts_implementation()`, where there is that: implementation by the part's config."""
    if hasattr(model, "get_experts_implementation"):
        return dict(model.get_experts_implementation())
    configs = {"": model.config} | {key: getattr(model.config, key, None) for key in model.config.sub_configs}
    return {key: config._experts_implementation for key, config in configs.items() if config is not None}


def takes_experts_implementation(model: Any, name: str) -> bool:
    """Whether the experts of `model` may be run by `name`: before 5.7, only transformers' own ones."""
    if not model._can_set_experts_implementation():
        return False
    try:
        return bool(model.get_correct_experts_implementation(name) == name)
    except ValueError:
        return False


def grouped_mm_operator() -> Any:
    """The operator that compiled graphs of "grouped_mm" call; None before 5.3, which calls torch's."""
    return getattr(torch.ops.transformers, "grouped_mm_fallback", None)


def apply_renamings(key: str, renamings: list[Any]) -> str:
    """`core_model_loading.apply_renamings`, which 5.21 added."""
    if hasattr(core_model_loading, "apply_renamings"):
        return str(core_model_loading.apply_renamings(key, renamings))
    for renaming in renamings:
        key, _ = renaming.rename_source_key(key)
    return key


def ignore_unexpected(model: Any, patterns: list[str]) -> None:
    """Keep the loading of `model` from reporting keys of files; what it ignores is a list before 5.10, then a set."""
    now = model._keys_to_ignore_on_load_unexpected
    both: Any = now | set(patterns) if isinstance(now, set) else [*(now or ()), *patterns]
    model._keys_to_ignore_on_load_unexpected = both


def give_conversions(modeling: Any, quantizer_class: type[Any]) -> None:
    """Let quantizers of a class change the conversions of a model that is loaded, as 5.21 does. Before,
    `update_weight_conversions` is not given the model, or (before 5.8) not called."""
    update = getattr(HfQuantizer, "update_weight_conversions", None)
    if update is not None and "model" in inspect.signature(update).parameters:
        return

    @around(modeling, "get_model_conversion_mapping")
    def with_model(
        get: Any, model: Any, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(hf_quantizer, quantizer_class):
            return get(model, key_mapping, hf_quantizer, *args, **kwargs)
        return hf_quantizer.update_weight_conversions(get(model, key_mapping, None, *args, **kwargs), model)
