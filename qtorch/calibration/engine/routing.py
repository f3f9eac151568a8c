"""Routing: which tokens the experts of a mixture see while the statistics of their inputs are collected.

The experts of a layer in one module, as transformers has them, are called with tokens (T, H), the experts of each
token, (T, R) integers, and the weights of their outputs, (T, R). While statistics are collected, the float model sends
each token to the experts to which the quantized one has sent it: so the inputs of an expert in the two are pairs. If
`every`, each expert also gets all tokens, whose statistics are kept apart (`Sum.blend`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Routing:
    """The routing of one batch, in the modules of `block` that hold some of these weights (E, N, K)."""

    def __init__(self, block: nn.Module, weights: Sequence[Tensor], every: bool) -> None:
        experts = {id(weight): len(weight) for weight in weights if weight.dim() == 3}
        self.experts = {
            module: experts[id(parameter)]
            for module in block.modules()
            for parameter in module._parameters.values()
            if id(parameter) in experts
        }
        self.every = every
        self.all_tokens = False
        self.chosen: dict[tuple[nn.Module, int], Tensor] = {}

    def forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        """What to call in place of the forward of each module: in the first run the choices are kept, and followed in
        others. `all_tokens` is true during calls in which an expert gets all tokens."""
        return {module: self._forward(module) for module in self.experts}

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        forward, calls = module.forward, itertools.count()

        def routed(*args: Any, **kwargs: Any) -> Any:
            if kwargs or not _are_routed(args):
                return forward(*args, **kwargs)
            hidden, index, weights = args
            kept = self.chosen.setdefault((module, next(calls)), index)
            if self.every:
                self.all_tokens = True
                for expert in range(self.experts[module]):
                    forward(hidden, torch.full_like(index[:, :1], expert), torch.ones_like(weights[:, :1]))
                self.all_tokens = False
            return forward(hidden, kept if kept.shape == index.shape else index, weights)

        return routed


def _are_routed(args: tuple[Any, ...]) -> bool:
    """Whether these are tokens (T, H), their experts (T, R) and weights (T, R)."""
    if len(args) != 3 or not all(isinstance(arg, Tensor) and arg.dim() == 2 for arg in args):
        return False
    hidden, index, weights = args
    return index.shape == weights.shape and len(index) == len(hidden) and not index.is_floating_point()
