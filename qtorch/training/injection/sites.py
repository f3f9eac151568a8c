"""Call sites: which module runs which contraction, by hooks of torch on all modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...tracing.outside_graphs import outside_graphs


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


def plain_name(name: str) -> str:
    """The name of a module or parameter without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")


class ModuleStack:
    """The modules that run, by name; `start` and `stop` frame the calls that it sees.

    Args:
        begun: called with the outermost module when it starts.
        ended: called when it has returned; and at the end, for calls outside of modules.
    """

    def __init__(self, begun: Callable[[nn.Module], None], ended: Callable[[], None]) -> None:
        self.begun, self.ended = begun, ended
        self.running: list[tuple[nn.Module, Counter[str]]] = []
        self.outside: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self.handles: list[Any] = []

    def start(self) -> None:
        self.outside.clear()
        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
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

    def enter_root(self, root: nn.Module) -> None:
        """Make `root`, which runs already, the outermost module."""
        self._enter(root, None)

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
    def _enter(self, module: nn.Module, _: Any) -> None:
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
