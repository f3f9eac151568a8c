"""Frozen configuration objects as JSON: one codec for specs, granularities, rules, layouts and recipes.

A dataclass decorated with `jsonable` is written as ``{"type": <class name>, <field>: <value>, ...}`` with all fields,
so that a later change of a default does not change the meaning of old files. Enumerations and dtypes are written as
dotted strings (``"MappingType.SYMMETRIC"``, ``"torch.bfloat16"``).
"""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from typing_extensions import dataclass_transform

from .discovery import import_later

T = TypeVar("T")

MAX_DEPTH = 64
"""Nesting depth of lists and objects that `from_json` accepts."""

CLASSES: dict[str, type] = {}
_CALLED: dict[type, str] = {}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STRING_READERS: dict[str, Callable[[str], Any]] = {"torch": lambda name: _DTYPES[f"torch.{name}"]}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def jsonable(cls: type[T], called: str = "", *, repr: bool = True) -> type[T]:
    """Class decorator: make a class a frozen dataclass, unless it is a dataclass or an `enum.Enum`, and readable by
    `from_json` under its class name, which no other class may have. Messages name it as it is `called`, by default so
    too; without `repr` it keeps the one that it inherits."""
    name = cls.__name__
    if not issubclass(cls, enum.Enum) and "__dataclass_params__" not in vars(cls):
        dataclasses.dataclass(frozen=True, repr=repr)(cls)
    _CALLED[cls] = called or name
    if CLASSES.setdefault(name, cls) is not cls:
        raise ValueError(f"jsonable: the name {name!r} is already taken by {CLASSES[name]!r}")
    if issubclass(cls, enum.Enum):
        register_string_reader(name, cls.__getitem__)
    elif hasattr(cls, "__post_init__"):
        cls.__post_init__ = _named(cls.__post_init__)  # type: ignore[attr-defined]
    return cls


def _named(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`post_init` of a dataclass; where an argument of another type than its field makes it fail, the error says so."""

    @functools.wraps(post_init)
    def checked(self: Any) -> None:
        try:
            post_init(self)
        except (TypeError, AttributeError) as error:
            name = _CALLED.get(type(self), type(self).__name__)
            if str(error).startswith(name) or not (wrong := wrong_type(type(self), vars(self))):
                raise
            raise TypeError(f"{name}: {wrong}") from error

    return checked


class HashedOnce:
    """Base of metadata by which kernels are looked up: its hash is computed at the first use."""

    def __init_subclass__(cls) -> None:
        cls.__hash__ = HashedOnce.__hash__  # type: ignore[method-assign]  # else a dataclass makes one of its own

    def __hash__(self) -> int:
        own = vars(self)
        found: int | None = own.get("_hash")
        if found is None:
            found = own["_hash"] = hash(tuple(own[f.name] for f in dataclasses.fields(self)))  # type: ignore[arg-type]
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Not the hash: those of strings differ from process to process.
        return {f.name: vars(self)[f.name] for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def register_string_reader(prefix: str, read: Callable[[str], Any]) -> None:
    """Read strings of the form ``"<prefix>.<name>"`` with ``read(name)``."""
    _STRING_READERS[prefix] = read


def to_json(value: Any) -> Any:
    """Turn a configuration object into JSON data (dicts, lists, strings, numbers, None).

    Raises:
        TypeError: a value has no JSON form (a callable, a tensor, an undecorated class).
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum) and CLASSES.get(type(value).__name__) is type(value):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "__json__"):
        return value.__json__()
    if dataclasses.is_dataclass(value) and CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    raise TypeError(f"to_json: {type(value).__name__} has no JSON form; decorate the class with @jsonable")


def from_json(data: Any) -> Any:
    """Inverse of `to_json`; lists become tuples.

    Args:
        data: JSON data, which may be untrusted: any error in it raises `ValueError`.

    Raises:
        ValueError: an unknown type, a field that this version does not know, a value that a field does not take, NaN,
            or data nested deeper than `MAX_DEPTH`.
    """
    return _read(data, MAX_DEPTH)


def _read(data: Any, depth: int) -> Any:
    if depth < 0:
        raise ValueError(f"from_json: the data is nested more than {MAX_DEPTH} deep")
    if isinstance(data, list | tuple):
        return tuple(_read(item, depth - 1) for item in data)
    if isinstance(data, str):
        return _read_string(data)
    if isinstance(data, dict):
        values = {key: _read(item, depth - 1) for key, item in data.items() if key != "type"}
        return _make(data["type"], values) if "type" in data else values
    if data is not None and not isinstance(data, bool | int | float):
        raise ValueError(f"from_json: takes JSON data, got a {type(data).__name__}")
    if data != data:
        raise ValueError("from_json: a field has the value NaN, which is not allowed")
    return data


