"""AllocationReport: how the recipe of each weight was chosen; printed as a table."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...model.report import format_table

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


# --------------------------------------------------------------------------------------------------
# The pictures of an allocation as PNG: bits of each weight, errors of all candidates, the curve of size and quality.
#
# matplotlib is imported here only.


WIDTH = 9.0
"""Of a picture, in inches."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(allocation: AllocationReport) -> dict[str, bytes]:
    """The PNG files by name: ``bits``, ``errors``, ``curve``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not can_draw():
        raise ImportError("Allocation.save: png=True takes matplotlib: pip install matplotlib")
    return {"bits": _bits(allocation), "errors": _errors(allocation), "curve": _curve(allocation)}


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which keeps global state and may want a display.
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _bits(allocation: AllocationReport) -> bytes:
    """A bar for each weight, in the colour of its recipe."""
    from matplotlib import colormaps

    rows = allocation.rows
    kinds = list(dict.fromkeys(name for row in rows for name in row.candidates))
    figure, axes = _figure(1.2 + 0.19 * len(rows))
    for index, kind in enumerate(kinds):
        mine = [i for i, row in enumerate(rows) if row.candidates[row.chosen] == kind]
        if mine:
            bits = [rows[i].bits(rows[i].chosen) for i in mine]
            axes.barh(mine, bits, color=colormaps["tab10"](index % 10), label=kind)
    axes.axvline(allocation.bits, color="black", linewidth=0.8, linestyle="--", label=f"mean {allocation.bits:.3f}")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("bits an element, scales included")
    figure.legend(loc="outside upper center", fontsize=7, ncols=2)
    return _png(figure)


def _errors(allocation: AllocationReport) -> bytes:
    """A heat map of the scores, weights by candidates; what was chosen has a frame."""
    rows = allocation.rows
    kinds = list(dict.fromkeys(name for row in rows for name in row.candidates))
    figure, axes = _figure(1.8 + 0.19 * len(rows))
    table = [[_log(row.scores[row.candidates.index(k)]) if k in row.candidates else math.nan for k in kinds]
             for row in rows]  # fmt: skip
    image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.plot(
        [kinds.index(row.candidates[row.chosen]) for row in rows],
        range(len(rows)),
        linestyle="none",
        marker="s",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor="red",
        label="chosen",
    )
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=7, rotation=20, ha="right")
    figure.colorbar(image, ax=axes, label=f"log10 of {allocation.measure}")
    figure.legend(loc="outside upper center", fontsize=7)
    return _png(figure)


def _curve(allocation: AllocationReport) -> bytes:
    """The best sum of scores for each budget, the choice, and every candidate alone."""
    timed = allocation.milliseconds is not None
    factor = 1e-6 if timed else 8 / allocation.elements
    figure, axes = _figure(4.5)
    # Only a logarithm of what is not zero: everything in floating point has no error.
    points = [(cost * factor, score) for cost, score in allocation.curve if score > 0]
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
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)
    return _png(figure)


def _log(score: float) -> float:
    return math.log10(score) if score > 0 else math.nan


# --------------------------------------------------------------------------------------------------
# The report on an allocation as one HTML file that refers to nothing else.


STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 12px }
th, td { padding: 2px 8px; text-align: right; white-space: nowrap }
th { border-bottom: 1px solid #888 }
td:first-child, th:first-child { text-align: left }
td.chosen { outline: 2px solid #c22; outline-offset: -2px; font-weight: bold }
img { max-width: 100% }
.bar { display: inline-block; height: 0.7em; background: #48c; vertical-align: baseline }
"""

TITLES = {
    "bits": "Bits of each weight",
    "errors": "Errors of all candidates",
    "curve": "Size and quality",
}
"""Of the pictures."""


def page(allocation: AllocationReport, pictures: Mapping[str, bytes]) -> str:
    """The HTML text.

    Args:
        pictures: PNG files by name, to be shown; there are tables without them too.
    """
    kinds = list(dict.fromkeys(name for row in allocation.rows for name in row.candidates))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Bit allocation</title>',
        f"<style>{STYLE}</style></head><body>",
        "<h1>Bit allocation</h1>",
        f"<p>{html.escape(allocation.summary())}</p>",
        *(_picture(name, image) for name, image in pictures.items()),
        f"<h2>{html.escape(allocation.measure)} of each weight under each candidate</h2>",
        "<p>The red frame is what was chosen; the colour is the logarithm of the number.</p>",
        _heat_map(allocation, kinds),
        "<h2>What was chosen</h2>",
        _chosen(allocation),
        "<h2>Every candidate alone</h2>",
        _uniform(allocation),
        *(f"<p>{html.escape(note)}</p>" for note in allocation.notes()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _picture(name: str, image: bytes) -> str:
    data = base64.b64encode(image).decode()
    title = TITLES.get(name, name)
    return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{data}">'


def _table(header: list[str], rows: list[str]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    return "<table>\n<tr>" + head + "</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"


def _heat_map(allocation: AllocationReport, kinds: list[str]) -> str:
    logs = [math.log(score) for row in allocation.rows for score in row.scores if score > 0]
    low, high = min(logs, default=0.0), max(logs, default=1.0)

    def cell(row: Row, kind: str) -> str:
        if kind not in row.candidates:
            return "<td>does not fit</td>"
        index = row.candidates.index(kind)
        score = row.scores[index]
        share = (math.log(score) - low) / (high - low or 1.0) if score > 0 else 0.0
        style = f"background: hsl({round(210 - 190 * share)} 80% {round(94 - 24 * share)}%)"
        chosen = ' class="chosen"' if index == row.chosen else ""
        return f'<td{chosen} style="{style}" title="{row.bits(index):.3f} bits">{score:.3g}</td>'

    rows = [f"<td>{_name(row)}</td>" + "".join(cell(row, kind) for kind in kinds) for row in allocation.rows]
    return _table(["weight", *kinds], rows)


def _chosen(allocation: AllocationReport) -> str:
    widest = max(row.bits(row.chosen) for row in allocation.rows)
    rows = []
    for row in allocation.rows:
        bits = row.bits(row.chosen)
        bar = f'<span class="bar" style="width: {8 * bits / widest:.2f}em"></span>'
        shape = "×".join(map(str, row.shape))
        tokens = f"{row.tokens:,}" if row.tokens else "not used by the data"
        cells = [_name(row), shape, html.escape(row.candidates[row.chosen]), f"{bits:.3f} {bar}"]
        cells += [f"{row.nbytes[row.chosen]:,}", tokens]
        if row.nanoseconds:
            cells.append(f"{row.nanoseconds[row.chosen] / 1e3:.1f}")
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    timed = ["us"] if allocation.milliseconds is not None else []
    return _table(["weight", "shape", "recipe", "bits", "bytes", "tokens", *timed], rows)


def _uniform(allocation: AllocationReport) -> str:
    timed = allocation.milliseconds is not None
    factor, unit = (1e-6, "ms") if timed else (8 / allocation.elements, "bits")
    cost = sum(row.costs[row.chosen] for row in allocation.rows)
    found = {**allocation.uniform, "as chosen": (cost, allocation.score)}
    rows = [
        f"<td>{html.escape(name)}</td><td>{cost * factor:.3f}</td><td>{score:.4g}</td>"
        for name, (cost, score) in found.items()
    ]
    return _table(["candidate", unit, allocation.measure], rows)


def _name(row: Row) -> str:
    return html.escape(" = ".join((row.name, *row.also)))
