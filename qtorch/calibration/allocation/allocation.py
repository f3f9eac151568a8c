"""Allocation: the recipe of each weight, as a mapping that `quantize_` takes, and how it was chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoint.formats.transformers_folder.names import read_recipe, recipe_json
from ...primitives.files import read_json
from ...primitives.jsonable import construct
from ...recipes.base import Recipe
from .allocation_report import AllocationReport, Row, draw_curve, has_matplotlib

_SWAPS = {"before", "after", "tried", "kept"}

JSON, PICTURE = "allocation.json", "curve.png"


@dataclass(frozen=True, eq=False, repr=False)
class Allocation(AllocationReport, Mapping[str, "Recipe | None"]):
    """The recipe of each weight by name: ``quantize_(model, allocation)``. Print it for a table.

    Attributes:
        recipes: by name; None leaves the weight in floating point.
    """

    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Recipe | None:
        return self.recipes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recipes)

    def __len__(self) -> int:
        return len(self.recipes)

    def map(self, function: Callable[[Any], Recipe]) -> Allocation:
        """The allocation with `function` of each recipe in its place: ``allocation.map(lambda r: auto(r, data))``.

        It is called once for equal recipes, and not for None.
        """
        made: dict[Recipe, Recipe] = {}
        recipes: dict[str, Recipe | None] = {}
        for name, recipe in self.recipes.items():
            if recipe is not None and recipe not in made:
                made[recipe] = function(recipe)
            recipes[name] = None if recipe is None else made[recipe]
        return replace(self, recipes=recipes)

    def to_json(self) -> dict[str, Any]:
        """JSON data; `from_json` is the inverse. A recipe with calibration data becomes its text."""
        fields = {name: getattr(self, name) for name in ("budget", "limit", "rest_bytes", "measure")}
        rows = [asdict(row) for row in self.rows]
        recipes = [[name, recipe_json(recipe)] for name, recipe in self.recipes.items()]
        return {**fields, "recipes": recipes, "rows": rows, "curve": list(self.curve), "swaps": dict(self.swaps)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Allocation:
        """The allocation that `to_json` wrote.

        Raises:
            ValueError: a recipe had calibration data, which is not saved, or the data is not of an allocation.
        """
        try:
            recipes = {name: read_recipe(recipe) for name, recipe in data["recipes"]}
            rows = tuple(_row(row) for row in data["rows"])
            given = {name: data[name] for name in ("budget", "limit", "rest_bytes", "measure", "curve")}
            report = construct(AllocationReport, {"rows": rows, **given})
            _in_range(report.limit, report.rest_bytes, *(cost for cost, _ in report.curve))
            swaps = {name: float(value) for name, value in data["swaps"].items()}
            if not rows or {row.name for row in rows} != recipes.keys() or swaps.keys() not in (set(), _SWAPS):
                raise ValueError("its rows are not those of its recipes, or its swaps not those of refine")
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"Allocation.from_json: this is not the data of an allocation: {error}") from error
        for name, recipe in recipes.items():
            if recipe is not None and not isinstance(recipe, Recipe):
                raise ValueError(
                    f"Allocation.from_json: the recipe of {name}, {recipe!r:.80}, cannot be read; save the allocation "
                    "before .map(...) and apply that again"
                )
        return cls(**{**vars(report), "swaps": swaps}, recipes=recipes)

    def save(self, folder: str | os.PathLike[str], *, png: bool | None = None) -> Path:
        """Write ``allocation.json``, which `load` reads, and the picture ``curve.png`` to a folder, which is made.

        The picture shows the best choice for every budget, what was chosen, and each candidate alone.

        Args:
            png: whether to draw the picture, which takes matplotlib; by default where it is installed.

        Raises:
            ImportError: `png` is true and matplotlib is not installed.
        """
        if png and not has_matplotlib():
            raise ImportError("Allocation.save: png=True takes matplotlib: pip install matplotlib")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        if png or (png is None and has_matplotlib()):
            draw_curve(self, folder / PICTURE)
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Allocation:
        """The allocation in a folder of `save`, or in its ``allocation.json``.

        Raises:
            FileNotFoundError: there is none.
            ValueError: see `from_json`.
        """
        path = Path(folder)
        path = path / JSON if os.path.isdir(path) else path
        data = read_json(path)
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _row(data: Mapping[str, Any]) -> Row:
    row = construct(Row, data)
    lengths = {len(row.candidates), len(row.nbytes), len(row.scores), len(row.nanoseconds) or len(row.candidates)}
    if len(lengths) > 1 or not 0 <= row.chosen < len(row.candidates) or not row.elements:
        raise ValueError(f"the row of {row.name!r:.80} does not fit its candidates")
    _in_range(row.elements, *row.shape, *row.nbytes, *row.nanoseconds, row.tokens)
    return row


def _in_range(*numbers: int) -> None:
    if found := [number for number in numbers if not 0 <= number < 2**63]:
        raise ValueError(f"{found[0]:.4e} bytes, elements or nanoseconds")
