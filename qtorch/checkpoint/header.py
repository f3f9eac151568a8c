"""The header of a checkpoint: JSON text in the metadata of the root file that describes its tensors.

    version     FORMAT_VERSION
    plain       names of tensors that are not quantized
    quantized   name -> entry: the scheme, and the stored name of each part (`dtypes.serialize`)
    aliases     further name of a tensor -> its name in one of the two above
    shards      name of a file in the folder of the root -> names of the tensors stored there
    checksums   stored name -> crc32

Files may be untrusted: `Header.parse` validates all of this, so that its users need not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..dtypes import ConvWeight, QuantizedTensor, TransposedWeight
from ..dtypes.serialize import Entry, check_entry
from ..model.install import PreparedModule
from ..model.weight_kinds import UNKNOWN, kind_of
from ..primitives.files import parse_json
from .tensor_file import Place

FORMAT_VERSION = 1

_LONGEST_NAME = 255
"""Bytes of the name of a file, on the usual file systems."""


@dataclass
class Header:
    """The contents of a header; see the top of the file."""

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
            ValueError: the text is not a valid header of this version; the message does not name the file.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"its header is not JSON: {error}") from error
        _require(isinstance(data, dict), "its header is not an object")
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
        """Names of all parameters and buffers."""
        return {*self.plain, *self.quantized, *self.aliases}

    def _check_names(self) -> None:
        stored = self.stored
        _refuse("names more than one tensor", _repeated([*self.plain, *self.quantized, *self.aliases]))
        _refuse("is used more than once", _repeated(stored))
        _refuse("has no checksum", set(stored) - self.checksums.keys())
        _refuse("has a checksum, but is not used", self.checksums.keys() - set(stored))
        _refuse("is in more than one shard", _repeated(key for keys in self.shards.values() for key in keys))
        _refuse("is in a shard, but is not used", {key for keys in self.shards.values() for key in keys} - set(stored))
        _refuse("is not the name of a file in its folder", {name for name in self.shards if not is_file_name(name)})
        tensors = {*self.plain, *self.quantized}
        for name, source in self.aliases.items():
            _require(source in tensors, f"{name} is another name of {source!r:.80}, which is missing")


def _check_types(plain: Any, quantized: Any, aliases: Any, shards: Any, checksums: Any) -> None:
    _require(_is_list_of_names(plain), "plain is not a list of names")
    for part, value in {"quantized": quantized, "aliases": aliases, "shards": shards, "checksums": checksums}.items():
        _require(isinstance(value, dict), f"{part} is not an object")
    for name, entry in quantized.items():
        try:
            check_entry(entry)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    for name, source in aliases.items():
        _require(isinstance(source, str), f"{name} is another name of {source!r:.80}, which is not a name")
    for name, keys in shards.items():
        _require(_is_list_of_names(keys), f"the shard {name} has no list of names")
    for name, checksum in checksums.items():
        _require(type(checksum) is int and 0 <= checksum < 2**32, f"{name} has the checksum {checksum!r:.80}")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_file_name(name: str) -> bool:
    """Whether `name` is the name of a file without a folder; a header must not name files in other folders."""
    if name in ("", ".", "..") or "\0" in name or os.path.basename(name) != name:
        return False
    return len(name.encode(errors="replace")) <= _LONGEST_NAME


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(f"{name!r:.80}" for name in sorted(names)[:4])
        raise ValueError(f"its header is wrong: {shown} {what}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"its header is wrong: {message}")


# --------------------------------------------------------------------------------------------------
# Checks that a checkpoint fits a model; errors name the file and the parameter or buffer.


FLOAT_ONLY: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.batchnorm._NormBase,
    nn.modules.conv._ConvTransposeNd,
)
"""Modules without a kernel for quantized parameters."""


def check_names(path: Path, places: Mapping[str, Place], found: Set[str], note: str = "") -> None:
    """Raise `ValueError` where the model misses a name of the file, or the file one of the model.

    Args:
        note: where the names of the file come from; the message ends with it.
    """
    problems = []
    # A buffer that is not in the file keeps its value, if it has one.
    missing = [
        name
        for name, (_, _, tensor) in places.items()
        if name not in found and (isinstance(tensor, nn.Parameter) or tensor.is_meta)
    ]
    if missing:
        problems.append(f"missing key {', '.join(missing[:4])}" + (", ..." if len(missing) > 4 else ""))
    if unexpected := sorted(found - places.keys()):
        problems.append(f"unexpected key {', '.join(unexpected[:4])}" + (", ..." if len(unexpected) > 4 else ""))
    if problems:
        problems.append("the model is unchanged")
        raise ValueError(f"{path}: {'; '.join(problems + [note] * bool(note))}")


def check_shape(path: Path, name: str, place: Place, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` where no tensor of this shape can take the place called `name`."""
    if nn.parameter.is_lazy(place[2]):
        raise ValueError(f"{path}: {name} of the model is not initialized yet; run the model once")
    if tuple(place[2].shape) != shape:
        what = f"has shape {shape}, the model's has {tuple(place[2].shape)}"
        raise ValueError(f"{path}: {name} {what}; the model is unchanged")


def check_fits(path: Path, name: str, place: Place, new: Tensor) -> None:
    """Raise `ValueError` where `new` cannot take the place called `name`."""
    check_shape(path, name, place, tuple(new.shape))
    if problem := _problem(place, new):
        raise ValueError(f"{path}: {name} {problem}; the model is unchanged")


def _problem(place: Place, new: Tensor) -> str | None:
    module, attribute, old = place
    if not isinstance(old, nn.Parameter):
        return "is quantized, but a buffer of the model" if isinstance(new, QuantizedTensor) else None
    if not isinstance(new, QuantizedTensor):
        kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (new, old)]
        return None if kinds[0] == kinds[1] else f"is {new.dtype}, the model's is {old.dtype}"
    kind = kind_of(module, attribute)
    if isinstance(new, ConvWeight) != kind.is_conv:
        what = "of a convolution" if isinstance(new, ConvWeight) else "of a linear layer"
        return f"is quantized as the weight {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(new, TransposedWeight) and not kind.is_transposed and kind is not UNKNOWN:
        what = "a weight that is stored as (inputs, outputs)"
        return f"is quantized as {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(module, FLOAT_ONLY) or old.dim() < 2:
        return f"is quantized, but the {attribute} of a {type(module).__name__}, which has no quantized kernel"
    if isinstance(module, PreparedModule):
        return "is quantized, but its layer is in training; finish that by convert() first, or build the model anew"
    activation = new.scheme.activation
    if activation is not None and (kind.is_layer or isinstance(new, TransposedWeight)):
        rows = max(activation.granularity.pattern(2)[0], 1)  # those of a block: a last one is completed
        try:
            activation.block_size((rows, new.scheme.codes_shape[-1]))
        except ValueError as error:
            return f"asks for an input quantized as {activation}, which it cannot be: {error}"
    return None
