"""Scores: by how much the outputs of the model change when a weight takes a recipe, predicted weight by weight.

    score = 1/2 tr(G D H D^T),    D = W - Q,  H = E[x x^T],  G diagonal

with the inputs x of the weight, and G_n the sum of the squared gradients of output n over all rows (see
`captures.OutputGradients`), divided by the number of rows of the model's output: the expected divergence of a row.
Without gradients G = I / tr(W H W^T), so that the score is half the relative error of the outputs of the layer: errors
of layers whose outputs differ in size cannot be compared otherwise. Without data it is |D|^2 / (2 |W|^2).

One H is kept at a time: weights are scored in the order in which the model runs, by `engine.in_order`.
"""

import functools
import statistics as middle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dtypes import QuantizedTensor
from ...model.targets import Target
from ...primitives import QuantSpec
from ...recipes.base import WeightRecipe
from ..captures import OutputGradients, without_parameter_gradients
from ..data import Data, eval_mode, tensors_of
from ..engine.in_order import InOrder
from ..rounding import Grid, Rounding
from ..rounding.grid import loss as quadratic
from ..statistics import SecondMoment, Statistic, Statistics
from .items import Candidate, Item


def activation_error(recipe: WeightRecipe) -> type[SecondMoment] | None:
    """The statistic of a recipe that quantizes activations, one class for each spec; None if it does not.

    It is E[e e^T], e = x - quantized x. With an error D = W - Q of the weight, the output W x becomes Q (x - e), so its
    error is D x + Q e, whose second moment is d_n H d_n^T + q_n E[e e^T] q_n^T for output n, with x and e taken as
    uncorrelated.
    """
    spec = recipe.linear_spec()
    if spec.activation is None:
        return None
    scale = recipe.act_scale(torch.device("cpu")) if spec.static else None
    return _statistic(spec.activation, None if scale is None else float(scale))


@functools.cache
def _statistic(spec: QuantSpec, scale: float | None) -> type[SecondMoment]:
    class ActivationError(SecondMoment):
        """E[e e^T], (K, K), of the errors of inputs that are quantized by one spec."""

        def of(self, rows: Tensor) -> Tensor:
            if scale is None:
                return super().of(rows - spec.fake_quantize(rows))
            scales = torch.full(spec.scale_shape(rows.shape), scale, device=rows.device, dtype=torch.float32)
            return super().of(rows - spec.dequantize(spec.quantize(rows, scales, None), scales, None))

    return ActivationError


Loss = Callable[[Any, Any], Tensor]
"""(output of the model, batch) -> the sum of the losses of independent samples, a scalar."""


class Rows(NamedTuple):
    """Outputs (M, C) of the tokens that count, and whether they are logits.

    Logits are distributions: the loss is the cross entropy of labels sampled from them, and the divergence the
    Kullback-Leibler one. For other outputs y the loss is sum(r * y) with random signs r, whose gradients' second moment
    is that of |dy|^2 / 2, and the divergence is 1 - cosine of rows.
    """

    values: Tensor
    are_logits: bool

    @classmethod
    def of(cls, output: Any, mask: Tensor | None, logits: bool = False) -> "Rows":
        """The rows of a model's output: of its `logits` if there are any, else of its first tensor in floating point.
        `mask` says which tokens count if it has the first axes of the output; `logits` takes any output for logits."""
        logits_of = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        named = isinstance(logits_of, Tensor) and logits_of.is_floating_point()
        values = logits_of if named else next(iter(tensors_of(output)), None)
        if values is None:
            raise TypeError(f"calibration: a {type(output).__name__} holds no tensor in floating point; give forward=")
        if values.dim() == 0:
            values = values.reshape(1, 1)
        if mask is not None and mask.shape == values.shape[:-1]:
            values = values[mask.to(values.device)]
        return cls(values.reshape(-1, values.shape[-1]), named or logits)

    def sampled_loss(self, generator: torch.Generator) -> Tensor:
        """The sum over all rows of the loss of a random sample."""
        values = self.values.float()
        if not self.are_logits:
            signs = torch.randint(0, 2, values.shape, generator=generator, device="cpu").to(values) * 2 - 1
            return (signs * values).sum()
        with torch.no_grad():
            cumulated = values.softmax(-1).cumsum(-1)
            uniform = torch.rand(len(values), 1, generator=generator, dtype=torch.float32, device="cpu").to(values)
            labels = (cumulated < uniform * cumulated[:, -1:]).sum(-1).clamp(max=values.shape[-1] - 1)
        return nn.functional.cross_entropy(values, labels, reduction="sum")

    def divergence(self, other: "Rows") -> Tensor:
        """KL(self, other), or 1 - cosine, of each row, (M,)."""
        mine, others = self.values.float(), other.values.float().to(self.values.device)
        if not self.are_logits:
            return 1 - nn.functional.cosine_similarity(mine, others, dim=-1)
        log_p, log_q = mine.log_softmax(-1), others.log_softmax(-1)
        return nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@dataclass
class Scores:
    """The score of each candidate of one weight, from so many rows of inputs, and the products with it in a batch."""

    values: list[float]
    tokens: int = 0
    uses: int = 1


