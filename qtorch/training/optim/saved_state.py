"""Loads: reads the state of an optimizer, its own or that of `torch.optim.Adam` and `AdamW`.

`torch.optim.Optimizer.load_state_dict` casts states to the dtype of their parameter, which would round fp32 moments of
bf16 parameters. Here a state arrives as it was saved, and in the form that this optimizer holds it in.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .moment_form import converted

OF_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Keys of torch's groups that mean nothing here."""

OWN = ("optim_bits", "block_size", "bf16_stochastic_round")
"""Keys that say how moments are held and parameters rounded: those of this optimizer, whatever the checkpoint says."""


@dataclass(eq=False)
class _Held:
    """A state that `Optimizer.load_state_dict` does not cast."""

    value: Any


class Loads(torch.optim.Optimizer):
    """Mixin of optimizers for loading; see the top of the file."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, of another one of this folder (its moments are quantized anew), or of
        `torch.optim.Adam` or `AdamW`.

        Raises:
            ValueError: the groups differ, a group maximizes, or a state does not fit its parameter.
        """
        state_dict = dict(state_dict)
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        try:
            for hook in hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            groups = [dict(group) for group in state_dict["param_groups"]]
            for group, own in zip(groups, self.param_groups, strict=False):
                if group.get("maximize"):
                    raise ValueError(f"{type(self).__name__} has no maximize=True, which the checkpoint has")
                for name in OF_TORCH:
                    group.pop(name, None)
                defaults = {name: value for name, value in own.items() if name not in ("params", "param_names")}
                group.update({**defaults, **group, **{name: own[name] for name in OWN}})
            state = {
                key: {name: _Held(value) for name, value in of_one.items()}
                for key, of_one in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                found = self.state.get(parameter, {})
                if any(isinstance(value, _Held) for value in found.values()):
                    values = {name: held.value for name, held in found.items()}
                    self.state[parameter] = self._read(parameter, group, values)

    def _read(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, as it was saved, in the form in which it is held here."""
        step = {"step": state["step"].detach().to("cpu", torch.float32).reshape(()).clone()}
        moments = {name: value for name, value in state.items() if name != "step"}
        return {**step, **{name: converted(parameter, group, name, value) for name, value in moments.items()}}
