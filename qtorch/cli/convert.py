"""Write a checkpoint in another format; no number changes.

SRC is any checkpoint that `qtorch inspect` reads, quantized or not; DST and the formats are those of `qtorch quantize`.
What a format cannot hold exactly is refused by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_target, format_of, in_words, show, shows_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("src", type=Path, metavar="SRC")
    parser.add_argument("dst", type=Path, metavar="DST")
    add_target(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from ..checkpoint.streaming.quantize_checkpoint import convert_checkpoint

    format = format_of(arguments)
    convert_checkpoint(
        arguments.src,
        arguments.dst,
        format=format,
        max_shard_size=arguments.max_shard_size,
        progress=shows_progress(arguments),
    )
    files = [path for path in arguments.dst.rglob("*") if path.is_file()] if arguments.dst.is_dir() else [arguments.dst]
    nbytes = sum(path.stat().st_size for path in files)
    data = {"format": format, "path": str(arguments.dst), "bytes": nbytes}
    show(arguments, data, f"wrote {arguments.dst}: {format}, {in_words(nbytes)}")