def _make(name: Any, values: dict[Any, Any]) -> Any:
    if isinstance(name, str) and name not in CLASSES:
        import_later()
    cls = CLASSES.get(name) if isinstance(name, str) else None
    if cls is None or not dataclasses.is_dataclass(cls):
        raise ValueError(f"from_json: unknown type {name!r:.80}; known: {', '.join(sorted(CLASSES))}")
    return construct(cls, values)


def construct(cls: type[T], values: Mapping[Any, Any]) -> T:
    """An object of a frozen dataclass from the values of its fields, which have their annotated types; `ValueError` if
    a field is unknown, missing, or does not take its value."""
    name, values = cls.__name__, {key: tuples(value) for key, value in values.items()}
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(map(str, values.keys() - known)):
        what = f"{name} has no field {', '.join(unknown)}"
        raise ValueError(f"from_json: {what}; the data was written by a newer version of qtorch")
    if wrong := wrong_type(typing.cast("Any", cls), values):
        raise ValueError(f"from_json: {name}.{wrong}")
    try:
        made = cls(**values)
        hash(made)
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"from_json: {name} cannot be made from {sorted(values)}: {error}") from error
    return made


def wrong_type(cls: type, values: Mapping[str, Any], kinds: Collection[Any] = ()) -> str:
    """Which of the values, by field, does not have the annotated type of a field of `cls`: ``group_size takes an
    integer, got '32'``; empty if all have. Of fields whose types are all among `kinds`, if any are given."""
    for field, hint in _field_types(cls).items():
        of_kinds = not kinds or set(typing.get_args(hint) or (hint,)) <= set(kinds)
        if of_kinds and field in values and not _fits(value := values[field], hint):
            short = " ".join(f"{value!r:.80}".split())
            return f"{field} takes {_word(hint)}, got {short}{_instead(value, hint)}"
    return ""


def call_of(made: Any) -> str:
    """The call that makes a frozen dataclass with the `name` of a function, without default arguments."""
    given = [f.name for f in dataclasses.fields(made) if getattr(made, f.name) != f.default]
    return f"{made.name}({', '.join(f'{name}={getattr(made, name)!r}' for name in given)})"


def tuples(value: Any) -> Any:
    """Lists, inside each other too, as tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # names that only type checkers see
        return {}
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type; it supports the annotations in the fields of JSON-able classes."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple and isinstance(value, tuple):
        if args[1:] == (...,):
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if hint in (int, float):  # also those of numpy
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is Iterable:
        return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return isinstance(value, origin or hint)


_WORDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
_WORDS |= {torch.dtype: "torch.dtype", type(None): "None"}


def _word(hint: Any) -> str:
    """The values of a type, for messages."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_word, typing.get_args(hint)))
    origin = typing.get_origin(hint)
    if text := getattr(hint, "described", None):
        return str(text)
    return str(_WORDS.get(hint) or (hint if origin is tuple else getattr(origin or hint, "__name__", hint)))


def is_class(hint: Any) -> bool:
    """Whether a type hint is a class; Python 3.10 takes list[int] for one."""
    return isinstance(hint, type) and typing.get_origin(hint) is None


def _instead(value: Any, hint: Any) -> str:
    """What to write in place of a value that has another type."""
    for kind in typing.get_args(hint) or (hint,):
        if isinstance(value, type) and is_class(kind) and issubclass(value, kind):
            return f"; make one: {_CALLED.get(value, value.__name__)}()"
        if is_class(kind) and issubclass(kind, enum.Enum):
            return f"; write {', '.join(map(str, kind))}"
        if kind is torch.dtype and isinstance(value, str) and f"torch.{value}" in _DTYPES:
            return f"; write torch.{value}"
        of_kind = [name for cls, name in _CALLED.items() if is_class(kind) and issubclass(cls, kind)]
        if len(of_kind) > 1 and not hasattr(kind, "described"):
            return f"; there are {', '.join(of_kind[:8])}"
    return ""


def _read_string(text: str) -> Any:
    prefix, dot, name = text.partition(".")
    reader = _STRING_READERS.get(prefix) if dot else None
    if reader is None:
        return text
    try:
        return reader(name)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"from_json: {prefix} has no member {name!r}") from error
