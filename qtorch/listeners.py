"""Functions that are told when the weights of a model have been quantized, loaded or dequantized.

Integrations add one to `LISTENERS` when the package that they are for is imported, so that a model of that package
knows that it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Listener = Callable[[nn.Module, Mapping[str, Any]], None]
"""(model, recipe by name of parameter); the mapping is empty after `load_quantized` and `dequantize_`."""

LISTENERS: list[Listener] = []


def tell(model: nn.Module, recipes: Mapping[str, Any] | None = None) -> None:
    """Call all listeners."""
    for listener in LISTENERS:
        listener(model, recipes or {})
