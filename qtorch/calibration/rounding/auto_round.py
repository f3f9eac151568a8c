"""AutoRound: rounding and scales of all weights of a block, learned by gradient descent on the block's output.

With t the values that are rounded, in units of the scale, and V and f learned,

    q = (clip(round(t + V) + z) - z) * s (1 + f),        |V|, |f| <= 1/2

and for both, x <- x - lr m, with m the running mean of dL/dx divided by its root mean square in the weight, and lr
falling linearly to zero. Gradients pass straight through `round`, so that of f is that of a learned step size. Learning
starts from codes that were chosen before, at V = f = 0.

Source: AutoRound, arXiv 2309.05516, section 3. There m is the sign of the gradient. From the codes of GPTQ signs raised
the error of the output (docs/guides/calibration): they move all elements as far as the few that matter.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...primitives import QuantSpec, fake_quant, jsonable, qdtype
from ..engine.in_order import BlockRun
from .grid import Grid

MOST, MOMENTUM = 0.5, 0.9
"""The bound of |V| and |f|; that of the running mean of gradients."""


@dataclass(frozen=True, eq=False)
class Learnable:
    """A weight whose codes have been chosen for `values`, (N, K) of each grid: its grids, several for experts; what
    makes the parameter of as many matrices (N, K); and what makes the weight and its report of learned grids and the
    seconds that it took."""

    grids: Sequence[Grid]
    values: Callable[[], Sequence[Tensor]]
    as_parameter: Callable[[Sequence[Tensor]], Tensor]
    with_grids: Callable[[Sequence[Grid], float], Any]

    @property
    def has_own_scales(self) -> bool:
        """Whether the codes are integers, and each row has scales of its own."""
        grid, spec = self.grids[0], self.grids[0].spec
        integers = isinstance(spec, QuantSpec) and not qdtype(spec.dtype).is_floating_point
        return integers and grid.block[0] == 1 and not spec.zero_point_domain.adds_zero_point  # type: ignore[union-attr]


class LearnedGrid:
    """The codes and scales of one weight while they are learned: t + V is at first nearest to the code it has."""

    def __init__(self, grid: Grid, values: Tensor) -> None:
        self.grid, self.width = grid, grid.block[1]
        self.low, self.high = (float(code) for code in grid.spec.code_range)  # type: ignore[union-attr]
        self.scale = grid.scale.float()
        codes = grid.codes.float()
        self.zeros = self._spread(torch.zeros_like(self.scale) if grid.other is None else grid.other.float())
        distance = values.float() / self._spread(self.scale) + self.zeros - codes
        # Whatever lies behind the first or the last code is rounded to it.
        beyond = ((codes == self.high) & (distance > 0)) | ((codes == self.low) & (distance < 0))
        self.base = codes + torch.where(beyond, distance, distance.clamp(-0.499, 0.499))
        self.offset = torch.zeros_like(codes, requires_grad=True)
        self.factor = torch.zeros_like(self.scale, requires_grad=True)
        self.means = [torch.zeros_like(self.offset), torch.zeros_like(self.factor)]

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.width, 1)

    def _codes(self) -> Tensor:
        moved = self.base + self.offset
        codes = moved.detach().round()
        nearest = codes.clamp(self.low, self.high)
        return fake_quant.straight_through(moved, nearest, codes == nearest)

    def weight(self) -> Tensor:
        """(N, K) in the logical dtype, with gradients."""
        return ((self._codes() - self.zeros) * self._spread(self.scale * (1 + self.factor))).to(self.grid.dtype)

    @torch.no_grad()
    def learned(self) -> Grid:
        """The codes and scales as they are stored."""
        grid = self.grid.copy()
        grid.codes = self._codes().to(grid.codes.dtype)
        return grid.with_scale(self.scale * (1 + self.factor))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """One step of gradient descent on V and f."""
        learned = (self.offset, self.factor)
        for x, mean, gradient, rate in zip(learned, self.means, gradients, rates, strict=True):
            size = gradient.square().mean().sqrt().clamp_min(torch.finfo(gradient.dtype).tiny)
            mean.lerp_(gradient / size, 1 - MOMENTUM)
            x.sub_(mean, alpha=rate).clamp_(-MOST, MOST)


@jsonable
class AutoRound:
    """Gradient descent on the rounding and the scales of all weights of a block.

    Args:
        iterations: steps, each on one batch.
        lr: first step of V, in units of the scale.
        scale_lr: first step of f.
        seed: of the order of the batches.

    Raises:
        ValueError: `iterations` is less than 1.
    """

    iterations: int = 200
    lr: float = 1e-3
    scale_lr: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"auto_round: iterations is 1 or more, got {self.iterations}")

    def learn_block(self, run: BlockRun, made: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
        """The weights of a block with what was learned; none if the error of the block has not become less."""
        begun = time.perf_counter()
        starts = {weight: of.learnable for weight, of in made.items() if of.learnable is not None}
        found = self.learn(starts, run.loss, len(run.batches))
        seconds = (time.perf_counter() - begun) / max(1, len(found))
        return {weight: starts[weight].with_grids(grids, seconds) for weight, grids in found.items()}

    def learn(
        self, weights: Mapping[Tensor, Learnable], loss: Callable[[int, Mapping[Tensor, Tensor]], Tensor], count: int
    ) -> dict[Tensor, list[Grid]]:
        """What was learned, by weight; nothing if the error over all batches is not lower than before.

        Args:
            weights: float weight -> where learning starts.
            loss: (batch, float weight -> what replaces it) -> the error of the block.
            count: number of batches.
        """
        learned = {
            weight: [LearnedGrid(grid, values) for grid, values in zip(start.grids, start.values(), strict=True)]
            for weight, start in weights.items()
            if start.has_own_scales
        }
        if not learned:
            return {}

        @torch.no_grad()
        def total() -> float:
            values = {
                weight: weights[weight].as_parameter([grid.learned().values().to(weight.dtype) for grid in grids])
                for weight, grids in learned.items()
            }
            return sum(float(loss(batch, values)) for batch in range(count))

        before = total()
        every = [grid for grids in learned.values() for grid in grids]
        leaves = [leaf for grid in every for leaf in (grid.offset, grid.factor)]
        rates = (self.lr, self.scale_lr)
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = []
        for iteration in range(self.iterations):
            order = order or torch.randperm(count, generator=generator, device="cpu").tolist()
            with torch.enable_grad():
                values = {w: weights[w].as_parameter([grid.weight() for grid in grids]) for w, grids in learned.items()}
                error = loss(order.pop(), values)
                gradients = torch.autograd.grad(error, leaves, allow_unused=True, materialize_grads=True)
            left = 1 - iteration / self.iterations
            for index, grid in enumerate(every):
                grid.step(gradients[2 * index : 2 * index + 2], [rate * left for rate in rates])
        if total() >= before:
            return {}
        return {weight: [grid.learned() for grid in grids] for weight, grids in learned.items()}
