"""Items: the weights among which bytes or milliseconds are allocated, and the recipes that each of them can take.

A tied weight is one item, and so are all experts of a weight (E, N, K).
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...model.targets import Filter, Target, find_targets, named_errors
from ...primitives import MinMaxRule
from ...recipes.base import Recipe, WeightRecipe
from .allocation import Row, candidate_name

Candidate = WeightRecipe | None
"""A recipe without data, or None: the weight stays in floating point."""

Candidates = Sequence[Candidate] | Mapping[str, "Sequence[Candidate] | None"]


@dataclass(eq=False)
class Item:
    """A weight, those of the candidates that fit it, in the order given, and what the others say about it."""

    target: Target[Any]
    candidates: tuple[Candidate, ...]
    unfit: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The key by which `quantize_` finds the weight."""
        return self.target.slot.label

    @property
    def parameter(self) -> nn.Parameter:
        return self.target.parameter

    @property
    def is_product(self) -> bool:
        """Whether the model multiplies by it as one linear layer does."""
        return self.target.kind.name in ("linear", "attention")

    @property
    def matrix(self) -> Tensor:
        """The weight as it is quantized: (N, K) or (E, N, K); a convolution, or a weight stored (K, N), as such."""
        return self.target.kind.to_matrix(self.parameter.detach())

    def row(
        self, nbytes: Sequence[int], scores: Sequence[float], chosen: int, tokens: int, nanoseconds: Sequence[int] = ()
    ) -> Row:
        """The row of a report; all values are of the candidates."""
        matrix, also = self.matrix, (slot.name for slot in self.target.slots if slot is not self.target.slot)
        names = tuple(map(candidate_name, self.candidates))
        shape = tuple(self.parameter.shape)
        costs = tuple(nbytes), tuple(scores), chosen, tokens, tuple(nanoseconds)
        return Row(self.name, tuple(also), shape, matrix.numel(), names, *costs, self.unfit)


@named_errors("allocate")
def find_items(
    model: nn.Module, candidates: Candidates, filter_fn: Filter | None, *, experts: bool = True
) -> list[Item]:
    """The weights that the candidates are for; without `experts` no experts in one parameter but those in a mapping."""
    given: Any
    by_name = isinstance(candidates, Mapping)
    if isinstance(candidates, Mapping):
        given = {name: None if found is None else _checked(found) for name, found in candidates.items()}
    else:
        given = _checked(candidates)
    items, problems = [], []
    targets: list[Target[tuple[Candidate, ...]]] = find_targets(model, given, filter_fn)
    for target in targets:
        if target.recipe is None or (target.kind.name == "experts" and not experts and not by_name):
            continue
        item = _item(target)
        items.append(item)
        if not item.candidates:
            problems.append(f"{item.name}: " + "; ".join(f"{recipe}: {why}" for recipe, why in item.unfit))
    if problems:
        raise ValueError("allocate: no candidate fits some weights; add None or another group size: " + problems[0])
    if not items:
        raise ValueError("allocate: the candidates are for no weight of the model; see filter_fn and the names")
    return items


def _checked(candidates: Any) -> tuple[Candidate, ...]:
    if isinstance(candidates, Recipe) or not isinstance(candidates, Sequence) or isinstance(candidates, str):
        raise TypeError(f"allocate: candidates is a list of recipes, got {candidates!r}; write [{candidates}]")
    for candidate in candidates:
        if candidate is None:
            continue
        if not isinstance(candidate, WeightRecipe):
            raise TypeError(f"allocate: a candidate is a recipe for inference such as int4_weight_only(), or None, got "
                            f"{candidate!r}")  # fmt: skip
        if candidate.data is not None:
            raise ValueError(
                f"allocate: a candidate takes no data of its own, got {candidate}; allocate among the recipes inside, "
                "then wrap what was chosen: allocation.map(lambda recipe: auto(recipe, data))"
            )
    if not candidates:
        raise ValueError("allocate: there is no candidate")
    return tuple(dict.fromkeys(candidates))


