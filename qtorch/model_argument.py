"""Validation of `model` arguments, with errors that say what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def check_model(function: str, model: Any) -> None:
    """Raise `TypeError` if `model` is not a module; the message names `function`."""
    if isinstance(model, nn.Module):
        return
    what, hint = f"a {type(model).__name__}", ""
    if model is None:
        what, hint = "None", "; methods such as model.eval() return the model, functions that change it may not"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        what, hint = f"the class {model.__name__}", f"; make one: {model.__name__}(...)"
    elif isinstance(model, Mapping):
        what, hint = f"{what}, a state dict it seems", "; load it into its model first: model.load_state_dict(...)"
    elif isinstance(model, list | tuple):
        hint = "; give one model at a time, or nn.ModuleList(models)"
    elif isinstance(model, str):
        what, hint = repr(model), "; build the model first"
    raise TypeError(f"{function}: takes a model, an nn.Module, got {what}{hint}")
