"""Functions that `torch.compile` leaves out of its graphs.

Where a graph has to break, at a `print` in a loop say, the compiler runs the rest of the function in Python, and starts
a new graph at each function that this calls. `__torch_function__` must not be such a function: it is one function for
all weights, and would be compiled anew for each of them until the limit of recompilations is reached. So the products
of quantized weights run in eager mode there, as those of plain `F.linear` do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def starts_no_graph(function: F) -> F:
    """Decorator: met outside a graph, the function runs in eager mode, with all that it calls; within a graph it is
    traced like any other."""
    # What torch._dynamo.skip_code does, and for the functions called; importing that takes 0.7 s.
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def refuse_jit_trace() -> None:
    """Raise `TypeError` inside `torch.jit.trace`, which would record what a quantized layer gives as a constant."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise TypeError(
            "torch.jit.trace would record the result of a quantized layer as a constant; use torch.export, or "
            "dequantize_(model) first"
        )


def outside_graphs(reason: str) -> Callable[[F], F]:
    """Decorator: the function runs in eager mode, and a graph that meets it breaks, or under ``fullgraph=True`` is an
    error with `reason`."""

    def decorate(function: F) -> F:
        # What torch.compiler.disable does, without importing the compiler.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return starts_no_graph(function)

    return decorate
