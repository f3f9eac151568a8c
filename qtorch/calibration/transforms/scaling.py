"""smooth and awq: scales of input channels that are folded into what makes the input: a norm, or the layer before."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...model.report import TransformReport
from ...primitives.jsonable import jsonable
from ...recipes.base import WeightRecipe
from ..captures import Key, Use, UseRecorder
from ..data import Data, eval_mode
from ..rounding import Grid
from .folds import Fold
from .work import Transform, Work, find_wrong

TOKENS = 512
"""Rows of each input that searches compute with."""


@dataclass(eq=False)
class WeightInputs:
    """The inputs of one matrix: max |x_k| and the sum of |x_k| over all rows, (K,), and some of the rows."""

    largest: Tensor
    total: Tensor
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor:
        """(K,), mean |x_k|."""
        return self.total / max(self.count, 1)

    @property
    def rows(self) -> Tensor:
        """(M, K) in fp32 (fp64 in a model in fp64)."""
        rows = torch.cat(self.parts)
        return rows if rows.dtype == torch.float64 else rows.float()


@torch.no_grad()
def collect_inputs(
    model: nn.Module, data: Data, batches: Collection[Any], weights: Collection[Tensor], tokens: int = TOKENS
) -> dict[Key, WeightInputs]:
    """The inputs of these parameters over all batches, without padded tokens; so many rows are kept of each input."""
    each = -(-tokens // max(len(batches), 1))
    found: dict[Key, WeightInputs] = {}
    # Weights with the same input share its rows; holding the input keeps its id from being reused.
    taken: dict[Key, tuple[Tensor, Tensor, Tensor, Tensor, int]] = {}
    mask: Tensor | None = None
    ways: dict[Key, bool] = {}

    def seen(use: Use) -> None:
        if ways.setdefault(use.key, use.transposed) != use.transposed:
            return  # of a weight that multiplies both ways, as in an autoencoder, the inputs of the first
        key = id(use.input), use.expert
        if key not in taken:
            rows = torch.cat([part.detach() for part in use.unpadded(mask)])
            if not len(rows):
                return
            size = rows.abs()
            count = len(rows)
            places = torch.linspace(0, count - 1, min(each, count), device=rows.device, dtype=torch.float32)
            some = rows[places.round().long()]
            taken[key] = use.input, size.amax(0).float(), size.float().sum(0), some.clone(), count
        _, largest, total, some, count = taken[key]
        of = found.setdefault(use.key, WeightInputs(torch.zeros_like(largest), torch.zeros_like(total)))
        of.largest, of.total = torch.maximum(of.largest, largest), of.total + total
        of.count += count
        of.parts.append(some)

    with eval_mode(model):
        for batch in batches:
            mask = data.mask_of(batch)
            with UseRecorder(weights, seen):
                data.call(model, batch)
            taken.clear()
    return found


@dataclass(eq=False)
class Consumer:
    """A matrix (N, K) that a fold divides, or (K, N) where it is `transposed`, with its inputs without any scale.
    `channels` (K,) has the scale of each input channel, from 1; 0 for none.

    The error of scales t is that of the output with the weight rounded to nearest and the input as the recipe says,
    |Q(x t) Q(W / t)^T - x W^T|^2 / |x W^T|^2. A search never ends at scales that are worse than 1 by this measure.
    """

    weight: Tensor
    channels: Tensor
    transposed: bool
    inputs: WeightInputs
    recipe: WeightRecipe

    def error(self, scales: Tensor) -> float:
        """The relative error of the output with inputs multiplied by these scales (n,), and the weight divided."""
        rows = self.rows
        by = torch.cat([scales.new_ones(1), scales]).to(rows)[self.channels.to(rows.device)]
        divided = self._by_rows(self.weight).to(rows.dtype) / by
        rounded = Grid.of(divided, self.recipe.linear_spec().weight, self.weight.dtype).values().to(rows.dtype)
        return float((self._quantized(rows * by) @ rounded.t() - self.reference).square().sum() / self.energy)

    @cached_property
    def rows(self) -> Tensor:
        """Some inputs, (M, K)."""
        return self.inputs.rows

    @cached_property
    def reference(self) -> Tensor:
        """The outputs for `rows`, (M, N)."""
        return self.rows @ self._by_rows(self.weight.to(self.rows.dtype)).t()

    @cached_property
    def energy(self) -> Tensor:
        return self.reference.square().sum().clamp(min=torch.finfo(torch.float32).tiny)

    def _by_rows(self, weight: Tensor) -> Tensor:
        return weight.t() if self.transposed else weight

    def _quantized(self, rows: Tensor) -> Tensor:
        linear = self.recipe.linear_spec()
        spec = linear.activation
        if spec is None:
            return rows
        given = self.recipe.act_scale(rows.device) if linear.static else None
        scale, zero_point = (given, None) if given is not None else spec.choose_qparams(rows)
        return spec.dequantize(spec.quantize(rows, scale, zero_point), scale, zero_point).to(rows.dtype)

    def magnitude(self) -> Tensor:
        """(K,), max |w| of each column."""
        return self._by_rows(self.weight).detach().abs().amax(0).float()

    def relative_magnitude(self) -> Tensor:
        """(K,), mean over rows of |w| / max |w| of its group, as AWQ measures weights."""
        weight = self._by_rows(self.weight).detach().abs().float()
        size = self.recipe.linear_spec().weight.block_size(weight.shape)[-1]
        groups = weight.unflatten(1, (-1, size))
        return (groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1).mean(0)


@dataclass(eq=False)
class Group:
    """A fold, and the matrices that it divides."""

    fold: Fold
    consumers: Sequence[Consumer]

    def error(self, scales: Tensor) -> float:
        """The mean relative error."""
        return sum(consumer.error(scales) for consumer in self.consumers) / len(self.consumers)

    def of_scales(self, of: Callable[[Consumer], Tensor], reduce: str) -> Tensor:
        """(n,): a value of each input channel, reduced ("amax", "mean") over the channels that a scale multiplies."""
        values = torch.cat([of(consumer).cpu() for consumer in self.consumers])
        channels = torch.cat([consumer.channels.long() for consumer in self.consumers])
        found = values.new_zeros(self.fold.scales + 1)
        return found.scatter_reduce(0, channels, values, reduce, include_self=False)[1:]

    def normalized(self, scales: Tensor) -> Tensor:
        """Scales divided by sqrt(max * min) of those that are free; 1 where they are not finite, or not free."""
        good = self.fold.free & scales.isfinite() & (scales > 0)
        if not bool(good.any()):
            return torch.ones_like(scales)
        used = scales[good]
        return torch.where(good, scales / (used.max() * used.min()).sqrt(), torch.ones_like(scales))


Candidate = tuple[str, Tensor]
"""In words how scales of a fold were chosen, and the scales."""


def search_scales(
    work: Work, transform: str, candidates: Callable[[Group], Iterable[Candidate]], tokens: int
) -> list[TransformReport]:
    """Scale each fold of a model by the best of its candidates, and report each of them."""
    folds, changing = work.folds
    reports = [
        TransformReport(transform, item.name, "not done", item.reason, item.consumers)
        for item in work.all_folds[1]
        if not set(item.consumers).isdisjoint(work.recipes)
    ]
    message = "the outputs of the model change with these scales"
    wrong = [TransformReport(transform, fold.name, "reverted", message, tuple(fold.consumers)) for fold in changing]
    searched = {name: work.parameters[name] for fold in folds for name in fold.consumers if name in work.recipes}
    names = {id(parameter): name for name, parameter in searched.items()}
    collected = collect_inputs(work.model, work.data, work.batches, searched.values(), tokens)
    by_name = {(names[owner], expert): found for (owner, expert), found in collected.items()}
    before = {name: work.parameters[name] for fold in folds for name in fold.labels}
    chosen: dict[str, tuple[Fold, Tensor]] = {}
    done: dict[str, TransformReport] = {}
    for fold in folds:
        group = Group(fold, _consumers(work, fold, by_name))
        if not group.consumers:
            done[fold.name] = TransformReport(transform, fold.name, "not done", "not used by the data")
            continue
        scales, report = _best(transform, group, candidates(group))
        done[fold.name] = report
        if scales is not None:
            work.parameters.replace(fold.values(work.parameters, scales))
            chosen[fold.name] = fold, scales
            for consumer in group.consumers:
                # The inputs that the weight has from now on.
                of, by = consumer.inputs, torch.cat([scales.new_ones(1), scales])[consumer.channels]
                of.largest, of.total = of.largest * by.to(of.largest), of.total * by.to(of.total)
                of.parts = [part * by.to(part) for part in of.parts]
    for name in _reverted(work, before, chosen):
        done[name] = TransformReport(transform, name, "reverted", message, done[name].consumers)
    return [*reports, *wrong, *done.values()]


def _best(transform: str, group: Group, candidates: Iterable[Candidate]) -> tuple[Tensor | None, TransformReport]:
    unchanged = group.error(torch.ones(group.fold.scales, dtype=torch.float32, device="cpu"))
    best, words, lowest = None, "", unchanged
    for how, scales in candidates:
        error = group.error(scales)
        if error < lowest:
            best, words, lowest = scales, how, error
    consumers = tuple(group.fold.consumers)
    if best is None:
        detail = "no scales lessen the error"
        return None, TransformReport(transform, group.fold.name, "unchanged", detail, consumers, unchanged, unchanged)
    return best, TransformReport(transform, group.fold.name, "scaled", words, consumers, unchanged, lowest)


def _consumers(work: Work, fold: Fold, inputs: Mapping[tuple[str, int | None], WeightInputs]) -> list[Consumer]:
    found = []
    for name, labels in fold.consumers.items():
        if name not in work.recipes:
            continue
        weight = work.parameters[name].detach()
        transposed = labels.shape[-1] == 1
        channels = labels.abs().flatten()
        for (owner, expert), given in inputs.items():
            if owner == name and labels.numel() == max(labels.shape) and given.parts:
                matrix = weight if expert is None else weight[expert]
                found.append(Consumer(matrix, channels, transposed, given, work.recipes[name]))
    return found


def _reverted(work: Work, before: Mapping[str, nn.Parameter], chosen: dict[str, tuple[Fold, Tensor]]) -> list[str]:
    """Undo the folds that change the outputs of the model, which rounding to its dtype can do."""

    def differ(names: Sequence[str]) -> bool:
        work.parameters.put(before)
        for name in names:
            fold, scales = chosen[name]
            work.parameters.replace(fold.values(work.parameters, scales))
        return not work.difference() <= work.tolerance(list(before))

    if not chosen or work.difference() <= work.tolerance(list(before)):
        return []
    wrong = find_wrong(list(chosen), differ)
    if differ([name for name in chosen if name not in wrong]):
        wrong = list(chosen)
        work.parameters.put(before)
    return wrong


@jsonable
@dataclass(frozen=True, repr=False)
class Smooth(Transform):
    """SmoothQuant: move the size of input channels with outliers into the weights.

        s_k = max|x_k|^a / max|w_k|^(1 - a),    x_k / s_k,    w_k s_k

    The strength a is searched for each place on the error of the layers; the identity is tried, too.

    Source: SmoothQuant, arXiv 2211.10438, equation 4.

    Args:
        alphas: the strengths to try, in [0, 1].
        tokens: number of input rows that the search computes with.

    Raises:
        ValueError: a strength is not in [0, 1], or there is none.
    """

    alphas: tuple[float, ...] = tuple(step / 20 for step in range(2, 20))
    tokens: int = TOKENS
    name: ClassVar[str] = "smooth"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphas", tuple(self.alphas))
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise ValueError(f"smooth: alphas are numbers in [0, 1], got {self.alphas}")

    def apply(self, work: Work) -> list[TransformReport]:
        return search_scales(work, self.name, self._candidates, self.tokens)

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        x = group.of_scales(lambda consumer: consumer.inputs.largest, "amax")
        w = group.of_scales(lambda consumer: consumer.magnitude(), "amax")
        for alpha in self.alphas:
            yield (f"alpha {alpha:g}", group.normalized(w ** (1 - alpha) / x**alpha))


@jsonable
@dataclass(frozen=True, repr=False)
class Awq(Transform):
    """AWQ's scales, searched for each place on the error of the layers; see `Clip` for the ranges of the weights.

        s_k = E|x_k|^r    or    s_k = E|x_k|^r / w_k^(1 - r),    x_k / s_k,    w_k s_k

    with w_k the mean of |w| relative to the largest of its group. The division is folded into what makes the input. r,
    and which of both forms, are searched for each fold, so that input channels that are large on average are rounded
    more finely.

    Source: AWQ, arXiv 2306.00978, section 3.2; the second form ("duo scaling") is that of its reference
    implementation's successors. There r = 0 is not the identity, which is tried in any case.

    Args:
        ratios: number of exponents r to try, evenly spaced in [0, 1).
        tokens: number of input rows that the search computes with.

    Raises:
        ValueError: `ratios` is not positive.
    """

    ratios: int = 20
    tokens: int = TOKENS
    name: ClassVar[str] = "awq"

    def __post_init__(self) -> None:
        if self.ratios < 1:
            raise ValueError(f"awq: ratios is a positive number, got {self.ratios}")

    def apply(self, work: Work) -> list[TransformReport]:
        return search_scales(work, self.name, self._candidates, self.tokens)

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        x = group.of_scales(lambda consumer: consumer.inputs.mean, "mean").clamp(min=1e-4)
        w = group.of_scales(lambda consumer: consumer.relative_magnitude(), "mean").clamp(min=1e-4)
        for step in range(self.ratios):
            r = step / self.ratios
            if step:  # r = 0 is the identity here
                yield (f"r {r:g}", group.normalized(1 / x**r))
            yield (f"r {r:g}, with weights", group.normalized(w ** (1 - r) / x**r))
