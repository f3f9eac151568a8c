"""Constants: the tensors of a run that depend on parameters alone, how they are made, and which parameters are needed.

A function mode sees every function of torch. What it makes of constants alone is a constant, `T(w)` for any T, whose
`key` tells what was done to which parameters: the same expression has the same key in another run, whichever way the
code takes. A function of constants and other tensors needs the parameters behind them in floating point, unless it is a
contraction whose operand is stored as codes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from .sites import plain_name


class Constant(NamedTuple):
    """What a tensor is made of.

    Attributes:
        key: hash of the expression.
        roots: names of the parameters in it.
    """

    key: str
    roots: frozenset[str]


class Constants(TorchFunctionMode):
    """See the top of the file.

    Attributes:
        needed: names of the parameters that something but a stored operand depends on.
        stored: name of a parameter -> number of elements of the stored operands made of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.needed: set[str] = set()
        self.stored: Counter[str] = Counter()
        self.paused = False

    def begin(self, model: nn.Module) -> None:
        """The parameters of `model` are the constants that others are made of."""
        for name, parameter in model.named_parameters():
            plain = plain_name(name)
            self.known[parameter] = Constant(_hash(plain), frozenset([plain]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [] if self.paused else [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        constants = [self.known[each] for each in operands if each in self.known]
        # Before the call: what it writes to is another tensor afterwards.
        key = self._key(func, args, kwargs) if constants and len(constants) == len(operands) else None
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)] if constants else []
        if made:
            roots: frozenset[str] = frozenset().union(*(constant.roots for constant in constants))
            if key is None:
                self.needed |= roots
            for index, each in enumerate(made):
                if key is not None:
                    self.known[each] = Constant(_hash(key, str(index)), roots)
                elif each in self.known:
                    del self.known[each]
        return result

    def _key(self, func: Any, args: Any, kwargs: Any) -> str:
        named = tree_map_only(Tensor, lambda each: self.known[each].key, (args, kwargs))
        return _hash(getattr(func, "__qualname__", str(func)), repr(named))

    def of(self, tensor: Tensor) -> Constant | None:
        """What a constant is made of; None for what is none."""
        return self.known.get(tensor)

    def make(self, tensor: Tensor, *parts: Constant) -> None:
        """`tensor` is a product of these constants."""
        roots: frozenset[str] = frozenset().union(*(part.roots for part in parts))
        self.known[tensor] = Constant(_hash("product", *(part.key for part in parts)), roots)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside is not followed."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def _hash(*parts: str) -> str:
    return hashlib.sha1("\0".join(parts).encode(), usedforsecurity=False).hexdigest()[:20]
