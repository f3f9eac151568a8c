"""Forms: what a streamed checkpoint becomes, a file in the own format or a folder in a format of another package.

A form says which plain tensors stand for a parameter, and completes the files at the end. Whatever it learns from the
tensors is JSON data, so that another process can continue.
"""

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...dtypes import QuantizedTensor, serialize
from .. import header, tensor_file
from ..hf_folder import CONFIG, INDEX_SUFFIX, read_object
from ..part_file import PartFile
from ..save_folder import INDEX, SAVE_FORMATS, SaveFormat, file_names, save_format, write_index, write_json

SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".merges"})
"""Names of files that are copied end in one of these; weights, pictures and the card of the model do not."""

CONFIGS_OF_QUANTIZATION = frozenset(
    {"quantize_config.json", "quant_config.json", "hf_quant_config.json", "qmodel.json", "quanto_qmap.json"}
)
"""What says how the weights of the source are quantized, which the written ones are not."""

TEMPLATES = "additional_chat_templates"

MAX_BYTES = 1 << 30
"""Of a file that is copied."""


def find_companions(source: Path) -> list[Path]:
    """The files beside the weights that a folder needs, such as the tokenizer, as paths in it; without config.json.

    Their contents are published with the weights, so a link may not lead to a file that has nothing to do with the
    model: only to one of the same folder, or, in the cache of Hugging Face, of the ``blobs`` of the same repository.
    """
    if not source.is_dir():
        return []
    found = [
        path
        for path in sorted(source.iterdir())
        if path.suffix in SUFFIXES
        and path.name not in {CONFIG, *CONFIGS_OF_QUANTIZATION}
        and not path.name.endswith((INDEX_SUFFIX, ".bin.index.json"))
        and path.is_file()
    ]
    found += sorted(path for path in (source / TEMPLATES).rglob("*") if path.is_file())
    for path in [source / CONFIG, *found]:
        _check(path, source)
    return [path.relative_to(source) for path in found]


def _check(path: Path, source: Path) -> None:
    allowed = [source.resolve()]
    # models--<owner>--<name>/snapshots/<commit>/<file> -> ../../blobs/<hash>
    repository = allowed[0].parent.parent
    if allowed[0].parent.name == "snapshots" and repository.name.startswith("models--"):
        allowed.append(repository / "blobs")
    if not path.is_file():
        return
    target = path.resolve()
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise ValueError(f"{path} is a link to {target}, outside of the folder; put the file in its place")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: it has {path.stat().st_size} bytes; files beside weights have at most {MAX_BYTES}")


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy `find_companions` of the folder `source`; their names in `target`, of files and of a folder."""
    found = find_companions(source)
    for path in found:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)
    return list(dict.fromkeys(path.parts[0] for path in found))


_ROOM_FOR_A_TENSOR = 700
"""Bytes of header for a parameter that is not quantized, beside its name."""

_ROOM_FOR_A_WEIGHT = 2600
"""Bytes of header for a quantized parameter, beside its names; if it takes more, its file is copied once."""


class Form(ABC):
    """How a checkpoint is written."""

    @abstractmethod
    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The plain tensors, by stored name, that stand for the parameter or buffer `name`."""

    @abstractmethod
    def room(self, names: Sequence[str], is_first: bool) -> int:
        """Bytes for the header of a file, given the names of the parameters that may be in it."""

    @abstractmethod
    def finish_file(self, file: PartFile) -> None:
        """Complete a file that gets no more tensors, unless that has to wait for all."""

    @abstractmethod
    def finish(self, files: Sequence[PartFile], target: Path) -> None:
        """Complete all files and move them to `target`, in one step as far as readers see; may be repeated."""

    @abstractmethod
    def progress(self) -> Any:
        """JSON data of what was stored, for `resume`."""

    @abstractmethod
    def places(self, count: int, target: Path, folder: Path) -> list[Path]:
        """Where `finish` moves the files, of which there are `count`, from `folder`."""

    @abstractmethod
    def resume(self, progress: Any, names: Sequence[str], stored: Sequence[str]) -> None:
        """Continue from `progress`, which may be untrusted, and the names of the tensors that are stored. The last of
        the names of parameters is that of the next one, which may be in `progress` already."""


