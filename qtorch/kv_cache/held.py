"""Held: keys or values in a cache, as they travel through a layer of a model to its attention function.

The layers of transformers hand what `Cache.update` gives them to the attention function, and most look at no more than
its shape on the way. So codes can travel in a small object that is no tensor. If a model does use it as a tensor, it
becomes one: the dequantized keys or values.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .store import KVStore

_said: set[str] = set()


def say_once(what: str) -> None:
    """Warn that keys and values are dequantized, once for each reason."""
    if not torch.compiler.is_compiling() and what not in _said:
        _said.add(what)
        warnings.warn(f"qtorch: the quantized KV cache is dequantized at each step: {what}", stacklevel=2)


class Held:
    """The keys (`index` 0) or values (1) of a store.

    Attributes:
        store: holds the codes.
        fresh: keys and values in floating point, if they are the first of the cache.
        tokens: how many of the latest tokens it stands for.
    """

    def __init__(self, store: KVStore, index: int, fresh: tuple[Tensor, Tensor] | None, tokens: int) -> None:
        self.store, self.index, self.fresh, self.tokens = store, index, fresh, tokens

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.store.shape[:2], self.tokens, self.store.widths[self.index]))

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def device(self) -> torch.device:
        return self.store.device

    def floats(self) -> Tensor:
        """The dequantized tensor."""
        say_once("the model computes with the keys or values before it calls its attention function")
        floats = self.store.dequantize()[self.index]
        return floats.narrow(2, floats.shape[2] - self.tokens, self.tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("store", "index", "fresh", "tokens"):
            raise AttributeError(name)
        return getattr(self.floats(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.floats()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_plain, (args, kwargs or {}))
        return function(*args, **kwargs)


def _plain(x: Any) -> Any:
    return x.floats() if isinstance(x, Held) else x
