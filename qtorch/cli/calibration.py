"""The data and the method of `qtorch quantize --calibrate`."""

from __future__ import annotations

import argparse
from typing import Any

from ..calibration.methods import with_data
from ..calibration.texts import read_texts, token_batches
from .arguments import UsageError


def calibrated(arguments: argparse.Namespace, recipe: Any) -> Any:
    """The recipe, or the mapping, that is calibrated on the texts of ``--calibrate``.

    Raises:
        ImportError: transformers is not installed.
        UsageError: there is no text, no tokenizer, or a recipe cannot be calibrated.
    """
    if not (arguments.src / "config.json").is_file():
        raise UsageError(f"--calibrate: {arguments.src} is no folder of transformers with a config.json")
    try:
        import transformers
    except ImportError as error:
        raise ImportError("--calibrate needs transformers: pip install transformers") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.src, local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"--calibrate: {arguments.src} has no tokenizer: {str(error).partition(chr(10))[0]}"
        ) from error
    try:
        texts = read_texts(arguments.calibrate)
        batches = token_batches(texts, tokenizer, length=arguments.calibrate_length, tokens=arguments.calibrate_tokens)
        return with_data(recipe, batches, arguments.method)
    except (OSError, ValueError) as error:
        raise UsageError(f"--calibrate: {error}") from error
