"""Decorators for functions that `torch.compile` leaves out of its graphs.

After a graph break, such as a `print` in a loop, the compiler runs the rest of the function in Python and starts a new
graph at each function that it calls. It must not start one at `__torch_function__`: all weights share that function,
which would be recompiled for each of them until the recompilation limit is reached. So products of quantized weights
run in eager mode there, like those of plain `F.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def starts_no_graph(function: F) -> F:
    """Decorator: called outside a graph, the function and all that it calls run in eager mode; inside a graph it is
    traced like any other."""
    # As torch._dynamo.skip_code does, extended to the functions called; importing that takes 0.7 s.
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def refuse_jit_trace() -> None:
    """Raise `TypeError` inside `torch.jit.trace`, which would record the result of a quantized layer as a constant."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise TypeError(
            "torch.jit.trace would record the result of a quantized layer as a constant; use torch.export, or "
            "dequantize_(model) first"
        )


def outside_graphs(reason: str) -> Callable[[F], F]:
    """Decorator: the function runs in eager mode; a graph that calls it breaks, or under ``fullgraph=True`` raises an
    error with `reason`."""

    def decorate(function: F) -> F:
        # As torch.compiler.disable does, without importing the compiler.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return starts_no_graph(function)

    return decorate
