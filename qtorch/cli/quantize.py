"""Quantize a checkpoint.

SRC is a folder of transformers, a safetensors file, or any checkpoint that `qtorch inspect` reads. It is read tensor by
tensor: the model is not built, and need not fit into memory. If the command is interrupted, the same command continues.

DST depends on the format:
  transformers          a folder that from_pretrained loads, with the tokenizer and the configuration of SRC;
                        the default if SRC is a folder with a config.json
  compressed-tensors    a folder that vLLM serves
  gptq, awq             folders for engines that read only those
  qtorch                a safetensors file that qtorch.load_quantized reads
  gguf                  a file that llama.cpp runs, by recipes such as gguf_q4_0

With --calibrate the codes are chosen by the outputs on texts. SRC is a folder with a tokenizer, and transformers builds
the model, of which one block at a time is in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import (
    METHODS,
    UsageError,
    add_recipe,
    add_target,
    check_tokenizer,
    format_of,
    positive,
    read_tokenizer,
    show,
    shows_progress,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("src", type=Path, metavar="SRC")
    parser.add_argument("dst", type=Path, nargs="?", metavar="DST", help="not needed with --dry-run")
    add_recipe(parser, required=True)
    add_target(parser)
    calibration = parser.add_argument_group("calibration")
    calibration.add_argument("--calibrate", type=Path, metavar="FILE|FOLDER", help="a text file, or a folder of them")
    calibration.add_argument("--method", choices=METHODS, default="auto", help="default auto; gptq takes less time")
    calibration.add_argument(
        "--calibrate-tokens", type=positive, default=65536, metavar="N", help="tokens that are used; default 65536"
    )
    calibration.add_argument(
        "--calibrate-length", type=positive, default=512, metavar="N", help="tokens of a sequence; default 512"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the report, write nothing")


def check(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch."""
    if arguments.dst is None and not arguments.dry_run:
        raise UsageError("DST is missing; only --dry-run does without")
    if arguments.calibrate is not None:
        if not (arguments.src / "config.json").is_file():
            raise UsageError(f"--calibrate: {arguments.src} is no folder of transformers with a config.json")
        check_tokenizer(arguments.src, "--calibrate")
        if not arguments.calibrate.exists():
            raise UsageError(f"--calibrate: {arguments.calibrate}: no such file or folder")


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from ..checkpoint.streaming.quantize_checkpoint import quantize_checkpoint
    from .recipes import asked_recipe, asked_targets

    recipe = asked_recipe(arguments)
    if arguments.calibrate is not None:
        recipe = _calibrated(arguments, recipe)
    format = format_of(arguments)
    default = Path({"qtorch": "quantized.safetensors", "gguf": "quantized.gguf"}.get(format, "quantized"))
    report = quantize_checkpoint(
        arguments.src,
        arguments.dst or default,
        recipe,
        targets=asked_targets(arguments),
        on_misfit=arguments.on_misfit,
        format=format,
        max_shard_size=arguments.max_shard_size,
        progress=shows_progress(arguments),
        dry_run=arguments.dry_run,
    )
    show(arguments, {"format": format, **report.to_json()}, str(report))


def _calibrated(arguments: argparse.Namespace, recipe: Any) -> Any:
    """The recipe, or the mapping, that is calibrated on the texts of ``--calibrate``."""
    from ..calibration.data import read_texts, token_batches
    from ..calibration.methods import with_data

    tokenizer = read_tokenizer(arguments.src, "--calibrate")
    try:
        texts = read_texts(arguments.calibrate)
        batches = token_batches(texts, tokenizer, length=arguments.calibrate_length, tokens=arguments.calibrate_tokens)
        return with_data(recipe, batches, arguments.method)
    except (OSError, ValueError) as error:
        raise UsageError(f"--calibrate: {error}") from error
