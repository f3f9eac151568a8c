"""Find the modules in which a quantized model departs from its float model.

PATH is quantized, in any format that `qtorch inspect` reads, and --reference names the folder of the float model. With
--recipe PATH is the float model itself, which is quantized first. Both run on pieces of the text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import eval
from .arguments import UsageError, add_computation, add_recipe, positive, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="the float model; with --recipe it is PATH")
    parser.add_argument("--text", type=Path, metavar="FILE|FOLDER", required=True, help="a text file, or a folder")
    add_recipe(parser, required=False)
    parser.add_argument("--shares", action="store_true", help="the share of each module in the divergence; takes time")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write JSON, and a picture if matplotlib is there")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="with config.json and tokenizer; default the path")
    parser.add_argument("--length", type=positive, default=256, metavar="N", help="tokens of a piece; default 256")
    parser.add_argument("--limit", type=positive, default=4096, metavar="N", help="tokens that are used; default 4096")
    add_computation(parser, "the models; by default that of their configurations")


def check(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch."""
    quantizes = arguments.recipe is not None or arguments.config is not None
    if quantizes == (arguments.reference is not None):
        raise UsageError("give --reference, the float model of a quantized PATH, or --recipe for a float PATH")
    eval.check(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from ..calibration import compare_models
    from ..calibration.data import on_device, read_texts, token_batches

    try:
        texts = read_texts(arguments.text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--text: {error}") from error
    floats = {"path": arguments.reference or arguments.path, "model": None, "recipe": None, "config": None}
    model, tokenizer = eval.load(arguments)
    reference, _ = eval.load(argparse.Namespace(**{**vars(arguments), **floats}))
    batches = token_batches(texts, tokenizer, length=arguments.length, tokens=arguments.limit)
    found = compare_models(
        model, reference, [on_device(each, model.device) for each in batches], shares=arguments.shares
    )
    if arguments.save is not None:
        found.save(arguments.save)
    show(arguments, found.to_json(), str(found))
