"""BlockRun: a block run with other tensors as weights, on the inputs that it has in the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from .streams import Call


class BlockRun:
    """A block on all batches.

    Args:
        block: with quantized weights in place.
        calls: its arguments in the model as quantized so far, of each batch.
        output: batch -> its output in the float model.
        masks: tokens that count, of each batch; None if all do.
        names: weight that can be replaced -> its names in the block.
    """

    def __init__(
        self,
        block: nn.Module,
        calls: Sequence[Call],
        output: Callable[[int], Any],
        masks: Sequence[Tensor | None],
        names: Mapping[Tensor, Sequence[str]],
    ) -> None:
        self.block, self.calls, self.output, self.masks, self.names = block, calls, output, masks, names
        self.count = len(calls)

    def loss(self, batch: int, weights: Mapping[Tensor, Tensor]) -> Tensor:
        """The mean square of the error of the output of one batch, relative to that of the float output.

        Args:
            weights: what replaces the weights of `names`.
        """
        named = {name: tensor for weight, tensor in weights.items() for name in self.names[weight]}
        # A block may write into its inputs.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(self.calls[batch]))
        output = functional_call(self.block, named, args, kwargs)
        found, wanted = _first(output), _first(self.output(batch))
        error = (found - wanted).float()
        mask = self.masks[batch]
        if mask is not None and tuple(error.shape[: mask.dim()]) == tuple(mask.shape):
            error, wanted = error[mask.to(error.device)], wanted[mask.to(error.device)]
        return error.square().sum() / wanted.float().square().sum()


class BlockLearner(Protocol):
    """What improves the weights of a block together, once all of them are quantized."""

    def learn_block(self, run: BlockRun, made: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        """Better ones of what was `made` for float weights, if there are any."""
        ...


def _first(output: Any) -> Tensor:
    """The first tensor of what a block returns, its hidden states."""
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"a block returned no tensor in floating point, got {type(output).__name__}")


def weight_names(block: nn.Module, weights: Mapping[int, Tensor]) -> dict[Tensor, list[str]]:
    """The names in `block` of the parameters that stand for `weights`, which are given by the ids of the parameters."""
    found: dict[Tensor, list[str]] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        weight = weights.get(id(parameter))
        if weight is not None:
            found.setdefault(weight, []).append(name)
    return found
