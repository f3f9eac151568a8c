"""Streams: the inputs of one block after the other, of each batch, in the float model and in the quantized one.

The model's own forward gives them: blocks that are done return the outputs that were kept of them, and the block whose
inputs are wanted records its arguments and ends the run. So whatever a model does between its blocks (positions, masks,
norms, a decoder that reads an encoder) happens as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map


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
    """

    def __init__(self, run: Run, blocks: Sequence[nn.Module], count: int, keep: Sequence[nn.Module]) -> None:
        self.run = run
        self.blocks = list(blocks)
        self.count = count
        self.keep = set(keep)
        self.outputs: dict[nn.Module, list[Any]] = {}
        self.done: list[nn.Module] = []

    def calls(self, block: nn.Module) -> list[Call]:
        """The arguments of `block`, of each batch."""
        return [self.call(block, batch) for batch in range(self.count)]

    def call(self, block: nn.Module, batch: int) -> Call:
        """The arguments of `block` in one batch."""
        found: list[Call] = []

        def record(*args: Any, **kwargs: Any) -> None:
            found.append(Call(*tree_map(_copied, (args, kwargs))))
            raise StopForward

        with replaced_forwards({**self._returning(batch), block: record}), suppress(StopForward):
            self.run(batch)
        return found[0]

    def finish(self, block: nn.Module, calls: Sequence[Call]) -> None:
        """Run `block` on all batches and keep its outputs."""
        self.outputs[block] = [block(*call.args, **call.kwargs) for call in calls]
        for other in self.done:
            if other not in self.keep:
                self.outputs.pop(other, None)
        self.done.append(block)

    def run_rest(self, batch: int) -> None:
        """Run the model on one batch with the outputs of the blocks that are done."""
        with replaced_forwards(self._returning(batch)):
            self.run(batch)

    def _returning(self, batch: int) -> dict[nn.Module, Callable[..., Any]]:
        """Forwards of the blocks that are done: a block whose outputs were not kept returns those of the next."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        output: Any = None
        for block in reversed(self.done):
            if block in self.outputs:
                output = self.outputs[block][batch]
            forwards[block] = lambda *args, _output=output, **kwargs: tree_map(_copied, _output)
        return forwards


def needed_outputs(run: Run, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks whose outputs have to be kept: none if each block depends on the one before only, or else all.

    It is found by experiment on the first batch: the inputs of each block with and without the outputs of all others.
    """
    lasts = _lasts(blocks)
    every, few = Stream(run, blocks, 1, blocks), Stream(run, blocks, 1, lasts)
    for block in blocks:
        calls, others = every.calls(block), few.calls(block)
        if not _equal(calls[0], others[0]):
            return list(blocks)
        every.finish(block, calls)
        few.finish(block, calls)
    return lasts


def _lasts(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The last blocks of runs of one class: the last layer of an encoder, for example."""
    return [a for a, b in zip(blocks, [*blocks[1:], None]) if type(a) is not type(b)]


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
