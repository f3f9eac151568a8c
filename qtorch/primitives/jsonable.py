"""Frozen configuration objects as JSON: one codec for specs, granularities, rules, layouts and recipes.

A dataclass decorated with `jsonable` is written as ``{"type": <class name>, <field>: <value>, ...}`` with every field
spelled out, so that a default that changes later does not change what an old file means. Enumerations and dtypes are
written as dotted strings (``"MappingType.SYMMETRIC"``, ``"torch.bfloat16"``).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_CLASSES: dict[str, type] = {}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STRING_READERS: dict[str, Callable[[str], Any]] = {"torch": lambda name: _DTYPES[f"torch.{name}"]}


def jsonable(cls: type[T]) -> type[T]:
    """Class decorator: make a frozen dataclass, or an `enum.Enum`, readable by `from_json` under its class name.

    Raises:
        ValueError: another class has registered the same name.
    """
    name = cls.__name__
    if _CLASSES.setdefault(name, cls) is not cls:
        raise ValueError(f"jsonable: the name {name!r} is already taken by {_CLASSES[name]!r}")
    if issubclass(cls, enum.Enum):
        register_string_reader(name, cls.__getitem__)
    return cls


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
    if isinstance(value, enum.Enum) and _CLASSES.get(type(value).__name__) is type(value):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "__json__"):
        return value.__json__()
    if dataclasses.is_dataclass(value) and _CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    raise TypeError(f"to_json: {type(value).__name__} has no JSON form; decorate the class with @jsonable")


def from_json(data: Any) -> Any:
    """Inverse of `to_json`; lists become tuples.

    Raises:
        ValueError: an unknown type, or a field that this version does not know.
    """
    if isinstance(data, list | tuple):
        return tuple(from_json(item) for item in data)
    if isinstance(data, str):
        return _read_string(data)
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {key: from_json(item) for key, item in data.items()}
    name = data["type"]
    cls = _CLASSES.get(name)
    if cls is None:
        raise ValueError(f"from_json: unknown type {name!r}; known: {', '.join(sorted(_CLASSES))}")
    values = {key: from_json(item) for key, item in data.items() if key != "type"}
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"from_json: {name} has no field {', '.join(unknown)}; the data was written by a newer version of qtorch"
        )
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"from_json: {name} cannot be made from {sorted(values)}: {error}") from error


def _read_string(text: str) -> Any:
    prefix, dot, name = text.partition(".")
    reader = _STRING_READERS.get(prefix) if dot else None
    if reader is None:
        return text
    try:
        return reader(name)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"from_json: {prefix} has no member {name!r}") from error
