"""The function mode of an injection: it runs the functions of `contractions` by the products of the injection."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...dtypes.dispatch import autocasts, without_autocast
from ...dtypes.products import by_position
from ...primitives.tracing import outside_graphs, plain_name
from .contractions import FUNCTIONS, INLINED, Call, Declined


@dataclass(frozen=True)
class CallSite:
    """A place in the code that multiplies.

    Attributes:
        module: the name of the innermost module that runs, in the outermost one; empty for that one, and outside.
        function: ``"linear"``, ``"matmul"``, ``"conv2d"``, ``"einsum"``, ``"grouped_mm"``, ...; the two products of
            attention are ``"scores"`` and ``"values"``.
        index: how many of the same function the module has run before in this call.
    """

    module: str
    function: str
    index: int = 0

    @property
    def name(self) -> str:
        """``"encoder.layer.0.attention.query:linear"``; the second and further ones have a number, ``":matmul.1"``."""
        return f"{self.module}:{self.function}" + (f".{self.index}" if self.index else "")


class ModuleStack:
    """The modules that run, by name; `start` and `stop` frame the calls that it sees. `begun` is called with the
    outermost module when it starts, `ended` when it has returned, and at the end for calls outside of modules."""

    def __init__(self, begun: Callable[[nn.Module], None], ended: Callable[[], None]) -> None:
        self.begun, self.ended = begun, ended
        self.running: list[tuple[nn.Module, Counter[str]]] = []
        self.outside: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self.handles: list[Any] = []

    def start(self) -> None:
        self.outside.clear()
        self.handles = [
            nn.modules.module.register_module_forward_pre_hook(self.enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.running.clear()
        self.names.clear()
        self.ended()

    @property
    def root(self) -> nn.Module | None:
        """The outermost module that runs."""
        return self.running[0][0] if self.running else None

    def site(self, function: str) -> CallSite:
        """The next call of `function`."""
        if not self.running:
            counts, module = self.outside, ""
        else:
            innermost, counts = self.running[-1]
            module = self.names.get(id(innermost), "")
        counts[function] += 1
        return CallSite(module, function, counts[function] - 1)

    @outside_graphs("an injection follows the names of modules")
    def enter(self, module: nn.Module, _: Any = None) -> None:
        """`module` begins to run."""
        # A part of a known model that runs by itself, again for its checkpointed activations say, keeps its names.
        if not self.running and id(module) not in self.names:
            self.names |= {id(each): plain_name(name) for name, each in module.named_modules()}
            self.begun(module)
        self.running.append((module, Counter()))

    @outside_graphs("an injection follows the names of modules")
    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self.running:
            if self.running.pop()[0] is module:
                break
        if not self.running:
            self.ended()


class InjectionMode(torch.overrides.TorchFunctionMode):
    """See the top of the file."""

    def __init__(self, injection: Any) -> None:
        super().__init__()
        self.injection = injection

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INLINED:
            with self:
                return INLINED[func](*args, **kwargs)
        run = FUNCTIONS.get(func)
        y = None if run is None else self._run(run, *by_position(args, kwargs))
        return func(*args, **kwargs) if y is None else y

    def _run(self, run: Callable[..., Tensor | None], args: Any, kwargs: Any) -> Tensor | None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        try:
            if not autocasts(device):
                return run(Call(self.injection), *args, **kwargs)
            dtype = torch.get_autocast_dtype(device)
            args, kwargs = tree_map(lambda each: _cast(each, dtype), (args, kwargs))
            with without_autocast(device):
                return run(Call(self.injection), *args, **kwargs)
        except Declined:
            return None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument: matrices of weights are quantized from their own values."""
    is_weight = isinstance(value, nn.Parameter) and value.dim() > 1
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and not is_weight else value


# Constants: the tensors of a run that depend on parameters alone, how they are made, and which parameters are needed.
#
# A function mode sees every function of torch. What it makes of constants alone is a constant, `T(w)` for any T. Its
# `key` tells what was done to which parameters: the same expression has the same key in another run, whatever branch
# the code takes. A function of constants and other tensors needs the parameters behind them in floating point, unless
# it is a contraction whose operand is stored as codes.


class Constant(NamedTuple):
    """What a tensor is made of: the hash of the expression, and the names of the parameters in it."""

    key: str
    roots: frozenset[str]


class Constants(torch.overrides.TorchFunctionMode):
    """See the top of this part. `needed` are the parameters that something but a stored operand depends on; `stored`
    counts the elements of the stored operands that are made of each."""

    def __init__(self) -> None:
        super().__init__()
        self.known: torch.utils.weak.WeakIdKeyDictionary = torch.utils.weak.WeakIdKeyDictionary()
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
        key = None
        if constants and len(constants) == len(operands):
            named = tree_map_only(Tensor, lambda each: self.known[each].key, (args, kwargs))
            key = _hash(getattr(func, "__qualname__", str(func)), repr(named))
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
