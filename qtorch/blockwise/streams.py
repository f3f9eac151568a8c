"""Streams: the inputs of one block after the other, of each batch, in the float model and in the quantized one.

The model's own forward gives them: blocks that are done return the outputs that were kept of them, and the block whose
inputs are wanted records its arguments and ends the run. So whatever a model does between its blocks (positions, masks,
norms, a decoder that reads an encoder) happens as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .kept import InMemory, Kept


class StopForward(Exception):
    """Ends a forward whose rest is not needed."""


class Call(NamedTuple):
    """The arguments of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Run = Callable[[int], Any]
"""Runs the model on the batch of this index."""


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Call these functions in place of the `forward` of modules."""
    for module, function in forwards.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


class Stream:
    """One of the two models as it runs block by block.

    Args:
        run: runs the model.
        blocks: in the order in which they run.
        count: number of batches.
        keep: the blocks whose outputs later parts of the model need, beside those of the block before.
        kept: where outputs are kept.
    """

    def __init__(
        self, run: Run, blocks: Sequence[nn.Module], count: int, keep: Sequence[nn.Module], kept: Kept | None = None
    ) -> None:
        self.run = run
        self.blocks = list(blocks)
        self.count = count
        self.keep = set(keep)
        self.kept = InMemory() if kept is None else kept
        self.done = 0

    def calls(self, block: nn.Module) -> Sequence[Call]:
        """The arguments of `block`, of each batch; computed when they are asked for if outputs are not in memory."""
        calls = _Calls(self, block)
        return list(calls) if self.kept.in_memory else calls

    def call(self, block: nn.Module, batch: int) -> Call:
        """The arguments of `block` in one batch."""
        found: list[Call] = []

        def record(*args: Any, **kwargs: Any) -> None:
            found.append(Call(*tree_map(_copied, (args, kwargs))))
            raise StopForward

        with replaced_forwards({**self._returning(batch), block: record}), suppress(StopForward):
            self.run(batch)
        return found[0]

    def finish(self, block: nn.Module, calls: Iterable[Call]) -> None:
        """Run `block` on all batches and keep its outputs; blocks are finished in their order."""
        self.skip(block, (block(*call.args, **call.kwargs) for call in calls))

    def skip(self, block: nn.Module, outputs: Iterable[Any] | None = None) -> None:
        """Take these outputs, or those that are kept, for those of `block`."""
        assert block is self.blocks[self.done]
        if outputs is not None:
            self.kept.write(self.done, outputs)
        self.done += 1

    def forget(self) -> None:
        """Drop the outputs that nothing needs any more."""
        for index, block in enumerate(self.blocks[: max(0, self.done - 1)]):
            if block not in self.keep:
                self.kept.drop(index)

    def clear(self) -> None:
        """Drop all outputs."""
        for index in range(len(self.blocks)):
            self.kept.drop(index)

    def run_rest(self, batch: int) -> None:
        """Run the model on one batch with the outputs of the blocks that are done."""
        with replaced_forwards(self._returning(batch)):
            self.run(batch)

    def _returning(self, batch: int) -> dict[nn.Module, Callable[..., Any]]:
        """Forwards of the blocks that are done: a block whose outputs were not kept returns those of the next."""
        read: dict[int, Any] = {}

        def output(index: int) -> Any:
            if index not in read:
                read[index] = self.kept.read(index, batch)
            return tree_map(_copied, read[index])

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        source = self.done - 1
        for index in reversed(range(self.done)):
            if self.kept.has(index):
                source = index
            forwards[self.blocks[index]] = lambda *args, _source=source, **kwargs: output(_source)
        return forwards


class _Calls(Sequence[Call]):
    """The arguments of a block, computed when they are asked for."""

    def __init__(self, stream: Stream, block: nn.Module) -> None:
        self.stream, self.block = stream, block

    def __len__(self) -> int:
        return self.stream.count

    def __getitem__(self, batch: Any) -> Any:
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        return self.stream.call(self.block, batch)


def needed_outputs(model: nn.Module, run: Run, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks whose outputs have to be kept: none if each block depends on the one before only, or else all.

    It is found by experiment on the first batch: the inputs of each block with and without the outputs of all others.
    """
    lasts = _lasts(model, blocks)
    every, few = Stream(run, blocks, 1, blocks), Stream(run, blocks, 1, lasts)
    for block in blocks:
        calls = every.calls(block)
        try:
            same = _equal(calls[0], few.call(block, 0))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            same = False  # outputs of another block do not even fit
        if not same:
            return list(blocks)
        outputs = [block(*calls[0].args, **calls[0].kwargs)]
        every.skip(block, outputs)
        few.skip(block, outputs)
        few.forget()
    return lasts


def _lasts(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The last blocks of their lists: the last layer of an encoder, for example."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    return [a for a, b in zip(blocks, [*blocks[1:], model]) if parents.get(id(a)) is not parents.get(id(b))]


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
