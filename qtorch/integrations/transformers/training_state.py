"""Weights in training: a folder holds their floats, or codes, and what their recipe has added to the model.

They are loaded in three steps: the floats by transformers; then the recipes prepare the model, as in `quantize_`; then
what they have added (learned scales, observed ranges, adapters) is read from the files.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ...checkpoint.tensor_file import TensorFile
from ...recipe import Recipe
from ...training.weights.base import TrainingWeight
from .config import QtorchConfig
from .plan import Plan
from .stored_weights import StoredWeights
from .versions import ignore_unexpected


def to_be_read_later(model: Any, stored: StoredWeights, config: QtorchConfig) -> None:
    """Keep transformers from reporting what recipes have added to the model as unexpected."""
    if config.training:
        added = [f"^{re.escape(key)}$" for key in stored.others if key not in model.state_dict()]
        ignore_unexpected(model, added)


def prepare(model: Any, plan: Plan | None, stored: StoredWeights | None, config: QtorchConfig) -> dict[str, Recipe]:
    """Prepare the weights in training of a model that is loaded; their recipes by name.

    Raises:
        ValueError: a recipe is not known to this version, or does not fit the model.
    """
    from ...quantize_api import quantize_

    recipes = dict(plan.trained) if plan is not None else config.trained()
    if not recipes:
        return {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    floats = {name: recipe for name, recipe in recipes.items() if not isinstance(parameters.get(name), TrainingWeight)}
    if floats:
        quantize_(model, floats)
    if stored is not None:
        model.load_state_dict(_added(model, stored, parameters), strict=False)
    return recipes


def _added(model: Any, stored: StoredWeights, loaded: dict[str, Any]) -> dict[str, Tensor]:
    """The state of the model that was not there when its weights were loaded, from the files."""
    found: dict[str, Tensor] = {}
    wanted = model.state_dict().keys() - loaded.keys()
    for path in set(stored.others.values()):
        file = TensorFile(path)
        found |= {key: file.read(key) for key in wanted & file.stored.keys() & stored.others.keys()}
        file.close()
    return found
