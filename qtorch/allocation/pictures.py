"""The pictures of an allocation as PNG: bits of each weight, errors of all candidates, the curve of size and quality.

matplotlib is imported here only.
"""

from __future__ import annotations

import importlib.util
import io
import math
from typing import Any

from .report import AllocationReport

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
