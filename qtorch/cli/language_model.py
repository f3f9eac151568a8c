"""What commands do with a language model of transformers: load it, measure it, calibrate on texts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..calibration.methods import with_data
from ..calibration.texts import read_texts, token_batches
from ..checkpoint.load import load_quantized
from ..checkpoint.streaming.assignment import meta_model
from ..checkpoint.streaming.partial import model_config
from ..quantize_api import quantize_
from .arguments import UsageError
from .recipes import asked_recipe


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer.

    Raises:
        ImportError: transformers is not installed.
        UsageError: there is no config.json.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("eval needs transformers: pip install transformers") from error
    path: Path = arguments.path
    folder = arguments.model or (path if path.is_dir() else path.parent)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json; name the folder that has it by --model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = model_config(folder)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    if path.is_dir() and not (config.get("quantization_config") or config.get("compression_config")):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    else:
        model = _load_packed(path, folder, dtype)
    if arguments.recipe is not None or arguments.config is not None:
        quantize_(model, asked_recipe(arguments))
    return model.to(arguments.device).eval(), tokenizer


def _load_packed(path: Path, folder: Path, dtype: torch.dtype | None) -> Any:
    """The model with the weights of any format, which stay packed; transformers does not read them."""
    return load_quantized(meta_model(folder, dtype), path, device="cpu")


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, text: str, length: int, limit: int | None) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of the tokens of `text`, in pieces of `length` tokens.

    Raises:
        ValueError: the text has less than two tokens.
    """
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0][:limit]
    total, count = 0.0, 0
    for piece in ids.split(length):
        if len(piece) < 2:
            continue
        logits = model(input_ids=piece[None].to(model.device)).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, piece[1:].to(logits.device), reduction="sum"))
        count += len(piece) - 1
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens; perplexity needs two")
    return {"perplexity": math.exp(total / count), "tokens": count, "length": length}


def run_tasks(model: Any, tokenizer: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
    """Results of lm-eval by task.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError("--tasks needs lm-eval: pip install lm-eval") from error
    results = simple_evaluate(model=HFLM(pretrained=model, tokenizer=tokenizer), tasks=tasks, limit=limit)
    return {task: {k: v for k, v in of.items() if k != "alias"} for task, of in results["results"].items()}


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
