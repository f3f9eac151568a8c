"""The arguments of the command line. Nothing but the standard library is imported here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import bench, convert, eval, explain, inspect, quantize
from .arguments import UsageError

__all__ = ["UsageError", "parse"]

COMMANDS: tuple[Any, ...] = (quantize, inspect, convert, eval, explain, bench)
"""Modules with `add_arguments(parser)` and `run(arguments)`; the first line of the docstring is the help."""

_EPILOG = """examples:
  qtorch quantize meta-llama/ llama-int4/ --recipe int4_weight_only --set group_size=32
  qtorch quantize model/ served/ --recipe int8_weight_only --format compressed-tensors
  qtorch inspect llama-int4/

exit status: 0, 1 for a failure, 2 for wrong arguments"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; `run` is the function of the subcommand. Help and wrong arguments end the process."""
    parser = argparse.ArgumentParser(
        prog="qtorch",
        description="Quantize checkpoints, look into them, and measure them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for module in COMMANDS:
        about, _, more = module.__doc__.partition("\n")
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name,
            help=about.rstrip("."),
            description=f"{about}\n{more}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_argument("--threads", type=_positive, metavar="N", help="threads of the CPU; by default all cores")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value
