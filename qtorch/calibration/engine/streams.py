"""Streams: the inputs of one block after the other, of each batch, in the float model and in the quantized one.

The model's own forward gives them: blocks that are done return the outputs that were kept of them, and the block whose
inputs are wanted records its arguments and ends the run. So whatever a model does between its blocks (positions, masks,
norms, a decoder that reads an encoder) happens as it always does.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from ...checkpoint.part_file import Damaged, PartFile
from ...checkpoint.tensor_file import NAMES, TensorFile, checksum
from ...primitives.files import parse_json
from ..data import StopForward

_OUTPUTS = "outputs"
"""Metadata key of a file: the structures of the outputs."""

_CHECKSUMS = "crc32"
"""Metadata key of a file: JSON text, the checksum of `_OUTPUTS`, and (name, checksum) of each tensor."""

_ROOM = 1 << 16
"""Bytes for the header of a file; if it takes more, the file is copied once."""


class OutputStore:
    """The outputs of blocks, of each batch, in memory: structures of tensors that `torch.utils._pytree` knows. Tensors
    are kept contiguous, so that products with them give the same bits wherever they were kept."""

    in_memory = True

    def __init__(self) -> None:
        self.outputs: dict[int, list[Any]] = {}

    def write(self, block: int, outputs: Iterable[Any]) -> None:
        """Keep the outputs of the block of this index, in the order of the batches."""
        self.outputs[block] = [
            tree_map(lambda value: value.detach().contiguous() if isinstance(value, Tensor) else value, output)
            for output in outputs
        ]

    def read(self, block: int, batch: int) -> Any:
        """The output of a block in one batch."""
        return self.outputs[block][batch]

    def has(self, block: int) -> bool:
        """Whether the outputs of a block are kept."""
        return block in self.outputs

    def drop(self, block: int) -> None:
        """Keep the outputs of a block no longer."""
        self.outputs.pop(block, None)


class OnDisk(OutputStore):
    """Outputs in a file for each block, which outlives the process; one batch at a time is in memory."""

    in_memory = False

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
                for index, leaf in enumerate(leaves):
                    _check_storable(leaf)
                    if isinstance(leaf, Tensor):
                        stored = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
                        file.write(f"{batch}.{index}", stored)
                described = [[str(leaf.device)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                batches.append([specs.setdefault(treespec_dumps(spec), len(specs)), described])
            text = json.dumps({"specs": list(specs), "batches": batches})
            crcs = [[tensor.name, tensor.crc32] for tensor in file.written]
            file.finish({_OUTPUTS: text, _CHECKSUMS: json.dumps([crc32(text.encode()), *crcs])})
        finally:
            file.close()

    def read(self, block: int, batch: int) -> Any:
        try:
            if block not in self._open:
                self._open[block] = _opened(self.path(block))
            file, crcs, batches = self._open[block]
            spec, described = batches[batch]
            leaves = list(described)
            for index, leaf in enumerate(described):
                if isinstance(leaf, list):
                    name = f"{batch}.{index}"
                    tensor = file.read(name)
                    if checksum(tensor) != crcs[name]:
                        raise ValueError(f"{name} does not match its checksum")
                    leaves[index] = tensor.to(leaf[0])
            return tree_unflatten(leaves, spec)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
            raise Damaged(f"{self.path(block)}: {error}") from error

    def has(self, block: int) -> bool:
        return self.path(block).exists()

    def drop(self, block: int) -> None:
        if block in self._open:
            self._open.pop(block)[0].close()
        self.path(block).unlink(missing_ok=True)


def _opened(path: Path) -> tuple[TensorFile, dict[str, int], Any]:
    """(file, checksums of its tensors, structure of the output of each batch)."""
    file = TensorFile(path)
    text = file.metadata[_OUTPUTS]
    crc, *crcs = parse_json(file.metadata[_CHECKSUMS])
    if crc != crc32(text.encode()):
        raise ValueError("its structures do not match their checksum")
    described = parse_json(text)
    for leaf in [leaf for _, leaves in described["batches"] for leaf in leaves if isinstance(leaf, list)]:
        try:
            torch.device(*leaf)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    specs = [_spec(text) for text in described["specs"]]
    return file, dict(crcs), [(specs[spec], leaves) for spec, leaves in described["batches"]]


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


def _check_storable(value: Any) -> None:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided or value.dtype not in NAMES:
            raise ValueError(f"a block returns {value.dtype}, which cannot be kept on disk; calibrate without resume=")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"a block returns a {type(value).__name__}, which cannot be kept on disk; calibrate without resume=, or "
            "let the model return tensors only (for models of transformers: use_cache=False)"
        )


class Call(NamedTuple):
    """The arguments of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Calls = Callable[[int], Call | None]
"""The arguments of a block in the batch of this index."""

