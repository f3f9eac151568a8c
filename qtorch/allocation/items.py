"""Items: the weights among which bytes or milliseconds are allocated, and the recipes that each of them can take.

A tied weight is one item, and so are all experts of a weight (E, N, K).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..recipe import Recipe, WeightRecipe
from ..targets import Filter, Target, find_targets

Candidate = WeightRecipe | None
"""A recipe without data, or None: the weight stays in floating point."""

Candidates = Sequence[Candidate] | Mapping[str, "Sequence[Candidate] | None"]


@dataclass(eq=False)
class Item:
    """A weight and the recipes it can take.

    Attributes:
        target: the weight with all the places that hold it.
        candidates: those that fit the weight, in the order given.
        unfit: what the others say about it.
    """

    target: Target[Any]
    candidates: tuple[Candidate, ...]
    unfit: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The key by which `quantize_` finds the weight."""
        return self.target.asked.label

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
        weight = self.parameter.detach()
        return self.target.kind.to_matrix(weight)


def find_items(
    model: nn.Module, candidates: Candidates, filter_fn: Filter | None, *, experts: bool = True
) -> list[Item]:
    """The weights that the candidates are for.

    Args:
        candidates: recipes for every linear layer, or an ordered mapping from names or regular expressions to recipes,
            as for `quantize_`.
        experts: whether experts in one parameter are among them that no mapping asks for.

    Raises:
        TypeError: a candidate is no recipe for inference.
        ValueError: a candidate takes data, no candidate fits a weight, or there is no weight.
    """
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
