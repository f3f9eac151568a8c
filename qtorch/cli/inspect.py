"""Tell what is in a checkpoint: the name, shape, numerics and size of every tensor.

It reads headers only, of any format: folders of transformers, safetensors files, checkpoints of this package and of the
packages that it reads. A checkpoint need not be trusted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import in_words, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from ..checkpoint import formats  # noqa: F401 (registers the formats)
    from ..checkpoint.streaming.partial import open_any
    from ..model.report import format_table

    with open_any(arguments.path) as source:
        aliases = dict(source.aliases)
        rows = [_row(name, source.contents(name)) for name in sorted(source.names - aliases.keys())]
        format = source.format
    total = sum(row["bytes"] for row in rows)
    quantized = sum(row["scheme"] is not None for row in rows)
    data = {
        "path": str(arguments.path),
        "format": format,
        "bytes": total,
        "quantized": quantized,
        "aliases": aliases,
        "tensors": rows,
    }
    if arguments.json:
        show(arguments, data, "")
        return
    cells = [
        (row["name"], "x".join(map(str, row["shape"])), row["dtype"], row["scheme"] or "", in_words(row["bytes"]))
        for row in rows
    ]
    table = format_table(("tensor", "shape", "dtype", "quantized", "size"), cells)
    lines = [table, *(f"{name} = {of}" for name, of in aliases.items())]
    lines.append(f"{format}: {len(rows)} tensors, {quantized} of them quantized, {in_words(total)}")
    show(arguments, data, "\n".join(lines))


def _row(name: str, contents: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(contents.shape),
        "dtype": str(contents.dtype).removeprefix("torch."),
        "bytes": contents.nbytes,
        "scheme": None if contents.scheme is None else str(contents.scheme.spec),
    }
