"""Measure the linear layers of a checkpoint on this machine, float against quantized.

Each shape is measured once, with random numbers, for several numbers of rows (tokens). The weights are the quantized
ones of the checkpoint, or with --recipe those that the recipe would make of its float ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_computation, add_recipe, positive, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")
    add_recipe(parser, required=False)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 16, 256], metavar="N", help="default 1 16 256")
    add_computation(parser, "the input; by default that of the weights")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure; default 0.3")


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    import torch

    from ..calibration.allocation.items import TURNS, interleaved_medians, product
    from ..dtypes import quantized_type
    from ..model.report import format_table
    from .schemes import matrices

    kinds: dict[Any, list[str]] = {}
    for name, op, scheme in matrices(arguments):
        if op == "linear":
            kinds.setdefault(scheme, []).append(name)
    data: list[dict[str, Any]] = []
    for scheme, names in kinds.items():
        dtype = scheme.dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
        weight = torch.randn(scheme.shape, dtype=dtype, device=arguments.device)
        given = {}
        if scheme.spec.static:
            given["act_scale"] = torch.full((1, 1), 0.02, device=arguments.device, dtype=torch.float32)
        quantized = quantized_type(scheme.weight).from_float(weight, scheme.spec, **given)
        for rows in arguments.rows:
            x = torch.randn(rows, scheme.shape[-1], dtype=dtype, device=arguments.device)
            with torch.no_grad():
                products = [product(x, each) for each in (weight, quantized)]
                plain, fast = interleaved_medians(products, seconds=arguments.seconds / TURNS)
            times = {"float_us": plain / 1e3, "quantized_us": fast / 1e3, "speed": plain / fast}
            about = {"weights": len(names), "shape": list(scheme.shape), "scheme": str(scheme.spec), "rows": rows}
            data.append({**about, **times})
    cells = [
        (
            "x".join(map(str, row["shape"])),
            str(row["weights"]),
            row["scheme"],
            str(row["rows"]),
            *(f"{row[name]:.{digits}f}" for name, digits in (("float_us", 0), ("quantized_us", 0), ("speed", 2))),
        )
        for row in data
    ]
    head = ("shape", "layers", "quantized", "rows", "float us", "quantized us", "speed")
    show(arguments, data, format_table(head, cells))
