"""QuantizeReport: what `quantize_` did to each layer, or why it did nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One weight.

    Attributes:
        name: fully-qualified name of the parameter; `also` are the other names of a tied one.
        shape: logical shape.
        action: ``"quantized"`` or ``"skipped"``.
        detail: the recipe, or why it was skipped.
        bytes_before, bytes_after: size of the weight, scales included.
        sqnr: of the quantized weight against the float one, dB; None if skipped.
        kernel: what will run; None if skipped.
    """

    name: str
    shape: tuple[int, ...]
    action: str
    detail: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None
    kernel: str | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizeReport:
    """Result of `quantize_`; prints as a table, `to_json()` exports it."""

    layers: tuple[LayerReport, ...]
    dry_run: bool = False

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.action == "quantized")

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.action == "skipped")

    @property
    def bytes_before(self) -> int:
        """Of the quantized weights, before."""
        return sum(layer.bytes_before for layer in self.quantized)

    @property
    def bytes_after(self) -> int:
        """Of the quantized weights, after."""
        return sum(layer.bytes_after for layer in self.quantized)

    def to_json(self) -> dict[str, Any]:
        """JSON data: the layers, field by field, and the totals. An SQNR that is not finite (a weight that is exact, or
        all zero) is None: JSON has no such number."""
        return {
            "dry_run": self.dry_run,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": [_json_of(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        rows = [_row(layer) for layer in self.layers]
        table = format_table(("weight", "shape", "what", "bytes before", "after", "SQNR dB", "kernel"), rows)
        return f"{table}\n{self._summary()}"

    def __repr__(self) -> str:
        return f"<QuantizeReport: {self._summary()}>"

    def _summary(self) -> str:
        done, before, after = self.quantized, self.bytes_before, self.bytes_after
        share = f" ({after / before:.1%})" if before else ""
        return (
            f"{'would quantize' if self.dry_run else 'quantized'} {len(done)} of {len(self.layers)} weights: "
            f"{before:,} -> {after:,} bytes{share}"
        )


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, a rule under the header."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def _json_of(layer: LayerReport) -> dict[str, Any]:
    finite = layer.sqnr is not None and math.isfinite(layer.sqnr)
    return {
        **asdict(layer),
        "shape": list(layer.shape),
        "also": list(layer.also),
        "sqnr": layer.sqnr if finite else None,
    }


def _row(layer: LayerReport) -> tuple[str, ...]:
    quantized = layer.action == "quantized"
    return (
        " = ".join((layer.name, *layer.also)),
        "x".join(map(str, layer.shape)),
        layer.detail if quantized else f"skipped: {layer.detail}",
        f"{layer.bytes_before:,}",
        f"{layer.bytes_after:,}" if quantized else "",
        f"{layer.sqnr:.1f}" if layer.sqnr is not None else "",
        layer.kernel or "",
    )
