"""Parameters: the float parameters of a model by name, and their replacement.

A replacement is a new parameter in all places of the old one, which is not written to: `quantize_` puts the old ones
back after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...model.install import Change, install, keep_attributes


class Parameters:
    """The parameters of a model; a tied one has its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.slots: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        for module_name, module in model.named_modules(remove_duplicate=True):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = first.setdefault(id(parameter), f"{module_name}.{attribute}" if module_name else attribute)
                    self.slots.setdefault(name, []).append((module, attribute))

    def __getitem__(self, name: str) -> nn.Parameter:
        module, attribute = self.slots[name][0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace parameters by new ones with these values, in the dtype of the old ones; all or none."""
        made = {}
        for name, value in values.items():
            old = self[name]
            made[name] = keep_attributes(nn.Parameter(value.to(old.dtype), old.requires_grad), old)
        self.put(made)

    def put(self, made: Mapping[str, nn.Parameter]) -> None:
        """Put parameters in place of those with these names; all or none."""
        places = [(place, parameter) for name, parameter in made.items() for place in self.slots[name]]
        install([Change(module._parameters, attribute, parameter) for (module, attribute), parameter in places])

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """With parameters of these values, in the dtype of the values; then with the old ones again."""
        old = {name: self[name] for name in values}
        try:
            self.put({name: nn.Parameter(value, False) for name, value in values.items()})
            yield
        finally:
            self.put(old)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which new values of a parameter are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
