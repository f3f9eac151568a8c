"""clip: smaller ranges for the groups of a weight, where that lessens the error of the output (AWQ's clipping).

For each group g of inputs and each block of rows, the range of the weight is shrunk by one of ten ratios from 1 to .55,
the one with the smallest

    sum over tokens (x_g (w_g - Q(clamp(w_g)))^T)^2

Values beyond the range are clamped, so this is no equivalence: it belongs before `Nearest`, not before GPTQ or a float
target, which would take the clamped weights for the true ones.

Source: AWQ's reference implementation, llm-awq, auto_clip; there, the search takes 512 tokens, as here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...model.report import TransformReport
from ...primitives import QuantSpec, jsonable
from ..rounding import Grid
from .scaling import TOKENS, Consumer, WeightInputs, collect_inputs
from .work import Transform, Work


@jsonable
@dataclass(frozen=True, repr=False)
class Clip(Transform):
    """Clamp the weights, group by group, to the range with the smallest error of the output.

    A weight whose output does not come nearer as a whole is left as it is.

    Args:
        ratios: of the range, to try.
        tokens: number of input rows that the search computes with.

    Raises:
        ValueError: a ratio is not in (0, 1].
    """

    ratios: tuple[float, ...] = tuple(1 - step / 20 for step in range(1, 10))
    tokens: int = TOKENS
    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratios", tuple(self.ratios))
        if not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"clip: ratios are numbers in (0, 1], got {self.ratios}")

    def apply(self, work: Work) -> list[TransformReport]:
        names = {id(work.parameters[name]): name for name in work.recipes if name in work.parameters.slots}
        weights = [work.parameters[name] for name in names.values()]
        found: dict[str, dict[int | None, WeightInputs]] = {}
        collected = collect_inputs(work.model, work.data, work.batches, weights, self.tokens)
        for (owner, expert), inputs in collected.items():
            found.setdefault(names[owner], {})[expert] = inputs
        return [self._clip(work, name, of) for name, of in found.items()]

    def _clip(self, work: Work, name: str, found: dict[int | None, WeightInputs]) -> TransformReport:
        weight = work.parameters[name].detach()
        recipe = work.recipes[name]
        if not isinstance(recipe.linear_spec().weight, QuantSpec):
            return TransformReport(self.name, name, "not done", "look-up tables have no range")
        result, before, after = weight.clone(), 0.0, 0.0
        for expert, inputs in found.items():
            matrix = weight if expert is None else weight[expert]
            rows = inputs.rows
            if matrix.shape[-1] != rows.shape[-1]:
                return TransformReport(self.name, name, "not done", "its groups run across the outputs")
            channels = torch.zeros(matrix.shape[1], dtype=torch.int32, device="cpu")
            consumer = Consumer(matrix, channels, False, inputs, recipe)
            one = torch.ones(0, dtype=torch.float32, device="cpu")
            old = new = consumer.error(one)
            clamped = self._clamped(matrix, rows, recipe.linear_spec().weight)
            other = Consumer(clamped, consumer.channels, False, inputs, recipe)
            other.reference = consumer.reference
            if (error := other.error(one)) < old:
                new = error
                result[... if expert is None else expert] = clamped
            before, after = before + old / len(found), after + new / len(found)
        if after == before:
            return TransformReport(self.name, name, "unchanged", "no range lessens the error", (), before, before)
        work.parameters.replace({name: result})
        return TransformReport(self.name, name, "clipped", "", (), before, after)

    def _clamped(self, weight: Tensor, rows: Tensor, spec: QuantSpec) -> Tensor:
        """`weight` (N, K) with each block clamped to its best range; blocks are seen as (n, height, groups, width)."""
        height, width = spec.block_size(weight.shape)
        blocks = weight.to(rows.dtype).unflatten(1, (-1, width)).unflatten(0, (-1, height))
        low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
        x = rows.unflatten(1, (-1, width))
        moments = torch.einsum("mgi,mgj->gij", x, x) / len(x)
        best, lowest = blocks, self._errors(blocks, blocks, moments, weight, spec)
        for ratio in self.ratios:
            tried = torch.minimum(torch.maximum(blocks, low * ratio), high * ratio)
            error = self._errors(tried, blocks, moments, weight, spec)
            better = (error < lowest)[:, None, :, None]
            best, lowest = torch.where(better, tried, best), torch.minimum(error, lowest)
        return best.flatten(0, 1).flatten(1, 2).to(weight.dtype)

    @staticmethod
    def _errors(tried: Tensor, blocks: Tensor, moments: Tensor, weight: Tensor, spec: QuantSpec) -> Tensor:
        """The error of each block, (n, groups)."""
        flat = tried.flatten(0, 1).flatten(1, 2)
        values = Grid.of(flat, spec, weight.dtype).values().to(blocks.dtype)
        difference = blocks - values.reshape(blocks.shape)
        return torch.einsum("nhgi,gij,nhgj->ng", difference, moments, difference)
