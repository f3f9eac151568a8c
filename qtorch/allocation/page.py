"""The report on an allocation as one HTML file that refers to nothing else."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping

from .report import AllocationReport, Row

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
