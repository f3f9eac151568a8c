"""Allocation: the recipe of each weight, as a mapping that `quantize_` takes, and how it was chosen."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoint.formats.transformers_folder import read_recipe, recipe_json
from ...model.report import format_table
from ...primitives import construct, files
from ...recipes.base import Recipe

_SWAPS = {"before", "after", "tried", "kept"}

JSON, PICTURE = "allocation.json", "curve.png"


FLOATING_POINT = "floating point"
"""The name of the candidate None."""


def candidate_name(candidate: Any) -> str:
    """A candidate as text."""
    return FLOATING_POINT if candidate is None else str(candidate)


@dataclass(frozen=True)
class Row:
    """How the recipe of one weight was chosen.

    Attributes:
        name: the key of the mapping; `also` has the other names of a tied weight.
        shape: of the weight.
        candidates: the recipes that fit it, as text.
        nbytes, scores: of each candidate.
        chosen: index of the candidate that was chosen.
        tokens: rows of inputs that the scores are from; 0 for a weight that the data does not use.
        nanoseconds: of each candidate, where the budget is time.
        unfit: candidates that do not fit, and why.
    """

    name: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    elements: int
    candidates: tuple[str, ...]
    nbytes: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: int
    tokens: int = 0
    nanoseconds: tuple[int, ...] = ()
    unfit: tuple[tuple[str, str], ...] = ()

    @property
    def costs(self) -> tuple[int, ...]:
        """What the budget counts: nanoseconds, or else bytes."""
        return self.nanoseconds or self.nbytes

    def bits(self, candidate: int) -> float:
        """Bits an element under a candidate."""
        return 8 * self.nbytes[candidate] / self.elements


@dataclass(frozen=True, eq=False)
class AllocationReport:
    """How the recipes of weights were chosen.

    Attributes:
        rows: of each weight.
        budget: as it was given.
        limit: the largest total cost, in bytes, or in nanoseconds where the budget is time.
        rest_bytes: size of the parameters and buffers of the model that were not allocated.
        measure: what the scores stand for.
        curve: (total cost, sum of scores) of the best choices for all budgets.
        swaps: of `refine`: the divergence ``before`` and ``after``, how many were ``tried`` and ``kept``; or empty.
    """

    rows: tuple[Row, ...]
    budget: str
    limit: int
    rest_bytes: int = 0
    measure: str = ""
    curve: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    swaps: Mapping[str, float] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated weights, once quantized."""
        return sum(row.nbytes[row.chosen] for row in self.rows)

    @property
    def bits(self) -> float:
        """Bits an element of the allocated weights, scales included."""
        return 8 * self.nbytes / self.elements

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters and buffers of the model, once quantized."""
        return self.nbytes + self.rest_bytes

    @property
    def milliseconds(self) -> float | None:
        """Of the products with the allocated weights, where the budget is time."""
        found = [row.nanoseconds[row.chosen] for row in self.rows if row.nanoseconds]
        return sum(found) / 1e6 if found else None

    @property
    def score(self) -> float:
        """The sum of the scores of what was chosen."""
        return sum(row.scores[row.chosen] for row in self.rows)

    @property
    def uniform(self) -> dict[str, tuple[int, float]]:
        """(cost, score) of each candidate that fits all weights, if all took it."""
        found = {}
        for candidate in dict.fromkeys(name for row in self.rows for name in row.candidates):
            if all(candidate in row.candidates for row in self.rows):
                places = [(row, row.candidates.index(candidate)) for row in self.rows]
                cost = sum(row.costs[place] for row, place in places)
                found[candidate] = (cost, sum(row.scores[place] for row, place in places))
        return found

    def __str__(self) -> str:
        header = ["weight", "shape", "chosen", "bits", "score", "tokens"]
        timed = self.milliseconds is not None
        if timed:
            header.append("us")
        cells = []
        for row in self.rows:
            line = [
                " = ".join((row.name, *row.also)),
                "x".join(map(str, row.shape)),
                row.candidates[row.chosen],
                f"{row.bits(row.chosen):.3f}",
                f"{row.scores[row.chosen]:.3g}",
                f"{row.tokens:,}" if row.tokens else "not used by the data",
            ]
            cells.append([*line, f"{row.nanoseconds[row.chosen] / 1e3:.1f}"] if timed else line)
        return "\n".join([self.summary(), "", format_table(header, cells), *self.notes()])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def summary(self) -> str:
        """One line: what was allocated, of which budget."""
        time = "" if self.milliseconds is None else f", {self.milliseconds:.3f} ms"
        swaps = ""
        if self.swaps:
            swaps = (
                f"; {self.swaps['kept']:.0f} of {self.swaps['tried']:.0f} swaps kept, measured divergence "
                f"{self.swaps['before']:.4g} -> {self.swaps['after']:.4g}"
            )
        return (
            f"{len(self.rows)} weights in {self.bits:.3f} bits an element, {self.nbytes:,} bytes{time}, of the budget "
            f"{self.budget}; the model {self.model_bytes:,} bytes; {self.measure} {self.score:.4g}{swaps}"
        )

    def notes(self) -> list[str]:
        """What did not fit, and which weights have no influence."""
        notes = [f"{row.name}: {recipe} does not fit: {why}" for row in self.rows for recipe, why in row.unfit]
        for row in self.rows:
            if row.tokens and not any(row.scores) and any(name != FLOATING_POINT for name in row.candidates):
                notes.append(
                    f"{row.name}: the outputs that were looked at do not depend on it; forward= or loss= says which are"
                )
        return notes


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
        return write_report(folder, self.to_json(), (JSON, PICTURE), partial(draw_curve, self), png)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Allocation:
        """The allocation in a folder of `save`, or in its ``allocation.json``.

        Raises:
            FileNotFoundError: there is none.
            ValueError: see `from_json`.
        """
        path = Path(folder)
        path = path / JSON if os.path.isdir(path) else path
        data = files.read_json(path)
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


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(
    folder: str | os.PathLike[str], data: Any, names: tuple[str, str], draw: Callable[[Path], None], png: bool | None
) -> Path:
    """Write JSON `data`, and a picture by `draw` if `png` says so, to files of these names in a folder."""
    if png and not has_matplotlib():
        raise ImportError("save: png=True takes matplotlib: pip install matplotlib")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if png or (png is None and has_matplotlib()):
        draw(folder / names[1])
    return folder


@contextmanager
def canvas(path: Path, height: float = 4.5) -> Iterator[Any]:
    """The axes of a picture, which is written to `path` as a PNG; with a legend if anything has a label."""
    # Without pyplot, which keeps global state and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield axes
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=110)


def draw_curve(allocation: AllocationReport, path: Path) -> None:
    """Write a PNG: the best sum of scores for each budget, the choice, and every candidate alone."""
    timed = allocation.milliseconds is not None
    factor = 1e-6 if timed else 8 / allocation.elements
    # Only a logarithm of what is not zero: everything in floating point has no error.
    points = [(cost * factor, score) for cost, score in allocation.curve if score > 0]
    with canvas(path) as axes:
        if points:
            axes.plot(*zip(*points), label="best for each budget")
        for name, (cost, score) in allocation.uniform.items():
            if score > 0:
                axes.plot(cost * factor, score, "x", label=f"all {name}")
        cost = sum(row.costs[row.chosen] for row in allocation.rows)
        if allocation.score > 0:
            axes.plot(cost * factor, allocation.score, "o", label=f"chosen, budget {allocation.budget}")
        axes.set_yscale("log")
        axes.set_xlabel("ms" if timed else "bits an element, scales included")
        axes.set_ylabel(allocation.measure)
