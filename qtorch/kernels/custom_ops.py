"""Operators of the ``qtorch::`` namespace, their implementations per device, and a record of what ran.

An opaque operator is a Python function that chooses by shape (GEMV or GEMM, how to slice). In eager mode it is called
directly; `torch.compile` and `torch.export` see one operator with a fake implementation, so that no choice becomes a
guard and no batch size a recompilation. `Library.define` + `impl` costs about 15 us less a call than
`torch.library.custom_op`.

`implement` registers an implementation for one type of device, in a file of that device. `by_device` allows the same
for a function that a compiler traces.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import torch

from ..primitives import ZeroPointDomain
from ..primitives.qdtype import QDTYPES
from ..primitives.tracing import F, are_active, is_compiling, is_sharded, modes_active, one_by_one

Function = Callable[..., Any]

Name: TypeAlias = Annotated[str, "of a number format, or of a domain of zero points"]
"""Of an argument for which torch's dispatcher gets a number: Inductor's C++ wrapper compiles calls with texts three
times as long."""

Size: TypeAlias = Annotated[int, "of a weight, never symbolic"]
"""From 2.14 on Inductor compiles calls with integers that may be symbolic as it does those with texts."""

# Types of tensors that have memory of their own.
TENSORS = (torch.Tensor, torch.nn.Parameter)

_LIBRARY = torch.library.Library("qtorch", "FRAGMENT")
_implementations: dict[str, dict[str, Function]] = {}  # by operation, then by device type
_opaque: dict[str, Function] = {}
_names: dict[int, str] = {}  # by number
_records: list[list[str]] = []

RECORD_LISTENERS: list[Callable[[bool], None]] = []
"""Called when a record opens or ends, with whether any is open; operators outside Python write into records too."""


def opaque(fake: Function) -> Callable[[F], F]:
    """Decorator: register a function as ``torch.ops.qtorch.<name>``; its schema follows from its annotations, and the
    device of its first argument, a tensor, selects the implementation. `fake` takes the same arguments and returns an
    empty result of the right shape, dtype and device."""

    def decorate(function: F) -> F:
        name = function.__name__
        _opaque[name] = function
        run = _runner(name, function, _devices_of(name))
        _LIBRARY.define(_schema(function, name))
        _LIBRARY.impl(name, _without_gradient(run, function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"qtorch::{name}", _with_names(fake, function), lib=_LIBRARY)
        overload, names = getattr(torch.ops.qtorch, name).default, _names_in(function)
        _LIBRARY.impl(name, functools.partial(_run_examples, overload), "FuncTorchBatched", with_keyset=True)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if not (is_compiling() or are_active() or modes_active()):
                return run(*args)
            return overload(*_replaced(args, names, number_of))

        return call  # type: ignore[return-value]

    return decorate


def by_device(function: F) -> F:
    """Decorator: let `implement` replace the function on a type of device, that of its first argument, a tensor. A
    compiler traces the implementation, unlike that of an opaque operator."""
    own = _devices_of(function.__name__)
    in_place = function.__annotations__.get("return") in (None, "None")

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if is_compiling():
            _check_memory(function.__name__, *args)
        else:
            args = _readable(function.__name__, args, in_place)
        return own.get(args[0].device.type, function)(*args)

    return call  # type: ignore[return-value]


def implement(name: str, device: str, *, where: bool = True) -> Callable[[F], F]:
    """Decorator: implement an operation, `opaque` or `by_device`, for a type of device such as ``"cuda"``; nothing is
    registered unless `where`, whether this process can run the implementation.

    Raises:
        ValueError: no operation has that name, or it already has an implementation for the device.
    """

    def decorate(function: F) -> F:
        if name not in _implementations:
            raise ValueError(f"implement: no operation is named {name}")
        own = _implementations[name]
        if where:
            if device in own:
                raise ValueError(f"implement: {name} has an implementation for {device} already")
            own[device] = function
            if name in _opaque:
                _LIBRARY.impl(name, _without_gradient(_runner(name, function, {}), _opaque[name]), device.upper())
        return function

    return decorate


def define_fallback(name: str) -> None:
    """Define ``torch.ops.qtorch.<name>.fallback``, the opaque operator in Python, for an implementation outside Python
    that passes some calls on."""
    function = _opaque[name]
    run = _without_gradient(_runner(name, function, {}), function)
    _LIBRARY.define(_schema(function, f"{name}.fallback"))
    _LIBRARY.impl(f"{name}.fallback", run, "CompositeExplicitAutograd")


def portable(operation: F) -> F:
    """The function that runs an operation on devices without an implementation."""
    return operation.__wrapped__  # type: ignore[attr-defined]


def implementations() -> list[str]:
    """``"operation@device"`` of all that `implement` has registered."""
    return [f"{name}@{device}" for name, own in _implementations.items() for device in own]


def number_of(name: str) -> int:
    """The number of a `Name`, the same in every process: its hash by FNV-1a (Fowler, Noll, Vo), 32 bits."""
    number = 0x811C9DC5
    for byte in name.encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    if (other := _names.setdefault(number, name)) != name:
        raise ValueError(f"{name!r} and {other!r} have the same number {number}: give the format another name")
    return number


number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def name_of(number: int) -> str:
    """The `Name` of this number; a `ValueError` if no format has it."""
    if number not in _names and number not in map(number_of, (*QDTYPES, *ZeroPointDomain.__members__)):
        raise ValueError(f"no number format has the number {number}: import the module that registers it")
    return _names[number]


@functools.cache
def _names_in(function: Function) -> tuple[int, ...]:
    """The places of arguments that are a `Name`."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return tuple(i for i, parameter in enumerate(parameters) if parameter.annotation is Name)


