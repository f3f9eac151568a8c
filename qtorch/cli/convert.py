"""Write a checkpoint in another format; no number changes.

SRC is any checkpoint that `qtorch inspect` reads, quantized or not; DST and the formats are those of `qtorch quantize`.
What a format cannot hold exactly is refused by name. Only gguf, a file of llama.cpp, takes --type and --requantize.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import UsageError, add_target, format_of, in_words, show, shows_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("src", type=Path, metavar="SRC")
    parser.add_argument("dst", type=Path, metavar="DST")
    add_target(parser)
    parser.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="[NAME=]TYPE",
        help="gguf: the type of weights in floating point, Q8_0, of all or of those with a NAME, or regular expression",
    )
    parser.add_argument(
        "--requantize", action="store_true", help="gguf: round weights once more that are quantized in another way"
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from ..checkpoint.streaming.quantize_checkpoint import convert_checkpoint

    format = format_of(arguments)
    options = None
    if arguments.type or arguments.requantize:
        if format != "gguf":
            raise UsageError(f"--type and --requantize are for --format gguf, got {format}")
        pairs = [text.rpartition("=") for text in arguments.type]
        options = {"types": {name or ".*": kind for name, _, kind in pairs}, "requantize": arguments.requantize}
    convert_checkpoint(
        arguments.src,
        arguments.dst,
        format=format,
        max_shard_size=arguments.max_shard_size,
        progress=shows_progress(arguments),
        options=options,
    )
    files = [path for path in arguments.dst.rglob("*") if path.is_file()] if arguments.dst.is_dir() else [arguments.dst]
    nbytes = sum(path.stat().st_size for path in files)
    data = {"format": format, "path": str(arguments.dst), "bytes": nbytes}
    show(arguments, data, f"wrote {arguments.dst}: {format}, {in_words(nbytes)}")
