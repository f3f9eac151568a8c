"""fastest: the recipe under which each linear layer takes least time, on this machine and with the inputs it gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...model import install, module_repr, targets
from ...primitives.sqnr import compute_error
from ...recipes.base import Recipe
from ..captures import Use, UseRecorder
from ..data import Data, run_batches
from .allocation import Allocation, Row
from .items import Candidates, Item, find_items, nbytes_under, product_times

SAMPLE_ROWS = 256
"""Rows of the inputs of a layer on which its error is measured."""


@dataclass
class Inputs:
    """The inputs of one weight: how many rows each product has, and some of the rows."""

    rows: list[int] = field(default_factory=list)
    sample: Tensor | None = None


@torch.no_grad()
def fastest(
    model: nn.Module,
    candidates: Candidates,
    example: Any,
    *,
    filter_fn: targets.Filter | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    min_sqnr: float | None = None,
) -> Allocation:
    """For each linear layer, the candidate under which its products take least time.

    Each product that the model does on the example is timed with random numbers of its shape; the candidates of a
    shape take turns, and medians count. torchao calls this ``autoquant``. The model is not changed.

    Args:
        model: any module.
        candidates: see `allocate`; None leaves a weight in floating point.
        example: one input of the model: a mapping is passed as keyword arguments, a tuple or list as arguments.
        filter_fn: (module, name) -> bool, as for `quantize_`.
        forward: called as ``forward(model, example)`` instead of the model.
        min_sqnr: leave out candidates whose outputs of a layer, on the example, have a lower SQNR in dB.

    Returns:
        A mapping for `quantize_`. The score of a candidate is the relative squared error of the outputs of the layer.

    Raises:
        ValueError: a weight is not of a linear layer, is not used by the example, or no candidate reaches `min_sqnr`.
    """
    install.check_model("fastest", model)
    items = find_items(model, candidates, filter_fn, experts=False)
    if others := [item.name for item in items if not item.is_product]:
        raise ValueError(f"fastest: takes linear layers, got {', '.join(others[:4])}; leave them out of the candidates")
    seen = _inputs(items, model, Data([example], forward))
    if missing := [item.name for item in items if not seen[item.parameter].rows]:
        raise ValueError(f"fastest: the example does not use {', '.join(missing[:4])}; leave them out by filter_fn")
    known: dict[Any, list[int]] = {}
    rows = [_row(item, seen[item.parameter], min_sqnr, known) for item in items]
    recipes: dict[str, Recipe | None] = {item.name: item.candidates[row.chosen] for item, row in zip(items, rows)}
    least = sum(row.nanoseconds[row.chosen] for row in rows)
    rest = module_repr.get_model_size_in_bytes(model) - sum(item.parameter.nbytes for item in items)
    measure = "relative squared error of outputs of layers"
    return Allocation(tuple(rows), "fastest", least, rest, measure, recipes=recipes)


def _inputs(items: Sequence[Item], model: nn.Module, data: Data) -> dict[Tensor, Inputs]:
    found: dict[Tensor, Inputs] = {item.parameter: Inputs() for item in items}

    def see(use: Use) -> None:
        inputs = found[use.weight]
        inputs.rows.append(use.input.numel() // use.input.shape[-1])
        if inputs.sample is None:
            inputs.sample = torch.cat(list(use.rows()))[:SAMPLE_ROWS].clone()

    with UseRecorder(list(found), see):
        run_batches(model, data)
    return found


def _row(item: Item, inputs: Inputs, min_sqnr: float | None, known: dict[Any, list[int]]) -> Row:
    weight = item.matrix
    times = [sum(of_use) for of_use in zip(*(product_times(item, rows, known) for rows in inputs.rows))]
    assert inputs.sample is not None
    errors = [_error(item, option, inputs.sample) for option in range(len(item.candidates))]
    good = [option for option, (_, sqnr) in enumerate(errors) if min_sqnr is None or sqnr >= min_sqnr]
    if not good:
        best = max(sqnr for _, sqnr in errors)
        what = f"no candidate has an SQNR of {min_sqnr=} dB, the best has {best:.1f}; add None"
        raise ValueError(f"fastest: {item.name}: {what}")
    nbytes = [nbytes_under(candidate, weight) for candidate in item.candidates]
    fastest_of = min(good, key=lambda option: times[option])
    return item.row(nbytes, [error for error, _ in errors], fastest_of, sum(inputs.rows), times)


def _error(item: Item, option: int, x: Tensor) -> tuple[float, float]:
    """(relative squared error, SQNR in dB) of the outputs of a layer."""
    candidate, weight = item.candidates[option], item.matrix
    if candidate is None:
        return 0.0, float("inf")
    wanted = nn.functional.linear(x, weight)
    sqnr = float(compute_error(wanted, nn.functional.linear(x, nn.Parameter(candidate.apply(weight), False))))
    return 10 ** (-sqnr / 10), sqnr