def _schema(function: Function, name: str) -> str:
    """As its annotations say; a `Name` or a `Size` is an integer."""
    signature, prototype = inspect.signature(function, eval_str=True), lambda: None
    plain = {p.name: p for p in signature.parameters.values() if p.annotation in (Name, Size)}

    def declared(p: inspect.Parameter) -> inspect.Parameter:
        return p.replace(annotation=int, default=number_of(p.default) if isinstance(p.default, str) else p.default)

    parameters = [declared(p) if p.name in plain else p for p in signature.parameters.values()]
    prototype.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(prototype, op_name=name, mutates_args=())
    return re.sub(r"SymInt (\w+)", lambda found: f"int {found[1]}" if found[1] in plain else found[0], schema)


def _replaced(args: tuple[Any, ...], places: tuple[int, ...], by: Function) -> list[Any]:
    replaced = list(args)
    for i in places:
        if i < len(args):
            replaced[i] = by(args[i])
    return replaced


def _with_names(run: Function, function: Function) -> Function:
    """`run`, with the arguments of `function`, as the dispatcher calls it."""
    names = _names_in(function)
    return (lambda *args: run(*_replaced(args, names, name_of))) if names else run


def _devices_of(name: str) -> dict[str, Function]:
    """Enter a new operation; its implementations by device type."""
    if name in _implementations:
        raise ValueError(f"an operation is named {name} already")
    return _implementations.setdefault(name, {})


def _runner(name: str, function: Function, own: dict[str, Function]) -> Function:
    """The eager call of an opaque operator: the implementation in `own` for the device, else `function`."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        args = _readable(name, args)
        if _records:
            note(name)
        chosen = own.get(args[0].device.type, function) if own else function
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # in a backward pass inside it
                return chosen(*args)
        return chosen(*args)

    return run


def _without_gradient(run: Function, function: Function) -> Function:
    """`run`, with the arguments of `function`, as the dispatcher calls it, in an exported program also where gradients
    are recorded: what differentiates an operator is around it, and operators with ``out=`` refuse to be recorded."""
    named = _with_names(run, function)

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return named(*args)
        with torch.no_grad():
            return named(*args)

    return call


def _readable(name: str, args: tuple[Any, ...], first: int = 0) -> tuple[Any, ...]:
    """Arguments of the operation `name` as its code, which reads memory, takes them: from `first` on none stands for
    the negative of what its memory holds. Only torch's dispatcher, which eager calls pass by, would write it out."""
    negative = False
    for arg in args:  # written out: it runs on each call of a kernel
        kind = type(arg)
        if kind in TENSORS:
            negative = negative or arg.is_neg()
        elif kind is list or kind is tuple:
            negative = negative or any(type(part) in TENSORS and part.is_neg() for part in arg)
        elif isinstance(arg, torch.Tensor):
            _check_memory(name, arg)
    return (*args[:first], *map(_resolved, args[first:])) if negative else args


def _check_memory(name: str, *args: Any) -> None:
    """Raise `NotImplementedError` for a DTensor, which has no memory of its own."""
    if any(is_sharded(arg) for arg in args):
        raise NotImplementedError(
            f"{name} takes plain tensors, got a DTensor: this layer cannot be parallelized by the styles of torch "
            "while it trains; take those of qtorch.integrations.tensor_parallel, convert() the model first, or train "
            "it under FSDP2 or DistributedDataParallel"
        )


def _resolved(arg: Any) -> Any:
    if type(arg) is list or type(arg) is tuple:
        return [_resolved(part) for part in arg]
    return arg.resolve_neg() if type(arg) in TENSORS else arg


def _run_examples(overload: Any, keyset: Any, *args: Any) -> Any:
    """An opaque operator under `torch.func.vmap`: one example at a time, because it may read memory and batched tensors
    have no memory."""
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
    _tell_listeners()
    try:
        yield record
    finally:
        # By identity: equal records may be open at once.
        _records[:] = [r for r in _records if r is not record]
        _tell_listeners()


def _tell_listeners() -> None:
    for listener in RECORD_LISTENERS:
        listener(bool(_records))
