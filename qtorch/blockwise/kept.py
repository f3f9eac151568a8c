"""Kept: where a stream keeps the outputs of its blocks, of each batch: in memory, or in files that outlive the process.

An output is any structure of tensors that `torch.utils._pytree` knows. Its tensors are kept contiguous, so that
products with them give the same bits wherever they were kept.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from ..checkpoint.file_format import checksum
from ..checkpoint.journal import Damaged
from ..checkpoint.part_file import PartFile
from ..checkpoint.tensor_file import NAMES, TensorFile
from ..files import parse_json

_OUTPUTS = "outputs"
"""Metadata key of a file: the structures of the outputs."""

_CHECKSUMS = "crc32"
"""Metadata key of a file: JSON text, the checksum of `_OUTPUTS`, and (name, checksum) of each tensor."""

_ROOM = 1 << 16
"""Bytes for the header of a file; if it takes more, the file is copied once."""


class Kept(ABC):
    """The outputs of blocks, by the index of the block.

    Attributes:
        in_memory: reading takes no time.
    """

    in_memory = False

    @abstractmethod
    def write(self, block: int, outputs: Iterable[Any]) -> None:
        """Keep the outputs of a block, in the order of the batches."""

    @abstractmethod
    def read(self, block: int, batch: int) -> Any:
        """The output of a block in one batch."""

    @abstractmethod
    def has(self, block: int) -> bool:
        """Whether the outputs of a block are kept."""

    @abstractmethod
    def drop(self, block: int) -> None:
        """Keep the outputs of a block no longer."""


class InMemory(Kept):
    """Outputs in memory."""

    in_memory = True

    def __init__(self) -> None:
        self.outputs: dict[int, list[Any]] = {}

    def write(self, block: int, outputs: Iterable[Any]) -> None:
        self.outputs[block] = [tree_map(_contiguous, output) for output in outputs]

    def read(self, block: int, batch: int) -> Any:
        return self.outputs[block][batch]

    def has(self, block: int) -> bool:
        return block in self.outputs

    def drop(self, block: int) -> None:
        self.outputs.pop(block, None)


class OnDisk(Kept):
    """Outputs in a file for each block; one batch at a time is in memory.

    Args:
        folder: of the files.
        name: begins their names.

    Raises:
        ValueError: an output has something in it that a file cannot hold.
        Damaged: a file is not what was written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._open: dict[int, tuple[TensorFile, dict[str, int], Any]] = {}

    def path(self, block: int) -> Path:
        """The file of a block."""
        return self.folder / f"{self.name}-{block:05d}.safetensors"

    def write(self, block: int, outputs: Iterable[Any]) -> None:
        self.drop(block)
        file = PartFile(self.path(block), _ROOM)
        specs: dict[str, int] = {}
        batches: list[Any] = []
        try:
            for batch, output in enumerate(outputs):
                leaves, spec = tree_flatten(output)
                kept = []
                for index, leaf in enumerate(leaves):
                    if isinstance(leaf, Tensor):
                        file.write(f"{batch}.{index}", _storable(leaf))
                        kept.append([str(leaf.device)])
                    else:
                        kept.append(_plain(leaf))
                batches.append([specs.setdefault(treespec_dumps(spec), len(specs)), kept])
            text = json.dumps({"specs": list(specs), "batches": batches})
            file.finish({_OUTPUTS: text, _CHECKSUMS: json.dumps([crc32(text.encode()), *_crcs(file)])})
        finally:
            file.close()

    def read(self, block: int, batch: int) -> Any:
        try:
            if block not in self._open:
                self._open[block] = _opened(self.path(block))
            file, crcs, batches = self._open[block]
            spec, kept = batches[batch]
            names = [f"{batch}.{index}" for index in range(len(kept))]
            leaves = [
                _read(file, crcs, name).to(leaf[0]) if isinstance(leaf, list) else leaf
                for name, leaf in zip(names, kept, strict=True)
            ]
            return tree_unflatten(leaves, spec)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
            raise Damaged(f"{self.path(block)}: {error}") from error

    def has(self, block: int) -> bool:
        return self.path(block).exists()

    def drop(self, block: int) -> None:
        if block in self._open:
            self._open.pop(block)[0].close()
        self.path(block).unlink(missing_ok=True)


def _crcs(file: PartFile) -> list[Any]:
    return [[tensor.name, tensor.crc32] for tensor in file.written]


def _opened(path: Path) -> tuple[TensorFile, dict[str, int], Any]:
    """(file, checksums of its tensors, structure of the output of each batch).

    Raises:
        ValueError, TypeError, LookupError: it is not what was written.
    """
    file = TensorFile(path)
    text = file.metadata[_OUTPUTS]
    crc, *crcs = parse_json(file.metadata[_CHECKSUMS])
    if crc != crc32(text.encode()):
        raise ValueError("its structures do not match their checksum")
    described = parse_json(text)
    for leaf in [leaf for _, kept in described["batches"] for leaf in kept if isinstance(leaf, list)]:
        try:
            torch.device(*leaf)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    specs = [_spec(text) for text in described["specs"]]
    return file, dict(crcs), [(specs[spec], kept) for spec, kept in described["batches"]]


def _spec(text: str) -> Any:
    """`treespec_loads` for text of others: an enumeration in it would be imported, from any module."""
    left = [parse_json(text)]
    while left:
        node = left.pop()
        if isinstance(node, dict) and "__enum__" in node:
            raise ValueError("its structures have an enumeration")
        if isinstance(node, dict) and isinstance(node.get("context"), str):
            left.append(parse_json(node["context"]))
        left += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return treespec_loads(text)


def _read(file: TensorFile, crcs: dict[str, int], name: str) -> Tensor:
    tensor = file.read(name)
    if checksum(tensor) != crcs[name]:
        raise ValueError(f"{name} does not match its checksum")
    return tensor


def _contiguous(value: Any) -> Any:
    return value.detach().contiguous() if isinstance(value, Tensor) else value


def _storable(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype not in NAMES:
        raise ValueError(
            f"a block returns a {type(tensor).__name__} of {tensor.dtype}, which cannot be kept on disk; calibrate "
            "without resume="
        )
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"a block returns a {type(value).__name__}, which cannot be kept on disk; calibrate without resume=, or let "
        "the model return tensors only (for models of transformers: use_cache=False)"
    )
