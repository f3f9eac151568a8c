"""The demo's chart: size, quality and speed of every recipe, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo_results import TARGETS, Result
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, MUTED, GRID = "#1f2933", "#66717f", "#e4e7eb"
BLUE, PALE_BLUE, GREEN, ORANGE, PALE_ORANGE = "#2b6cb0", "#cbd9ea", "#2f855a", "#d9681d", "#f5b97f"


def draw(results: Sequence[Result], caption: str, path: Path) -> None:
    """Write the chart as PNG; the first result is the float model's, at the top."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(13.5, 1.7 + 0.68 * len(results)), dpi=150, facecolor="white", layout=layout)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, draw_panel in zip(panels, (_draw_size, _draw_quality, _draw_speed)):
        _style(axes)
        draw_panel(axes, results)
    panels[0].set_yticks(range(len(results)), [_label(result.name) for result in results], fontsize=10)
    panels[0].set_ylim(len(results) - 0.45, -0.55)
    figure.suptitle("all-MiniLM-L6-v2, quantized by qtorch", x=0.008, ha="left", fontsize=15, weight="bold", color=INK)
    figure.supxlabel(caption, x=0.008, ha="left", fontsize=9, color=MUTED)
    figure.savefig(path)


def _draw_size(axes: Axes, results: Sequence[Result]) -> None:
    _title(axes, "Size on disk, MB")
    for row, result in enumerate(results):
        linear, file = result.size.linear_on_disk / 1e6, result.size.file / 1e6
        axes.barh(row, linear, height=0.5, color=BLUE, label="linear weights")
        axes.barh(row, file - linear, left=linear, height=0.5, color=PALE_BLUE, label="embeddings and the rest")
        axes.text(linear / 2, row, f"{linear:.1f}", ha="center", va="center", fontsize=8.5, color="white")
        share = result.size.linear_on_disk / results[0].size.linear_on_disk
        _note(axes, row, file, f"{file:.1f}" + (f"   linear {share:.0%}" if row else ""))
    axes.set_xlim(0, 1.15 * max(result.size.file for result in results) / 1e6)
    _legend(axes)


def _draw_quality(axes: Axes, results: Sequence[Result]) -> None:
    _title(axes, "Retrieval, MRR in % of float")
    kept = [100 * result.quality.mrr / results[0].quality.mrr for result in results]
    left, right = min([*kept, 97]) - 1.0, max([*kept, 100]) + 0.7
    axes.axvline(100, color=MUTED, linewidth=1)
    for row, result in enumerate(results):
        quality, target = result.quality, TARGETS.get(result.name)
        axes.hlines(row, 100, kept[row], color=GREEN, alpha=0.35, linewidth=3)
        axes.plot(kept[row], row, "o", color=GREEN, markersize=9, label="measured")
        if target:
            axes.plot(100 * target.mrr, row, "|", color=INK, markersize=15, markeredgewidth=2, label="least allowed")
        numbers = f"MRR {quality.mrr:.3f}    recall@1 {quality.recall_at_1:.3f}    cosine {quality.cosine:.4f}"
        axes.annotate(
            numbers,
            (left, row),
            (2, 15),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_xlim(left, right)
    _legend(axes)


def _draw_speed(axes: Axes, results: Sequence[Result]) -> None:
    _title(axes, "Speed, sentences per second")
    base = results[0].speed
    for row, result in enumerate(results):
        speed = result.speed
        both = speed.compiled is not None
        _draw_speed_bar(axes, row - 0.14 * both, speed.eager, base.eager, PALE_ORANGE, "eager")
        if speed.compiled is not None:
            _draw_speed_bar(axes, row + 0.14, speed.compiled, base.compiled, ORANGE, "torch.compile")
    axes.set_xlim(0, 1.25 * max(max(result.speed.eager, result.speed.compiled or 0) for result in results))
    _legend(axes)


def _draw_speed_bar(axes: Axes, y: float, value: float, base: float | None, color: str, label: str) -> None:
    axes.barh(y, value, height=0.26, color=color, label=label)
    _note(axes, y, value, f"{value:.0f}" + (f"   {value / base:.2f}x" if base else ""))


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, weight="bold", color=INK)


def _note(axes: Axes, y: float, x: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _legend(axes: Axes) -> None:
    """Below the panel, every label once; a marker without its line."""
    handles, labels = axes.get_legend_handles_labels()
    once: dict[str, Artist] = dict(zip(labels, handles))
    axes.legend(
        once.values(),
        once.keys(),
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.07),
        ncols=2,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.2,
        numpoints=1,
    )


def _label(name: str) -> str:
    """A long name on two lines."""
    return name.replace("activation_", "activation_\n").replace("(", "\n(").replace(" targets", "\ntargets")


def _style(axes: Axes) -> None:
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors=MUTED)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines[:].set_visible(False)