class OwnForm(Form):
    """A file of `save_quantized` with its shards, in whose names `token` is; the root is the first file."""

    def __init__(self, aliases: Mapping[str, str], token: str) -> None:
        self.header = header.Header(aliases=dict(aliases))
        self.plain: dict[str, None] = {}
        self.token = token

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if isinstance(tensor, QuantizedTensor):
            stored, self.header.quantized[name] = serialize.to_canonical(name, tensor)
            return stored
        self.plain[name] = None
        return {name: tensor}

    def room(self, names: Sequence[str], is_first: bool) -> int:
        return _room(names, _ROOM_FOR_A_WEIGHT if is_first else _ROOM_FOR_A_TENSOR)

    def finish_file(self, file: PartFile) -> None:
        if file.path.name != file_name(0):
            file.finish({})

    def finish(self, files: Sequence[PartFile], target: Path) -> None:
        root, *shards = files
        self.header.plain = list(self.plain)
        of_root, *places = self.places(len(files), target, root.path.parent)
        pairs = zip(places, shards, strict=True)
        self.header.shards = {place.name: [tensor.name for tensor in shard.written] for place, shard in pairs}
        self.header.checksums = {tensor.name: tensor.crc32 for file in files for tensor in file.written}
        for shard in shards:
            shard.finish({})
        root.finish(self.header.to_metadata())
        for place, shard in [*zip(places, shards, strict=True), (of_root, root)]:
            if shard.path.exists():
                os.replace(shard.path, place)

    def places(self, count: int, target: Path, folder: Path) -> list[Path]:
        return [target, *header.shard_paths(target, self.token, count - 1)]

    def progress(self) -> Any:
        return {"plain": list(self.plain), "quantized": self.header.quantized}

    def resume(self, progress: Any, names: Sequence[str], stored: Sequence[str]) -> None:
        plain, quantized = dict.fromkeys(progress["plain"]), progress["quantized"]
        for entry in quantized.values():
            serialize.scheme_of(entry)
        keys = {name: [name] for name in plain} | {name: [*of["tensors"].values()] for name, of in quantized.items()}
        wanted = [key for name in names for key in keys.get(name, [])]
        if plain.keys() & quantized.keys() or keys.keys() - set(names) or wanted[: len(stored)] != [*stored]:
            raise ValueError("its tensors are not those of its parameters")
        self.plain, self.header.quantized = plain, quantized


class FolderForm(Form):
    """A folder with config.json, weights in a `SaveFormat`, and the other files of the source."""

    def __init__(self, format: str, source: Path, recipe: Any, options: Any = None) -> None:
        self.source = source if source.is_dir() else source.parent
        find_companions(self.source)  # they are refused before anything is written
        config = read_object(self.source / CONFIG) or {}
        self.config = {key: value for key, value in config.items() if key != "quantization_config"}
        self.format: SaveFormat = save_format(format, self.config, options)
        for name, value in {"recipe": recipe, "names": "checkpoint"}.items():
            if hasattr(self.format, name):
                setattr(self.format, name, value)

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return self.format.store(name, tensor)

    def room(self, names: Sequence[str], is_first: bool) -> int:
        return _room(names, _ROOM_FOR_A_WEIGHT)

    def finish_file(self, file: PartFile) -> None:
        file.finish(self.format.metadata([tensor.name for tensor in file.written]))

    def finish(self, files: Sequence[PartFile], target: Path) -> None:
        folder = files[0].path.parent
        if not folder.exists():  # it has been renamed
            return
        keys: dict[str, list[str]] = {}
        for file, place in zip(files, self.places(len(files), target, folder), strict=True):
            if not place.exists():
                self.finish_file(file)
                os.replace(file.path, place)
            keys[place.name] = [tensor.name for tensor in file.written]
        if len(files) > 1:
            write_index(folder, keys, sum(file.nbytes for file in files))
        write_json(folder / CONFIG, {**self.config, "quantization_config": self.format.config()})
        kept = {*keys, CONFIG, *copy_companions(self.source, folder)} | ({INDEX} if len(files) > 1 else set())
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()
        folder.rename(target)

    def places(self, count: int, target: Path, folder: Path) -> list[Path]:
        return [folder / name for name in file_names(count)]

    def progress(self) -> Any:
        return self.format.progress()

    def resume(self, progress: Any, names: Sequence[str], stored: Sequence[str]) -> None:
        self.format.resume(progress)


class FileForm(FolderForm):
    """A file that a `SaveFormat` writes when everything is stored."""

    def finish(self, files: Sequence[PartFile], target: Path) -> None:
        for file in files:
            self.finish_file(file)
        new = files[0].path.with_name("new")
        self.format.write([file.path for file in files], new, self.source)
        os.replace(new, target)

    def places(self, count: int, target: Path, folder: Path) -> list[Path]:
        return [folder / file_name(number) for number in range(count)]


def form_of(format: str, source: Path, aliases: Mapping[str, str], recipe: Any, arguments: Any) -> Form:
    """The form of a checkpoint in `format`; the names of shards in the own format follow from the arguments."""
    if format != tensor_file.OWN_FORMAT:
        kind = FileForm if SAVE_FORMATS[format].suffix else FolderForm
        return kind(format, source, recipe, arguments.get("options"))
    return OwnForm(aliases, hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:8])


def file_name(number: int) -> str:
    """The name of a file until the number of files is known."""
    return f"{number:05d}.safetensors"


def _room(names: Sequence[str], of_each: int) -> int:
    return 1000 + sum(of_each + 12 * len(name) for name in names)
