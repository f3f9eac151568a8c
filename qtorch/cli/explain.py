"""Tell which kernel serves each weight on this machine, and why the others do not.

The weights are the quantized ones of a checkpoint, or with --recipe those that the recipe would make of its float ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import UsageError, add_computation, add_recipe, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")
    add_recipe(parser, required=False)
    add_computation(parser, "the input; by default that of the weights")


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    import torch

    from ..kernels.registry import Problem
    from ..model.explain import explain_problem
    from .schemes import matrices

    try:
        device = torch.device(arguments.device).type
    except RuntimeError as error:
        raise UsageError(f"--device: {error}") from error
    groups: dict[Problem, list[str]] = {}
    for name, op, scheme in matrices(arguments):
        dtype = scheme.dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
        groups.setdefault(Problem(op, scheme, dtype, device), []).append(name)
    data, lines = [], []
    for problem, names in groups.items():
        found = explain_problem(problem)
        data.append(
            {
                "weights": names,
                "shape": list(problem.scheme.shape),
                "scheme": str(problem.scheme.spec),
                "kernel": found.kernel,
                "note": found.note,
                "rejected": dict(found.rejected),
            }
        )
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        shape = "x".join(map(str, problem.scheme.shape))
        lines.append(f"{names[0]}{more}, {shape}\n{found}")
    show(arguments, data, "\n\n".join(lines))