Run = Callable[[int], Any]
"""Runs the model on the batch of this index."""


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Call these functions in place of the `forward` of modules."""
    own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    for module, function in forwards.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
        for module, function in own.items():
            vars(module)["forward"] = function


class Stream:
    """One of the two models as it runs block by block on `count` batches. It keeps the outputs of the block before and
    of the blocks `keep`, which later parts of the model need, in `store`."""

    def __init__(
        self, run: Run, blocks: Sequence[nn.Module], count: int, keep: Sequence[nn.Module],
        store: OutputStore | None = None,
    ) -> None:  # fmt: skip
        self.run, self.blocks, self.count, self.keep = run, list(blocks), count, set(keep)
        self.store = store or OutputStore()
        self.done = 0
        self.missed: set[tuple[nn.Module, int]] = set()

    def calls(self, block: nn.Module) -> Calls:
        """The arguments of `block`, of each batch; computed when they are asked for if outputs are not in memory."""
        if not self.store.in_memory:
            return partial(self.call, block)
        return [self.call(block, batch) for batch in range(self.count)].__getitem__

    def call(self, block: nn.Module, batch: int) -> Call | None:
        """The arguments of `block` in one batch; None, and noted in `missed`, if that does not reach it, as an expert
        that gets no token."""
        found: list[Call] = []

        def record(*args: Any, **kwargs: Any) -> None:
            found.append(Call(*tree_map(_copied, (args, kwargs))))
            raise StopForward

        with replaced_forwards({**self._returning(batch), block: record}), suppress(StopForward):
            self.run(batch)
        if not found:
            self.missed.add((block, batch))
        return found[0] if found else None

    def finish(self, block: nn.Module, calls: Calls) -> None:
        """Run `block` on all batches and keep its outputs; blocks are finished in their order. In batches that do not
        reach it, it hands on the output of the block before."""

        def output(batch: int) -> Any:
            if (call := calls(batch)) is not None:
                return block(*call.args, **call.kwargs)
            return self.store.read(self.done - 1, batch) if self.done else None

        self.skip(block, map(output, range(self.count)))

    def skip(self, block: nn.Module, outputs: Iterable[Any] | None = None) -> None:
        """Take these outputs, or those that are kept, for those of `block`."""
        assert block is self.blocks[self.done]
        if outputs is not None:
            self.store.write(self.done, outputs)
        self.done += 1

    def forget(self) -> None:
        """Drop the outputs that nothing needs any more."""
        for index, block in enumerate(self.blocks[: max(0, self.done - 1)]):
            if block not in self.keep:
                self.store.drop(index)

    def clear(self) -> None:
        """Drop all outputs."""
        for index in range(len(self.blocks)):
            self.store.drop(index)

    def run_rest(self, batch: int) -> None:
        """Run the model on one batch with the outputs of the blocks that are done."""
        with replaced_forwards(self._returning(batch)):
            self.run(batch)

    def _returning(self, batch: int) -> dict[nn.Module, Callable[..., Any]]:
        """Forwards of the blocks that are done: a block whose outputs were not kept returns those of the next."""
        read: dict[int, Any] = {}

        def output(index: int) -> Any:
            if index not in read:
                read[index] = self.store.read(index, batch)
            return tree_map(_copied, read[index])

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        source = self.done - 1
        for index in reversed(range(self.done)):
            if self.store.has(index):
                source = index
            forwards[self.blocks[index]] = lambda *args, _source=source, **kwargs: output(_source)
        return forwards


def needed_outputs(model: nn.Module, run: Run, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks whose outputs have to be kept: none if each block depends on the one before only, or else all. Found
    by experiment on the first batch: the inputs of each block with and without the outputs of all others."""
    # The last blocks of their lists: the last layer of an encoder, for example.
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    lasts = [a for a, b in zip(blocks, [*blocks[1:], model]) if parents.get(id(a)) is not parents.get(id(b))]
    every, few = Stream(run, blocks, 1, blocks), Stream(run, blocks, 1, lasts)
    for block in blocks:
        call = every.call(block, 0)
        assert call is not None  # the trace of this batch has found it
        try:
            same = _equal(call, few.call(block, 0))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            same = False  # outputs of another block do not even fit
        if not same:
            return list(blocks)
        outputs = [block(*call.args, **call.kwargs)]
        every.skip(block, outputs)
        few.skip(block, outputs)
        few.forget()
    return lasts


def _equal(a: Any, b: Any) -> bool:
    of_a, of_b = tree_flatten(a)[0], tree_flatten(b)[0]
    if len(of_a) != len(of_b):
        return False
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
        for x, y in zip(of_a, of_b)
    )


def _copied(value: Any) -> Any:
    """A detached tensor of its own memory, since blocks may write into their inputs; other values as they are."""
    return value.detach().clone() if isinstance(value, Tensor) else value
