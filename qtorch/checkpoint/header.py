"""The header of a checkpoint: JSON text in the metadata of the root file that describes its tensors.

    version     FORMAT_VERSION
    plain       names of tensors that are not quantized
    quantized   name -> entry: the scheme, and the stored name of each part (`dtypes.serialize`)
    aliases     further name of a tensor -> its name in one of the two above
    shards      name of a file in the folder of the root -> names of the tensors stored there
    checksums   stored name -> crc32

Files may be untrusted: `Header.parse` validates all of this, so that its users need not.
"""

import glob
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..dtypes import ConvWeight, QuantizedTensor, TransposedWeight, serialize
from ..model import install, weight_kinds
from ..primitives.files import naming, parse_json
from .tensor_file import Place

FORMAT_VERSION = 1

HEADER = "qtorch"
"""Metadata key of the header, JSON text."""

HEADER_CHECKSUM = "qtorch.crc32"

TOKEN = "[0-9a-f]" * 8
"""A pattern of the part of a name that is chosen at random."""

_LONGEST_NAME = 255
"""Bytes of the name of a file, on the usual file systems."""


@dataclass
class Header:
    """The contents of a header; see the top of the file."""

    plain: list[str] = field(default_factory=list)
    quantized: dict[str, serialize.Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """The metadata of the root file."""
        text = json.dumps({"version": FORMAT_VERSION, **vars(self)})
        return {HEADER: text, HEADER_CHECKSUM: _checksum(text)}

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> "Header":
        """Inverse of `to_metadata`."""
        if HEADER not in metadata:
            raise ValueError(f"a safetensors file, but not one of save_quantized (its header has no {HEADER!r})")
        if metadata.get(HEADER_CHECKSUM) != _checksum(metadata[HEADER]):
            raise ValueError("its header is corrupted: it does not match its checksum")
        with naming("its header is not JSON"):
            data = parse_json(metadata[HEADER])
        _require(isinstance(data, dict), "its header is not an object")
        version = data.get("version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"format version {version!r:.40}; this qtorch reads version {FORMAT_VERSION}")
        header = cls(**{name: data.get(name) for name in cls.__dataclass_fields__})
        header._check_types()
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

    def _check_types(self) -> None:
        _require(_is_list_of_names(self.plain), "plain is not a list of names")
        for part, value in vars(self).items():
            _require(part == "plain" or isinstance(value, dict), f"{part} is not an object")
        check_entries(self.quantized)
        for name, source in self.aliases.items():
            _require(isinstance(source, str), f"{name} is another name of {source!r:.80}, which is not a name")
        for name, keys in self.shards.items():
            _require(_is_list_of_names(keys), f"the shard {name} has no list of names")
        for name, checksum in self.checksums.items():
            _require(type(checksum) is int and 0 <= checksum < 2**32, f"{name} has the checksum {checksum!r:.80}")

    def _check_names(self) -> None:
        stored = self.stored
        _refuse("names more than one tensor", _repeated([*self.plain, *self.quantized, *self.aliases]))
        _refuse("is used more than once", _repeated(stored))
        _refuse("has no checksum", set(stored) - self.checksums.keys())
        _refuse("has a checksum, but is not used", self.checksums.keys() - set(stored))
        in_shards = [key for keys in self.shards.values() for key in keys]
        _refuse("is in more than one shard", _repeated(in_shards))
        _refuse("is in a shard, but is not used", set(in_shards) - set(stored))
        _refuse("is not the name of a file in its folder", {name for name in self.shards if not is_file_name(name)})
        tensors = {*self.plain, *self.quantized}
        for name, source in self.aliases.items():
            _require(source in tensors, f"{name} is another name of {source!r:.80}, which is missing")


def check_entries(quantized: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless each value has the form of an entry of a quantized tensor."""
    for name, entry in quantized.items():
        with naming(name):
            serialize.check_entry(entry)


def shard_paths(path: Path, token: str, count: int) -> list[Path]:
    """The shards of the checkpoint at `path`; `token` tells those of one save from those of another."""
    return [path.with_name(f"{_stem(path)}-{token}-{i:05d}-of-{count:05d}.safetensors") for i in range(1, count + 1)]


def all_shards(path: Path) -> list[Path]:
    """The shards of all saves to `path`."""
    return list(path.parent.glob(f"{glob.escape(_stem(path))}-{TOKEN}-[0-9]*-of-[0-9]*.safetensors"))


def _stem(path: Path) -> str:
    """The prefix of the names of shards, which differs for every path."""
    return path.stem if path.suffix == ".safetensors" else f"{path.name}."


def _checksum(text: str) -> str:
    """crc32 of the header, as text, since safetensors metadata are strings."""
    return str(zlib.crc32(text.encode(errors="surrogatepass")))


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


# Checks that a checkpoint fits a model; errors name the file and the parameter or buffer.


FLOAT_ONLY: tuple[type[nn.Module], ...] = (
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Bilinear, nn.RNNBase, nn.RNNCellBase,
    nn.modules.batchnorm._NormBase, nn.modules.conv._ConvTransposeNd,
)  # fmt: skip
"""Modules without a kernel for quantized parameters."""


def check_names(path: Path, places: Mapping[str, Place], found: Set[str], note: str = "") -> None:
    """Raise `ValueError` where the model misses a name of the file, or the file one of the model; `note` ends it."""
    problems = []
    # A buffer that is not in the file keeps its value, if it has one.
    missing = [
        name
        for name, (module, attribute, tensor) in places.items()
        if name not in found and (attribute in module._parameters or tensor.is_meta)
    ]
    if missing:
        problems.append(f"missing key {', '.join(missing[:4])}" + (", ..." if len(missing) > 4 else ""))
    if missing and all(attribute in module._buffers for module, attribute, _ in map(places.__getitem__, missing)):
        problems.append("which are buffers on the meta device: build the model with accelerate.init_empty_weights()")
    if unexpected := sorted(found - places.keys()):
        problems.append(f"unexpected key {', '.join(unexpected[:4])}" + (", ..." if len(unexpected) > 4 else ""))
    if problems:
        raise ValueError(f"{path}: {'; '.join([*problems, 'the model is unchanged'] + [note] * bool(note))}")


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
    if attribute in module._buffers:
        return "is quantized, but a buffer of the model" if isinstance(new, QuantizedTensor) else None
    if not isinstance(new, QuantizedTensor):
        kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (new, old)]
        return None if kinds[0] == kinds[1] else f"is {new.dtype}, the model's is {old.dtype}"
    kind = weight_kinds.kind_of(module, attribute)
    if isinstance(new, ConvWeight) != kind.is_conv:
        what = "of a convolution" if isinstance(new, ConvWeight) else "of a linear layer"
        return f"is quantized as the weight {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(new, TransposedWeight) and not kind.is_transposed and kind is not weight_kinds.UNKNOWN:
        what = "a weight that is stored as (inputs, outputs)"
        return f"is quantized as {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(module, FLOAT_ONLY) or old.dim() < 2:
        return f"is quantized, but the {attribute} of a {type(module).__name__}, which has no quantized kernel"
    if isinstance(module, install.PreparedModule):
        return "is quantized, but its layer is in training; finish that by convert() first, or build the model anew"
    activation = new.scheme.activation
    if activation is not None and (kind.is_layer or isinstance(new, TransposedWeight)):
        rows = max(activation.granularity.pattern(2)[0], 1)  # those of a block: a last one is completed
        try:
            activation.block_size((rows, new.scheme.codes_shape[-1]))
        except ValueError as error:
            return f"asks for an input quantized as {activation}, which it cannot be: {error}"
    return None
