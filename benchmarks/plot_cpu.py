"""Draws the results of bench_cpu_linear, for each instruction set, and of bench_cpu_model, where they exist:
`python -m benchmarks.plot_cpu` writes cpu_linear_*.png and cpu_model.png into docs/performance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import DOCS, RESULTS
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

NO_COMPILER, TORCHAO, BEST = ", no compiler", "torchao", "best peer"
OTHERS = (TORCHAO, BEST, "onnxruntime")
TICKS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
ABOUT = ("shape", "rows", "dtype", "float us", "what", "mode", "float ms", "best peer", "scores")


def candidates(row: Row) -> list[str]:
    """The names in a row that have a ratio."""
    return [key for key in row if key not in ABOUT]


def with_best_peers(row: Row) -> Row:
    """A row of linear layers with the fastest peer by bits of the weight in place of all peers."""
    ours = {name: value for name, value in row.items() if name not in PEERS}
    for bits in (8, 4):
        speeds = [row[name] for name, peer in PEERS.items() if name in row and peer.precision.weight == bits]
        ours |= {f"{BEST}, int{bits}": max(speeds)} if speeds else {}
    return ours


def style(name: str, names: list[str]) -> dict[str, Any]:
    """A colour for each recipe, shared by its form without a compiler; other engines in grey."""
    if name.startswith(OTHERS):
        return {"color": "0.45", "linestyle": ":", "marker": "^" if "dynamic" in name or "int4" in name else "v"}
    recipes = [n for n in names if not n.startswith(OTHERS) and not n.endswith(NO_COMPILER)]
    line = "--" if name.endswith(NO_COMPILER) else "-"
    return {"color": f"C{recipes.index(name.removesuffix(NO_COMPILER))}", "linestyle": line, "marker": "o"}


def of_float(axes: Axes) -> None:
    """A logarithmic axis of ratios, with a line at 1."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


def linear(rows: list[Row]) -> Figure:
    """Speed against the number of rows: a panel for each shape and dtype."""
    from matplotlib.figure import Figure

    rows = [with_best_peers(row) for row in rows]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    figure = Figure(figsize=(4 * len(shapes), 3.4 * len(dtypes) + 0.8), dpi=90, layout="constrained")
    panels = figure.subplots(len(dtypes), len(shapes), sharey=True, squeeze=False)
    for i, dtype in enumerate(dtypes):
        for j, shape in enumerate(shapes):
            axes: Axes = panels[i][j]
            found = [row for row in rows if row["dtype"] == dtype and tuple(row["shape"]) == shape]
            names = candidates(found[0]) if found else []
            for name in names:
                marks = {**style(name, names), "markersize": 3.5, "linewidth": 1.2, "label": name}
                axes.plot([row["rows"] for row in found], [row[name] for row in found], **marks)
            axes.set_xscale("log", base=4)
            axes.set_xticks([row["rows"] for row in found], [str(row["rows"]) for row in found])
            axes.set_xlabel("rows of the input" if i == len(dtypes) - 1 else "", fontsize=9)
            axes.set_title(f"{shape[0]} x {shape[1]}, {dtype.removeprefix('torch.')}", fontsize=10)
            of_float(axes)
    figure.supylabel("speed, F.linear = 1", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def model(rows: list[Row]) -> Figure:
    """A panel for each mode, with a group of bars for each workload."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in candidates(row)))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    most = max(sum(row["mode"] == mode for row in rows) for mode in modes)
    figure = Figure(figsize=(1.5 * most + 1.5, 2.7 * len(modes) + 1), dpi=90, layout="constrained")
    panels = figure.subplots(len(modes), sharey=True, squeeze=False)[:, 0]
    width = 0.8 / len(names)
    for axes, mode in zip(panels, modes, strict=True):
        found = [row for row in rows if row["mode"] == mode]
        for i, name in enumerate(names):
            places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(found))]
            # On a logarithmic axis a bar starts where float is.
            heights = [row.get(name, 1) - 1 for row in found]
            marks = {"color": style(name, names)["color"]}
            if name.startswith(OTHERS):
                engine, hatch = "0.45" if name.startswith(TORCHAO) else "0.75", "////" if "dynamic" in name else None
                marks = {"color": engine, "edgecolor": "black", "linewidth": 0.4, "hatch": hatch}
            axes.bar(places, heights, width, bottom=1, label=name, **marks)
        of_float(axes)
        labels = [f"{row['what'].replace(', ', chr(10))}\n{row['dtype']}" for row in found]
        axes.set_xticks(range(len(found)), labels, fontsize=8)
        axes.set_title(mode, fontsize=10)
    figure.supylabel("speed, float = 1", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


FIGURES: dict[str, Callable[[list[Row]], Figure]] = {"cpu_linear_*": linear, "cpu_model": model}
"""By the names of the results."""


def draw(results: Path, folder: Path) -> list[Path]:
    """Write the figures of the results that are there."""
    written = []
    for pattern, figure in FIGURES.items():
        for source in sorted(results.glob(f"{pattern}.json")):
            written.append(folder / f"{source.stem}.png")
            figure(json.loads(source.read_text())["rows"]).savefig(written[-1])
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS)
    print(*draw(RESULTS, parser.parse_args().out), sep="\n")


if __name__ == "__main__":
    main()
