"""Measure the perplexity of a language model on a text file.

The model is a folder of transformers, float or quantized in any format that `qtorch inspect` reads; or a file of
save_quantized, with --model for its configuration and tokenizer. With --recipe a float model is quantized first. The
text is cut into pieces of --length tokens; every token but the first of a piece is predicted from those before it.

With --tasks the tasks of lm-eval run instead, where that package is installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import UsageError, add_recipe, show, use_threads
from .explain import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=Path, metavar="FILE", help="a text file")
    what.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, separated by commas")
    add_recipe(parser, required=False)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="with config.json and tokenizer; default the path")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a piece; default 512")
    parser.add_argument("--limit", type=int, metavar="N", help="tokens of the text that are used, or samples of a task")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model; by default that of its configuration")
    parser.add_argument("--device", default="cpu", help="default cpu")


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    use_threads(arguments)
    if arguments.text is not None and not arguments.text.is_file():
        raise UsageError(f"--text: {arguments.text}: no such file")
    if arguments.length < 2:
        raise UsageError(f"--length must be at least 2, got {arguments.length}")
    from .language_model import load, perplexity, run_tasks

    model, tokenizer = load(arguments)
    if arguments.tasks is not None:
        found = run_tasks(model, tokenizer, arguments.tasks.split(","), arguments.limit)
        lines = [f"{task} {name} {value}" for task, values in found.items() for name, value in values.items()]
        show(arguments, found, "\n".join(lines))
        return
    text = arguments.text.read_text(encoding="utf-8")
    data: dict[str, Any] = perplexity(model, tokenizer, text, arguments.length, arguments.limit)
    show(arguments, data, f"perplexity {data['perplexity']:.4f} over {data['tokens']} tokens")
