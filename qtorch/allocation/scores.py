"""Scores: by how much the outputs of the model change when a weight takes a recipe, predicted weight by weight.

    score = 1/2 tr(G D H D^T),    D = W - Q,  H = E[x x^T],  G diagonal

with the inputs x of the weight, and G_n the sum of the squared gradients of output n over all rows (see
`statistics.output_gradients`), divided by the number of rows of the model's output: the expected divergence of a row.
Without gradients G = I / tr(W H W^T), so that the score is half the relative error of the outputs of the layer: errors
of layers whose outputs differ in size cannot be compared otherwise. Without data it is |D|^2 / (2 |W|^2).

One H is kept at a time: weights are scored in the order in which the model runs, by the engine of `blockwise`.
"""

from __future__ import annotations

import statistics as middle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import Wanted, quantize_in_order
from ..calibration.rounding import Grid, Rounding
from ..calibration.rounding import loss as quadratic
from ..dtypes import QuantizedTensor
from ..recipe import WeightRecipe
from ..statistics import Data, Key, SecondMoment, Statistic, Statistics
from ..statistics.batches import eval_mode
from ..statistics.output_gradients import OutputGradients, without_parameter_gradients
from .activations import activation_error
from .items import Item
from .outputs import Loss, Rows


@dataclass
class Scores:
    """The scores of one weight.

    Attributes:
        values: of each candidate.
        tokens: rows of inputs that were seen; 0 for a weight that the data does not use.
        uses: products with the weight in a batch.
    """

    values: list[float]
    tokens: int = 0
    uses: int = 1


def score_weights(
    items: Sequence[Item],
    model: nn.Module,
    data: Data | None,
    *,
    gradients: bool = True,
    loss: Loss | str | None = None,
    rounding: Rounding | None = None,
    seed: int = 0,
) -> list[Scores]:
    """The scores of all items; those that no batch uses count as sensitive as the median of the others.

    Args:
        data: batches that can be read more than once; None for scores of the weights alone.
    """
    if data is None:
        return [Scores([error / 2 for error in _relative_errors(item)]) for item in items]
    seen = _watch_outputs(items, model, data, gradients, loss, seed)
    wanted = []
    for item in items:
        slots = [(slot.module, slot.attribute) for slot in item.target.slots]
        kinds: dict[type[Statistic], None] = {SecondMoment: None}
        for candidate in item.candidates:
            if candidate is not None and (kind := activation_error(candidate)) is not None:
                kinds[kind] = None
        make = partial(_scored, item, seen, rounding)
        transposed = item.target.kind.is_transposed
        wanted.append(Wanted(item.parameter, slots, list(kinds), make, transposed=transposed))
    made = quantize_in_order(model, wanted, data)
    found = [made[item.parameter][1] for item in items]
    _fill_unseen(items, found)
    return found


@dataclass
class Seen:
    """What was seen of the outputs; `rows` is the number of rows of the model's output, 0 without gradients."""

    recorder: OutputGradients
    rows: int
    batches: int

    def importance(self, item: Item, expert: int | None, outputs: int, share: float) -> Tensor:
        """G of one matrix, (N,); `share` of the rows of the weight are those of this expert."""
        key: Key = (id(item.parameter), expert)
        if not self.rows:
            return torch.full((outputs,), share, dtype=torch.float32, device="cpu")
        found = self.recorder.squares.get(key)
        return torch.zeros(outputs, dtype=torch.float32, device="cpu") if found is None else found / self.rows


def _watch_outputs(
    items: Sequence[Item], model: nn.Module, data: Data, gradients: bool, loss: Loss | str | None, seed: int
) -> Seen:
    """Run the model on all batches, forward and, for gradients, backward."""
    transposed = {id(item.parameter) for item in items if item.target.kind.is_transposed}
    recorder = OutputGradients([item.parameter for item in items], transposed)
    generator = torch.Generator().manual_seed(seed)
    rows, batches = 0, 0
    with eval_mode(model), without_parameter_gradients(model), torch.set_grad_enabled(gradients):
        for batches, batch in enumerate(data.batches, 1):  # noqa: B007
            with recorder:
                output = data.call(model, batch)
            if not gradients:
                continue
            of_batch = Rows.of(output, data.mask_of(batch), loss == "logits")
            value = loss(output, batch) if callable(loss) else of_batch.sampled_loss(generator)
            if value.requires_grad:
                value.backward()
            rows += len(of_batch.values)
    return Seen(recorder, rows, batches)


def _scored(
    item: Item, seen: Seen, rounding: Rounding | None, found: Statistics | Mapping[int, Statistics]
) -> tuple[Tensor, Scores]:
    """The float weight, which stays, and its scores."""
    weight = item.parameter.detach()
    of_matrices = _by_matrix(item, found)
    tokens = [int(moment.rows) for of_one in of_matrices.values() if (moment := _moment(of_one)) is not None]
    values = [_score(item, candidate, of_matrices, seen, rounding) for candidate in item.candidates]
    counted, rows = _table_rows(item, seen)
    if counted is not None:
        for index, candidate in enumerate(item.candidates):
            values[index] += _table_score(item, candidate, seen, counted)
    uses = seen.recorder.uses.get(id(item.parameter), 0) / max(1, seen.batches)
    return weight, Scores(values, sum(tokens) + rows, max(1, round(uses)))


