"""The bytes that a weight takes under a recipe, found without quantizing it."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import torch
from torch import Tensor

from ..primitives import MinMaxRule
from ..recipe import WeightRecipe
from .items import Candidate

SIMPLE = {"scale_rule": MinMaxRule(), "use_hqq": False}
"""Arguments of recipes that say how ranges are searched."""


def nbytes_under(candidate: Candidate, weight: Tensor) -> int:
    """Bytes of `weight`, as it is quantized (N, K) or (E, N, K), under a candidate: codes, scales and all else.

    It equals `nbytes` of the quantized tensor.
    """
    if candidate is None:
        return weight.numel() * weight.element_size()
    return _nbytes(candidate, tuple(weight.shape), weight.dtype, weight.device)


@functools.lru_cache(4096)
def _nbytes(recipe: WeightRecipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    known = {field.name for field in fields(recipe)}  # type: ignore[arg-type]
    # How ranges are searched changes no size, and takes long.
    simple = {name: value for name, value in SIMPLE.items() if name in known}
    recipe = replace(recipe, **simple)  # type: ignore[type-var]
    layout = recipe.linear_spec().layout
    cpu = torch.device("cpu")
    # On the meta device layouts pack as on a CPU.
    depends = layout is not None and device.type != "cpu" and layout.packing(device) != layout.packing(cpu)
    if depends:
        return recipe.apply(torch.zeros(shape, dtype=dtype, device=device)).nbytes
    return recipe.apply(torch.empty(shape, dtype=dtype, device="meta")).nbytes