@dataclass
class ScoredItem:
    """What takes the place of a recipe while a weight is scored: the `statistics` that its candidates need."""

    item: Item
    statistics: tuple[type[Statistic], ...]
    learner: None = None


def score_weights(
    items: Sequence[Item], model: nn.Module, data: Data | None, *, gradients: bool = True,
    loss: Loss | str | None = None, rounding: Rounding | None = None, seed: int = 0,
) -> list[Scores]:  # fmt: skip
    """The scores of all items, of weights alone without data; unused ones are as sensitive as the median of others."""
    if data is None:
        return [Scores([error / 2 for error in _relative_errors(item)]) for item in items]
    seen = _watch_outputs(items, model, data, gradients, loss, seed)
    targets: list[Target[ScoredItem]] = []
    for item in items:
        kinds = [activation_error(candidate) for candidate in item.candidates if candidate is not None]
        scored = ScoredItem(item, (SecondMoment, *dict.fromkeys(kind for kind in kinds if kind is not None)))
        targets.append(Target([replace(slot, recipe=slot.recipe and scored) for slot in item.target.slots]))
    with InOrder[tuple[Tensor, Scores]](model, targets, data) as run:
        for target, statistics in run:
            item = run.recipes[id(target.parameter)].item
            run.install(target, (item.parameter.detach(), _scored(item, seen, rounding, statistics)))
    found = [run.made[item.parameter][1] for item in items]
    _fill_unseen(items, found)
    return found


class OutputSensitivity(NamedTuple):
    """The gradients of the outputs; `rows` is the number of rows of the model's output, 0 without gradients."""

    recorder: OutputGradients
    rows: int
    batches: int


def _watch_outputs(
    items: Sequence[Item], model: nn.Module, data: Data, gradients: bool, loss: Loss | str | None, seed: int
) -> OutputSensitivity:
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
    return OutputSensitivity(recorder, rows, batches)


def _scored(
    item: Item, seen: OutputSensitivity, rounding: Rounding | None, found: Statistics | Mapping[int, Statistics]
) -> Scores:
    of_matrices: dict[int | None, Any] = {None: found} if item.matrix.dim() == 2 else dict(found)  # type: ignore[arg-type]
    # The moments of the matrices that got inputs.
    of_matrices = {
        index: of_one
        for index, of_one in of_matrices.items()
        if isinstance(of_one, dict) and SecondMoment in of_one and of_one[SecondMoment].rows
    }
    tokens = sum(int(of_one[SecondMoment].rows) for of_one in of_matrices.values())
    values = [_score(item, candidate, of_matrices, seen, rounding) for candidate in item.candidates]
    frequencies = seen.recorder.frequencies.get(id(item.parameter))
    if frequencies is not None:
        tokens += int(frequencies.sum())
        for index, candidate in enumerate(item.candidates):
            values[index] += _table_score(item, candidate, seen, frequencies)
    uses = seen.recorder.uses.get(id(item.parameter), 0) / max(1, seen.batches)
    return Scores(values, tokens, max(1, round(uses)))


def _score(
    item: Item, candidate: Candidate, found: Mapping[int | None, Any], seen: OutputSensitivity,
    rounding: Rounding | None,
) -> float:  # fmt: skip
    if candidate is None or not found:
        return 0.0
    if rounding is not None and (candidate.prunes or candidate.branch_rank):
        what = "prunes weights" if candidate.prunes else "has a branch of low rank"
        raise ValueError(f"allocate: {candidate} {what}, which rounding={rounding} does not; leave it out")
    weight, kind = item.matrix, activation_error(candidate)
    whole = None if rounding is not None else _nearest(candidate, weight)
    total = sum(of_one[SecondMoment].rows for of_one in found.values())
    score = size = 0.0
    for expert, statistics in found.items():
        matrix = (weight if expert is None else weight[expert]).float()
        moment = statistics[SecondMoment].mean.to(matrix.device)
        if rounding is not None:
            grid = Grid.of(matrix, candidate.linear_spec().weight, weight.dtype, moment.diagonal())
            rounding.round(matrix, moment, grid)
            quantized = grid.values()
        else:
            assert whole is not None
            quantized = whole if expert is None else whole[expert]
        # G of this matrix, (N,).
        if seen.rows:
            squares = seen.recorder.squares.get((id(item.parameter), expert))
            importance = torch.zeros_like(matrix[:, 0]) if squares is None else (squares / seen.rows).to(matrix.device)
        else:
            importance = torch.full_like(matrix[:, 0], statistics[SecondMoment].rows / total)
        errors = quadratic(matrix - quantized, moment)
        if kind is not None:
            errors = errors + quadratic(quantized, statistics[kind].mean.to(matrix.device))
        score += float((importance * errors).sum()) / 2
        size += float((importance * quadratic(matrix, moment)).sum())
    return score if seen.rows else score / (size or 1.0)


def _nearest(candidate: WeightRecipe, weight: Tensor) -> Tensor:
    made: Any = candidate.apply(weight)
    return made.dequantize(torch.float32) if isinstance(made, QuantizedTensor) else made.float()


def _table_score(item: Item, candidate: WeightRecipe | None, seen: OutputSensitivity, counts: Tensor) -> float:
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
