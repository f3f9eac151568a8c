"""Operators of the ``qtorch::`` namespace, and a record of what ran.

An opaque operator is a Python function that chooses by shape (GEMV or GEMM, how to slice). In eager mode it is called
directly; `torch.compile` and `torch.export` see one operator with a fake implementation, so that no choice becomes a
guard and no batch size a recompilation. `Library.define` + `impl` costs about 15 us less a call than
`torch.library.custom_op`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..tracing.function_transforms import are_active, one_by_one

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("qtorch", "FRAGMENT")
_records: list[list[str]] = []


def opaque(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator: register a function of plain tensors as ``torch.ops.qtorch.<name>`` with this schema.

    Args:
        schema: ``"name(Tensor a, ...) -> Tensor"``.
        fake: gives an empty result of the right shape, dtype and device.
    """
    name = schema.partition("(")[0]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            if _records:
                note(name)
            if torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():  # in a backward pass inside it
                    return function(*args)
            return function(*args)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qtorch::{name}", fake, lib=_LIBRARY)
        overload = getattr(torch.ops.qtorch, name).default
        _LIBRARY.impl(name, functools.partial(_run_examples, overload), "FuncTorchBatched", with_keyset=True)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return overload(*args) if torch.compiler.is_compiling() or are_active() else run(*args)

        return call  # type: ignore[return-value]

    return decorate


def _run_examples(overload: Any, keyset: Any, *args: Any) -> Any:
    """An opaque operator under `torch.func.vmap`: one example at a time, since it may read memory, which batched
    tensors do not have."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        return one_by_one(info, in_dims, overload, args)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, overload, *args)


def recording() -> bool:
    """Whether any record is open."""
    return bool(_records)


def note(name: str) -> None:
    """Write `name` into every open record."""
    for record in _records:
        record.append(name)


@contextmanager
def record_kernels() -> Iterator[list[str]]:
    """The names of the kernels and opaque operators that run inside the ``with`` block, in order.

    Inside a compiled graph only opaque operators are seen: the rest was fused away.
    """
    record: list[str] = []
    _records.append(record)
    try:
        yield record
    finally:
        # By identity: equal records may be open at once.
        _records[:] = [r for r in _records if r is not record]
