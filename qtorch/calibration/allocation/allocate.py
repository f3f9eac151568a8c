"""allocate: the recipe of each weight of a model, so that the whole keeps a budget and loses least.

Scores add up what each weight does alone. Swaps exchange the recipes of two weights: the whole model is quantized and
run on held-out batches, and a swap is kept if the divergence from the float model falls. Those that the scores say cost
least are tried first.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...model import install, targets
from ...model.module_repr import get_model_size_in_bytes
from ...primitives.tracing import outside_graphs
from ...recipes.base import Recipe
from ..data import Data, eval_mode
from ..engine.in_order import installed
from ..rounding import Rounding
from .allocation import Allocation
from .items import Candidates, Item, find_items, measure, nbytes_under
from .scores import Loss, Rows, score_weights

Costs = Sequence[Sequence[int]]
Values = Sequence[Sequence[float]]
"""Of each item, those of its options."""


class Swap(NamedTuple):
    """New options of some items, by index, and the change of the sum of scores that they say."""

    options: dict[int, int]
    change: float


class Improved(NamedTuple):
    """The options after the swaps, the divergence before and after, and how many swaps were tried and kept."""

    options: tuple[int, ...]
    before: float
    after: float
    tried: int
    kept: int


def swaps(options: Sequence[int], costs: Costs, scores: Values, limit: int) -> list[Swap]:
    """All changes of one weight or two that stay within the limit, those that the scores prefer first."""
    total = sum(cost[option] for cost, option in zip(costs, options))
    moves = [
        (item, other, costs[item][other] - costs[item][option], scores[item][other] - scores[item][option])
        for item, option in enumerate(options)
        for other in range(len(costs[item]))
        if other != option
    ]
    found = [Swap({item: other}, change) for item, other, cost, change in moves if total + cost <= limit]
    for (a, to_a, cost_a, change_a), (b, to_b, cost_b, change_b) in itertools.combinations(moves, 2):
        # One weight gets more, the other less.
        if a != b and cost_a * cost_b < 0 and total + cost_a + cost_b <= limit:
            found.append(Swap({a: to_a, b: to_b}, change_a + change_b))
    return sorted(found, key=lambda swap: swap.change)


class Divergence:
    """The divergence of a quantized model from the float one, on batches whose float outputs are kept."""

    def __init__(self, model: nn.Module, items: Sequence[Item], data: Data, logits: bool = False) -> None:
        self.model, self.items, self.data, self.logits = model, items, data, logits
        self.batches = data.checked()
        with eval_mode(model), torch.no_grad():
            self.of_float = [self._rows(index) for index in range(len(self.batches))]

    def _rows(self, index: int) -> Rows:
        batch = self.batches[index]
        return Rows.of(self.data.call(self.model, batch), self.data.mask_of(batch), self.logits)

    @torch.no_grad()
    def of(self, parameters: Sequence[nn.Parameter]) -> float:
        """The mean over all rows, with these weights in place of the items."""
        total, count = 0.0, 0
        places = [(item.target, parameter) for item, parameter in zip(self.items, parameters, strict=True)]
        with eval_mode(self.model), installed(places):
            for index, reference in enumerate(self.of_float):
                divergence = reference.divergence(self._rows(index))
                total += float(divergence.double().sum())
                count += len(divergence)
        return total / max(1, count)


@torch.no_grad()
def quantized(item: Item, option: int) -> nn.Parameter:
    """The weight of an item under one of its candidates."""
    candidate = item.candidates[option]
    if candidate is None:
        return item.parameter
    return nn.Parameter(candidate.make(item.target, item.parameter.detach()), False)


def improve(loss: Divergence, options: Sequence[int], costs: Costs, scores: Values, limit: int, tries: int) -> Improved:
    """Try up to `tries` swaps, and keep those by which the loss falls."""
    items = loss.items
    chosen = list(options)
    parameters = [quantized(item, option) for item, option in zip(items, chosen)]
    before = least = loss.of(parameters)
    seen = {tuple(chosen)}
    tried = kept = 0
    queue = iter(swaps(chosen, costs, scores, limit))
    while tried < tries and (swap := next(queue, None)) is not None:
        result = tuple(swap.options.get(index, option) for index, option in enumerate(chosen))
        if result in seen:
            continue
        seen.add(result)
        tried += 1
        new = list(parameters)
        for index, option in swap.options.items():
            new[index] = quantized(items[index], option)
        if (found := loss.of(new)) < least:
            least, parameters, chosen, kept = found, new, list(result), kept + 1
            queue = iter(swaps(chosen, costs, scores, limit))
    return Improved(tuple(chosen), before, least, tried, kept)


UNITS = {
    **{"B": 1, "bytes": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    **{"us": 10**3, "ms": 10**6, "s": 10**9},
}
"""Bytes, or nanoseconds, by their word."""

_NUMBER = r"(?P<number>\d[\d_]*(?:\.\d+)?|\.\d+)\s*"
_BITS = re.compile(_NUMBER + r"bits?(?: an element| a weight)?")
_BYTES = re.compile(_NUMBER + r"(?P<unit>bytes|[kKMGT]?B|[KMGT]iB)(?P<model> model)?")
_TIME = re.compile(_NUMBER + r"(?P<unit>ms|us|s)(?: a token)?")

FORMS = '"3.5 bits", a number of bytes, "1.2 GB", "1.2 GB model", "12 ms a token"'


@dataclass(frozen=True)
class Budget:
    """A limit in bits an element, bytes or nanoseconds: `kind` is ``"bits"``, ``"bytes"`` or ``"time"``; `of_model`
    counts all bytes of the model instead of those of the allocated weights.
    """

    text: str
    kind: str
    amount: float
    of_model: bool = False

    @property
    def is_time(self) -> bool:
        return self.kind == "time"

    @classmethod
    def of(cls, budget: Any) -> "Budget":
        """The budget that a number of bytes or a text says."""
        if isinstance(budget, Budget):
            return budget
        if isinstance(budget, int | float) and not isinstance(budget, bool):
            if budget % 1 or not 0 < budget < math.inf:
                raise ValueError(f'allocate: a number as budget counts bytes, got {budget}; write "{budget} bits"')
            return cls(f"{int(budget):,} bytes", "bytes", int(budget))
        if not isinstance(budget, str):
            raise TypeError(f"allocate: budget is {FORMS}, got {budget!r}")
        text = budget.strip()
        for kind, pattern in (("bits", _BITS), ("bytes", _BYTES), ("time", _TIME)):
            if found := pattern.fullmatch(text):
                number = float(found["number"].replace("_", ""))
                if not number > 0:
                    break
                parts = found.groupdict()
                return cls(text, kind, number * UNITS.get(parts.get("unit", ""), 1), bool(parts.get("model")))
        raise ValueError(f"allocate: budget is {FORMS}, got {budget!r}")

    def limit(self, elements: int, rest: int) -> int:
        """The largest total cost for so many allocated elements, in bytes or nanoseconds; `rest`: bytes beside them."""
        if self.kind == "bits":
            # A tolerance for decimals such as 4.15 that binary numbers miss; it is less than a byte.
            return math.floor(self.amount * elements / 8 + 1e-6)
        return math.floor(self.amount) - (rest if self.of_model else 0)


STATES = 1 << 15
"""Number of totals that are kept after each item."""


class Solution(NamedTuple):
    """The index of the option of each item, and their total."""

    options: tuple[int, ...]
    cost: int
    value: float


class Frontier:
    """The multiple-choice knapsack: one option of each item, so that the values are least and the costs within a limit.

    Dynamic programming over the items keeps the totals (cost, value) that no other total beats in both, by increasing
    cost and decreasing value, each with its true cost, so a result never exceeds the limit. Where there are more than
    `states` of them, costs are divided into that many equal intervals and the best of each interval is kept; otherwise
    the result is exact. What remains in the end is the best value for every limit: the curve of size and quality.
    """

    def __init__(self, costs: Costs, values: Values, limit: int | None = None, states: int = STATES) -> None:
        self.cost, self.value = np.zeros(1, np.int64), np.zeros(1, np.float64)
        self.steps: list[tuple[np.ndarray, np.ndarray]] = []
        least = [min(options) for options in costs]
        rest = sum(least)
        for index, (of_options, value_of) in enumerate(zip(costs, values, strict=True)):
            rest -= least[index]
            cost = (self.cost[:, None] + np.asarray(of_options, np.int64)[None]).reshape(-1)
            value = (self.value[:, None] + np.asarray(value_of, np.float64)[None]).reshape(-1)
            order = np.arange(len(cost))
            if limit is not None:
                order = order[cost <= limit - rest]
            order = order[np.lexsort((value[order], cost[order]))]
            if len(order):
                # Those with a lower value than all before them; the first stays even if its value is infinite.
                before = np.minimum.accumulate(value[order])[:-1]
                order = order[np.append(True, value[order][1:] < before)]
            if len(order) > states:
                # The last total, whose value is the least, of each of so many equal intervals of the costs.
                costs_of = cost[order] - cost[order[0]]
                interval = costs_of // max(1, -(-(int(costs_of[-1]) + 1) // states))
                order = order[np.append(interval[1:] != interval[:-1], True)]
            self.cost, self.value = cost[order], value[order]
            parents, chosen = np.divmod(order, len(of_options))
            self.steps.append((parents.astype(np.int32), chosen.astype(np.int16)))

    def __len__(self) -> int:
        return len(self.cost)

    def solution(self, index: int = -1) -> Solution:
        """Total `index`; the last one is the best."""
        if not len(self):
            raise ValueError("knapsack: no choice of options is within the limit")
        cost, value = int(self.cost[index]), float(self.value[index])
        options = []
        at = index % len(self)
        for parents, chosen in reversed(self.steps):
            options.append(int(chosen[at]))
            at = int(parents[at])
        return Solution(tuple(reversed(options)), cost, value)


CURVE_POINTS = 200
"""Points of the curve of size and quality that are kept."""

HELD_OUT = 4
"""One of so many batches is held out for `refine`, if none are given."""


@outside_graphs("allocate runs the model: call it before the compiled function")
def allocate(
    model: nn.Module,
    candidates: Candidates,
    budget: str | int,
    data: Iterable[Any] | Data | None = None,
    *,
    filter_fn: targets.Filter | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    gradients: bool = True,
    loss: Loss | str | None = None,
    rounding: Rounding | None = None,
    refine: int = 0,
    held_out: Iterable[Any] | None = None,
    rows: int = 1,
    seed: int = 0,
) -> Allocation:
    """Choose a recipe for each weight by what its error costs, within a budget.

    The score of a weight under a candidate is 1/2 tr(G D H D^T): D is the error of the weight, H the second moment of
    its inputs, and G the diagonal of that of the gradients of its outputs. For a model with logits their sum predicts
    the Kullback-Leibler divergence of a row of outputs from those of the float model. The choice with the least sum
    within the budget is found by dynamic programming. The model is not changed.

    Args:
        model: in floating point.
        candidates: recipes for inference without data, for every `nn.Linear`; None among them leaves a weight in
            floating point. Or an ordered mapping from names or regular expressions to such lists, as for `quantize_`.
        budget: ``"3.5 bits"`` an element of the allocated weights, scales included; an integer or ``"1.2 GB"``, bytes
            of the allocated weights; ``"1.2 GB model"``, bytes of all parameters and buffers; ``"12 ms a token"``, the
            time of the products with the allocated weights, measured here.
        data: batches of inputs of the model, as for `gptq`. Without them, scores are |D|^2 / (2 |W|^2).
        filter_fn: (module, name) -> bool, as for `quantize_`.
        forward: called as ``forward(model, batch)`` instead of the model.
        mask: batch -> (sequences, tokens), 1 for tokens that count; by default the ``attention_mask`` of a mapping.
        gradients: False for G = I / tr(W H W^T), relative errors of the outputs of layers, without a backward pass.
        loss: ``"logits"`` for a model whose output is a tensor of logits; or (output, batch) -> sum of the losses of
            independent samples. By default the cross entropy of labels sampled from the model where the output has
            ``logits``, else the sum of the outputs with random signs.
        rounding: how D is rounded; by default as the recipe does, to nearest. `gptq()` for weights to be rounded so.
        refine: how many exchanges between weights are tried on `held_out` with the quantized model; those that bring
            its outputs nearer (Kullback-Leibler divergence of logits, else 1 - cosine) are kept.
        held_out: batches for `refine`; by default every fourth batch of `data`, which then is not used for scores.
        rows: rows of the products that are timed; 1 is one token.
        seed: of the sampled labels or signs.

    Returns:
        A mapping from names to recipes for `quantize_`; print it, or `save` it.

    Raises:
        ValueError: the budget is less than the least possible, no candidate fits a weight, or there is no batch.
        TypeError: a candidate is no recipe, or the budget none of the above.
    """
    install.check_model("allocate", model)
    limit_of = Budget.of(budget)
    if isinstance(loss, str) and loss != "logits":
        raise ValueError(f'allocate: loss is "logits" or a function, got {loss!r}')
    items = find_items(model, candidates, filter_fn, experts=not limit_of.is_time)
    sizes = [[nbytes_under(candidate, item.matrix) for candidate in item.candidates] for item in items]
    elements = sum(item.matrix.numel() for item in items)
    rest = get_model_size_in_bytes(model) - sum(item.matrix.numel() * item.matrix.element_size() for item in items)
    limit = limit_of.limit(elements, rest)
    if not limit_of.is_time:
        _check_limit(limit_of, limit, sizes, elements)
    given = data if isinstance(data, Data) or data is None else Data(data, forward, mask)
    for_scores, for_swaps = _split(given, refine, held_out)
    scores = score_weights(items, model, for_scores, gradients=gradients, loss=loss, rounding=rounding, seed=seed)
    costs: Costs = sizes
    if limit_of.is_time:
        costs = [[time * of.uses for time in times] for times, of in zip(measure(items, rows), scores)]
        _check_limit(limit_of, limit, costs, elements)
    values = [of.values for of in scores]
    options = Frontier(costs, values, limit).solution().options
    refined: dict[str, float] = {}
    if for_swaps is not None:
        divergence = Divergence(model, items, for_swaps, loss == "logits")
        found = improve(divergence, options, costs, values, limit, refine)
        options = found.options
        refined = {name: value for name, value in found._asdict().items() if name != "options"}
    if for_scores is None:
        measured = "relative squared error"
    elif not gradients:
        measured = "relative squared error of outputs of layers"
    else:
        measured = "loss of a row of outputs" if callable(loss) else "divergence of a row of outputs"
    times = costs if limit_of.is_time else [()] * len(items)
    rows_of = tuple(
        item.row(nbytes, of.values, option, of.tokens, of_time)
        for item, nbytes, of, option, of_time in zip(items, sizes, scores, options, times)
    )
    # The best sum of scores for budgets between the least and the largest.
    curve = Frontier(costs, values, states=2048)
    picked = [*range(0, len(curve) - 1, max(1, len(curve) // CURVE_POINTS)), len(curve) - 1]
    points = tuple((int(curve.cost[index]), float(curve.value[index])) for index in picked)
    recipes: dict[str, Recipe | None] = {item.name: item.candidates[option] for item, option in zip(items, options)}
    return Allocation(rows_of, limit_of.text, limit, rest, measured, points, refined, recipes)


def _check_limit(budget: Budget, limit: int, costs: Costs, elements: int) -> None:
    least = sum(map(min, costs))
    if least <= limit:
        return
    need = f"{least:,} bytes, {8 * least / elements:.4g} bits an element, scales included"
    if budget.is_time:
        need = f"{least / 1e6:.4g} ms"
    elif budget.of_model:
        need += f"; the rest of the model leaves {limit:,} bytes for these weights"
    raise ValueError(f"allocate: budget={budget.text!r} is less than the cheapest candidates take: {need}")


def _split(data: Data | None, refine: int, held_out: Iterable[Any] | None) -> tuple[Data | None, Data | None]:
    """The batches for scores, which can be read more than once, and those for swaps."""
    if data is None:
        if refine:
            raise ValueError("allocate: refine is measured on data; give data=")
        return None, None
    batches = data.checked()
    if not refine:
        return Data(batches, data.forward, data.mask), None
    if held_out is None:
        if len(batches) < 2:
            raise ValueError("allocate: refine needs batches that scores are not from; give held_out=, or data of two")
        held_out = list(batches[HELD_OUT - 1 :: HELD_OUT] or batches[-1:])
        batches = [batch for batch in batches if not any(batch is other for other in held_out)]
    return Data(batches, data.forward, data.mask), Data(list(held_out), data.forward, data.mask)
