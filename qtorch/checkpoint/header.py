"""The header of a checkpoint: what its tensors are, JSON text in the metadata of the root file.

    version     FORMAT_VERSION
    plain       names of tensors that are stored as they are
    quantized   name -> entry: the scheme, and which stored tensor is what (`dtypes.serialize`)
    aliases     further name of a tensor -> its name in one of the two above
    shards      name of a file beside the root -> names of the tensors stored there
    checksums   stored name -> crc32

A file may come from anywhere: `Header.parse` checks all of this, so that what uses it need not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..dtypes.serialize import Entry, check_entry
from ..primitives.jsonable import parse_json

FORMAT_VERSION = 1


@dataclass
class Header:
    """See the top of the file."""

    plain: list[str] = field(default_factory=list)
    quantized: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"version": FORMAT_VERSION, **vars(self)}

    @classmethod
    def parse(cls, text: str) -> Header:
        """Inverse of `json.dumps(header.to_json())`.

        Raises:
            ValueError: it is of another version, or not such a header; the message has no file name.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"its header is no JSON: {error}") from error
        _require(isinstance(data, dict), "its header is no object")
        version = data.get("version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"format version {version!r:.40}; this qtorch reads version {FORMAT_VERSION}")
        parts = {name: data.get(name) for name in cls.__dataclass_fields__}
        _check_types(**parts)
        header = cls(**parts)
        header._check_names()
        return header

    @property
    def stored(self) -> list[str]:
        """Names of all stored tensors."""
        return [*self.plain, *(stored for entry in self.quantized.values() for stored in entry["tensors"].values())]

    @property
    def names(self) -> set[str]:
        """Of all parameters and buffers."""
        return {*self.plain, *self.quantized, *self.aliases}

    def _check_names(self) -> None:
        stored = self.stored
        _refuse("names more than one tensor", _repeated([*self.plain, *self.quantized, *self.aliases]))
        _refuse("is used more than once", _repeated(stored))
        _refuse("has no checksum", set(stored) - self.checksums.keys())
        _refuse("has a checksum, but no use", self.checksums.keys() - set(stored))
        _refuse("is in more than one shard", _repeated(key for keys in self.shards.values() for key in keys))
        _refuse("is in a shard, but has no use", {key for keys in self.shards.values() for key in keys} - set(stored))
        _refuse("is no name of a file beside it", {name for name in self.shards if not _is_file_name(name)})
        tensors = {*self.plain, *self.quantized}
        for name, source in self.aliases.items():
            _require(source in tensors, f"{name} is another name of {source!r:.80}, which is missing")


def _check_types(plain: Any, quantized: Any, aliases: Any, shards: Any, checksums: Any) -> None:
    _require(_is_list_of_names(plain), "plain is no list of names")
    for part, value in {"quantized": quantized, "aliases": aliases, "shards": shards, "checksums": checksums}.items():
        _require(isinstance(value, dict), f"{part} is no object")
    for name, entry in quantized.items():
        try:
            check_entry(entry)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    for name, source in aliases.items():
        _require(isinstance(source, str), f"{name} is another name of {source!r:.80}, which is no name")
    for name, keys in shards.items():
        _require(_is_list_of_names(keys), f"the shard {name} has no list of names")
    for name, checksum in checksums.items():
        _require(type(checksum) is int and 0 <= checksum < 2**32, f"{name} has the checksum {checksum!r:.80}")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_file_name(name: str) -> bool:
    """Without a folder: a header names no file elsewhere."""
    return name not in ("", ".", "..") and "\0" not in name and os.path.basename(name) == name


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(f"{name!r:.80}" for name in sorted(names)[:4])
        raise ValueError(f"its header is wrong: {shown} {what}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"its header is wrong: {message}")