def _by_matrix(item: Item, found: Any) -> dict[int | None, Statistics]:
    """The statistics of each matrix of the weight that got inputs."""
    if item.matrix.dim() == 2:
        return {None: found} if _moment(found) is not None else {}
    return {expert: of_one for expert, of_one in found.items() if isinstance(of_one, dict) and _moment(of_one)}


def _moment(found: Statistics) -> SecondMoment | None:
    moment = found.get(SecondMoment)
    return moment if isinstance(moment, SecondMoment) and moment.rows else None


@torch.no_grad()
def _score(
    item: Item,
    candidate: WeightRecipe | None,
    of_matrices: Mapping[int | None, Statistics],
    seen: Seen,
    rounding: Rounding | None,
) -> float:
    if candidate is None or not of_matrices:
        return 0.0
    weight, kind = item.matrix, activation_error(candidate)
    whole = None if rounding is not None else _nearest(candidate, weight)
    total = sum(of_one[SecondMoment].rows for of_one in of_matrices.values())
    score = size = 0.0
    for expert, statistics in of_matrices.items():
        matrix = (weight if expert is None else weight[expert]).float()
        seen_moment = statistics[SecondMoment]
        moment = seen_moment.mean.to(matrix.device)  # type: ignore[attr-defined]
        if whole is None:
            quantized = _rounded(candidate, matrix, weight.dtype, moment, rounding)
        else:
            quantized = whole if expert is None else whole[expert]
        importance = seen.importance(item, expert, len(matrix), seen_moment.rows / total).to(matrix.device)
        errors = quadratic(matrix - quantized, moment)
        if kind is not None:
            errors = errors + quadratic(quantized, statistics[kind].mean.to(matrix.device))  # type: ignore[attr-defined]
        score += float((importance * errors).sum()) / 2
        size += float((importance * quadratic(matrix, moment)).sum())
    return score if seen.rows else score / (size or 1.0)


def _nearest(candidate: WeightRecipe, weight: Tensor) -> Tensor:
    made: Any = candidate.apply(weight)
    return made.dequantize(torch.float32) if isinstance(made, QuantizedTensor) else made.float()


def _rounded(
    candidate: WeightRecipe, matrix: Tensor, dtype: torch.dtype, moment: Tensor, rounding: Rounding | None
) -> Tensor:
    assert rounding is not None
    if candidate.prunes:
        raise ValueError(
            f"allocate: {candidate} prunes weights, which rounding={rounding} does not; leave out rounding"
        )
    grid = Grid.of(matrix, candidate.linear_spec().weight, dtype, moment.diagonal())
    rounding.round(matrix, moment, grid)
    return grid.values()


def _table_rows(item: Item, seen: Seen) -> tuple[Tensor | None, int]:
    """How often each row of an embedding table was looked up, and the sum."""
    counts = seen.recorder.frequencies.get(id(item.parameter))
    return counts, 0 if counts is None else int(counts.sum())


@torch.no_grad()
def _table_score(item: Item, candidate: WeightRecipe | None, seen: Seen, counts: Tensor) -> float:
    """1/2 sum_v f_v sum_n G_n d_vn^2 of an embedding, whose inputs are rows of the identity of frequencies f."""
    if candidate is None:
        return 0.0
    weight = item.matrix.float()
    errors = (weight - _nearest(candidate, item.matrix)).square()
    frequencies = (counts / counts.sum()).to(weight.device)
    importance = torch.ones(weight.shape[1], device=weight.device, dtype=torch.float32)
    if seen.rows:
        squares = seen.recorder.tables.get(id(item.parameter))
        importance = importance * 0 if squares is None else squares.to(weight.device) / seen.rows
    size = 1.0 if seen.rows else float(frequencies @ weight.square() @ importance) or 1.0
    return float(frequencies @ errors @ importance) / 2 / size


@torch.no_grad()
def _relative_errors(item: Item) -> list[float]:
    """|W - Q|^2 / |W|^2 of each candidate."""
    weight = item.matrix.float()
    size = float(weight.square().sum()) or 1.0
    return [
        0.0 if candidate is None else float((weight - _nearest(candidate, item.matrix)).square().sum()) / size
        for candidate in item.candidates
    ]


def _fill_unseen(items: Sequence[Item], found: Sequence[Scores]) -> None:
    """Give weights that no batch uses the median sensitivity, score by relative error, of the others."""
    if all(scores.tokens for scores in found):
        return
    errors = [_relative_errors(item) for item in items]
    ratios = [
        value / error
        for scores, of_item in zip(found, errors)
        if scores.tokens
        for value, error in zip(scores.values, of_item)
        if error
    ]
    typical = middle.median(ratios) if ratios else 0.5
    for scores, of_item in zip(found, errors):
        if not scores.tokens:
            scores.values = [typical * error for error in of_item]