def _item(target: Target[tuple[Candidate, ...]]) -> Item:
    assert target.recipe is not None
    if obstacle := target.obstacle:
        return Item(target, (), (("every recipe", obstacle),))
    fitting, unfit = [], []
    for candidate in target.recipe:
        try:
            if candidate is not None:
                candidate.check_target(target)
            fitting.append(candidate)
        except (ValueError, TypeError) as error:
            unfit.append((str(candidate), str(error)))
    return Item(target, tuple(fitting), tuple(unfit))


SIMPLE = {"scale_rule": MinMaxRule(), "use_hqq": False}
"""Arguments of recipes that say how ranges are searched."""


def nbytes_under(candidate: Candidate, weight: Tensor) -> int:
    """Bytes of `weight`, as it is quantized (N, K) or (E, N, K), under a candidate, with all that belongs to it."""
    if candidate is None:
        return weight.numel() * weight.element_size()
    return _nbytes(candidate, tuple(weight.shape), weight.dtype, weight.device)


@functools.lru_cache(4096)
def _nbytes(recipe: WeightRecipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    known = {field.name for field in fields(recipe)}  # type: ignore[arg-type]
    # How ranges are searched changes no size, and takes long.
    simple = {name: value for name, value in SIMPLE.items() if name in known}
    recipe = replace(recipe, **simple)  # type: ignore[type-var]
    layout = recipe.linear_spec().layout
    cpu = torch.device("cpu")
    # On the meta device layouts pack as on a CPU.
    depends = layout is not None and device.type != "cpu" and layout.packing(device) != layout.packing(cpu)
    if depends:
        return recipe.apply(torch.zeros(shape, dtype=dtype, device=device)).nbytes
    return recipe.apply(torch.empty(shape, dtype=dtype, device="meta")).nbytes


SECONDS = 0.02
"""Length of a turn of a candidate."""

TURNS = 7


def interleaved_medians(runs: Sequence[Callable[[], Any]], turns: int = TURNS, seconds: float = SECONDS) -> list[float]:
    """Median time of one call of each function, in nanoseconds; they take turns, so that a disturbance hits all."""
    for function in runs:
        for _ in range(3):
            function()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for index, function in enumerate(runs):
            calls, start = 0, time.perf_counter_ns()
            while not calls or time.perf_counter_ns() - start < seconds * 1e9:
                function()
                calls += 1
            times[index].append((time.perf_counter_ns() - start) / calls)
    return [statistics.median(of_one) for of_one in times]


@torch.no_grad()
def measure(items: Sequence[Item], rows: int) -> list[list[int]]:
    """Nanoseconds of a product of (rows, K) with each weight under each of its candidates."""
    if others := [item.name for item in items if not item.is_product]:
        raise ValueError(f"allocate: a budget of time is for linear layers, got {', '.join(others[:4])}; leave it out")
    known: dict[Any, list[int]] = {}
    return [product_times(item, rows, known) for item in items]


def product_times(item: Item, rows: int, known: dict[Any, list[int]] | None = None) -> list[int]:
    """Nanoseconds of a product of (rows, K) with a weight under each candidate; `known` has those of a shape."""
    known = {} if known is None else known
    weight = item.matrix
    key = (tuple(weight.shape), weight.dtype, weight.device, item.candidates, rows)
    if key not in known:
        x = torch.randn(rows, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        products = [product(x, each.apply(weight) if each else weight) for each in item.candidates]
        known[key] = [round(ns) for ns in interleaved_medians(products)]
    return known[key]


def product(x: Tensor, weight: Tensor) -> Callable[[], None]:
    """A function that multiplies `x` by `weight`, and returns when it is done."""
    parameter = nn.Parameter(weight, False)
    on_gpu = x.device.type == "cuda"

    def run() -> None:
        nn.functional.linear(x, parameter)
        if on_gpu:
            torch.cuda.synchronize(x.device)

    return run
