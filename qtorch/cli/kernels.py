"""Subcommands on the kernels of this machine: explain, bench."""

import argparse
from typing import Any

from .arguments import Command, UsageError, add_computation, add_path, add_recipe, positive, show

EXPLAIN = """Tell which kernel serves each weight on this machine, and why the others do not.

The weights are the quantized ones of a checkpoint, or with --recipe those that the recipe would make of its float ones.
"""


def _add_explain(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    add_recipe(parser, required=False)
    add_computation(parser, "the input; by default that of the weights")


def _explain(arguments: argparse.Namespace) -> None:
    import torch

    from ..kernels.registry import Problem
    from ..model.explain import explain_problem
    from .recipes import matrices

    try:
        device = torch.device(arguments.device).type
    except RuntimeError as error:
        raise UsageError(f"--device: {error}") from error
    groups: dict[Problem, list[str]] = {}
    for name, op, scheme in matrices(arguments):
        dtype = getattr(torch, arguments.dtype or "", scheme.dtype)
        groups.setdefault(Problem(op, scheme, dtype, device), []).append(name)
    data, lines = [], []
    for problem, names in groups.items():
        found = explain_problem(problem)
        about = {"weights": names, "shape": list(problem.scheme.shape), "scheme": str(problem.scheme.spec)}
        data.append({**about, "kernel": found.kernel, "note": found.note, "rejected": dict(found.rejected)})
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        shape = "x".join(map(str, problem.scheme.shape))
        lines.append(f"{names[0]}{more}, {shape}\n{found}")
    show(arguments, data, "\n\n".join(lines))


BENCH = """Measure the linear layers of a checkpoint on this machine, float against quantized.

Each shape is measured once, with random numbers, for several numbers of rows (tokens). The weights are the quantized
ones of the checkpoint, or with --recipe those that the recipe would make of its float ones.
"""


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_path(parser)
    add_recipe(parser, required=False)
    add("--rows", type=positive, nargs="+", default=[1, 16, 256], metavar="N", help="default 1 16 256")
    add_computation(parser, "the input; by default that of the weights")
    add("--seconds", type=float, default=0.3, help="for each figure; default 0.3")


def _bench(arguments: argparse.Namespace) -> None:
    import torch

    from ..calibration.allocation.items import TURNS, interleaved_medians, product
    from ..dtypes import quantized_type
    from ..model.report import format_table
    from .recipes import matrices

    kinds: dict[Any, list[str]] = {}
    for name, op, scheme in matrices(arguments):
        if op == "linear":
            kinds.setdefault(scheme, []).append(name)
    data: list[dict[str, Any]] = []
    for scheme, names in kinds.items():
        dtype = getattr(torch, arguments.dtype or "", scheme.dtype)
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


COMMANDS = (Command("explain", EXPLAIN, _add_explain, _explain), Command("bench", BENCH, _add_bench, _bench))
