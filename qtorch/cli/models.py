"""Subcommands that run a language model: eval, compare."""

import argparse
from pathlib import Path
from typing import Any

from . import arguments as shared
from .arguments import Command, UsageError, positive, show

EVAL = """Measure the perplexity of a language model on a text file.

The model is a folder of transformers, float or quantized in any format that `qtorch inspect` reads; or a file of
save_quantized, with --model for its configuration and tokenizer. With --recipe a float model is quantized first. The
text is cut into pieces of --length tokens; every token but the first of a piece is predicted from those before it.

With --tasks the tasks of lm-eval run instead, where that package is installed.
"""


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer."""
    import torch

    from ..checkpoint.save_load import load_quantized
    from ..checkpoint.streaming.assignment import meta_model
    from ..checkpoint.streaming.partial import model_config
    from ..quantize_api import quantize_
    from .recipes import asked_recipe

    model: Any
    path, folder = arguments.path, _folder(arguments)
    tokenizer = shared.read_tokenizer(folder, "eval")
    config = model_config(folder)
    dtype = getattr(torch, arguments.dtype or "", None)
    if path.is_dir() and not (config.get("quantization_config") or config.get("compression_config")):
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    else:
        # transformers would unpack the weights of other formats, or not read them.
        model = load_quantized(meta_model(folder, dtype), path, device="cpu")
    if arguments.recipe is not None or arguments.config is not None:
        quantize_(model, asked_recipe(arguments))
    return model.to(arguments.device).eval(), tokenizer


def _perplexity(model: Any, tokenizer: Any, text: str, length: int, limit: int | None) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of the tokens of `text`, in pieces of `length` tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0][:limit]
    total, count = 0.0, 0
    for piece in ids.split(length):
        if len(piece) < 2:
            continue
        with torch.no_grad():
            logits = model(input_ids=piece[None].to(model.device)).logits[0, :-1].float()
        total += float(cross_entropy(logits, piece[1:].to(logits.device), reduction="sum"))
        count += len(piece) - 1
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens; perplexity needs two")
    perplexity = float(torch.tensor(total / count, dtype=torch.float64, device="cpu").exp())  # infinite, not an error
    return {"perplexity": perplexity, "tokens": count, "length": length}


def _run_tasks(model: Any, tokenizer: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
    """Results of lm-eval by task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError("--tasks needs lm-eval: pip install lm-eval") from error
    results = simple_evaluate(model=HFLM(pretrained=model, tokenizer=tokenizer), tasks=tasks, limit=limit)
    return {task: {k: v for k, v in of.items() if k != "alias"} for task, of in results["results"].items()}


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_path(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=Path, metavar="FILE|FOLDER", help="a text file, or a folder")
    what.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, separated by commas")
    shared.add_recipe(parser, required=False)
    add("--model", type=Path, metavar="FOLDER", help="with config.json and tokenizer; default the path")
    add("--length", type=int, default=512, metavar="N", help="tokens of a piece; default 512")
    add("--limit", type=positive, metavar="N", help="tokens of the text, or samples of a task")
    shared.add_computation(parser, "the model; by default that of its configuration")


def _check_eval(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch."""
    if arguments.text is not None and not arguments.text.exists():
        raise UsageError(f"--text: {arguments.text}: no such file")
    if arguments.length < 2:
        raise UsageError(f"--length must be at least 2, got {arguments.length}")
    if not (_folder(arguments) / "config.json").is_file():
        raise UsageError(f"{_folder(arguments)}: no config.json; name the folder that has it by --model")
    shared.check_tokenizer(_folder(arguments), "eval")


def _folder(arguments: argparse.Namespace) -> Path:
    """The folder of configuration and tokenizer."""
    path: Path = arguments.path
    folder: Path | None = arguments.model
    return folder or (path if path.is_dir() else path.parent)


def _texts(arguments: argparse.Namespace) -> list[str]:
    """What --text names."""
    from ..calibration.data import read_texts

    try:
        return read_texts(arguments.text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--text: {error}") from error


def _eval(arguments: argparse.Namespace) -> None:
    texts = _texts(arguments) if arguments.tasks is None else []
    model, tokenizer = _load(arguments)
    if arguments.tasks is not None:
        found = _run_tasks(model, tokenizer, arguments.tasks.split(","), arguments.limit)
        lines = [f"{task} {name} {value}" for task, values in found.items() for name, value in values.items()]
        show(arguments, found, "\n".join(lines))
        return
    data: dict[str, Any] = _perplexity(model, tokenizer, "\n\n".join(texts), arguments.length, arguments.limit)
    show(arguments, data, f"perplexity {data['perplexity']:.4f} over {data['tokens']} tokens")


COMPARE = """Find the modules in which a quantized model departs from its float model.

PATH is quantized, in any format that `qtorch inspect` reads, and --reference names the folder of the float model. With
--recipe PATH is the float model itself, which is quantized first. Both run on pieces of the text.
"""


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_path(parser)
    add("--reference", type=Path, metavar="FOLDER", help="the float model; with --recipe it is PATH")
    add("--text", type=Path, metavar="FILE|FOLDER", required=True, help="a text file, or a folder")
    shared.add_recipe(parser, required=False)
    add("--shares", action="store_true", help="the share of each module in the divergence; takes time")
    add("--save", type=Path, metavar="FOLDER", help="write JSON, and a picture if matplotlib is there")
    add("--model", type=Path, metavar="FOLDER", help="with config.json and tokenizer; default the path")
    add("--length", type=positive, default=256, metavar="N", help="tokens of a piece; default 256")
    add("--limit", type=positive, default=4096, metavar="N", help="tokens that are used; default 4096")
    shared.add_computation(parser, "the models; by default that of their configurations")


def _check_compare(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch."""
    quantizes = arguments.recipe is not None or arguments.config is not None
    if quantizes == (arguments.reference is not None):
        raise UsageError("give --reference, the float model of a quantized PATH, or --recipe for a float PATH")
    _check_eval(arguments)


def _compare(arguments: argparse.Namespace) -> None:
    from ..calibration import compare_models
    from ..calibration.data import on_device, token_batches

    texts = _texts(arguments)
    floats = {"path": arguments.reference or arguments.path, "model": None, "recipe": None, "config": None}
    model, tokenizer = _load(arguments)
    reference, _ = _load(argparse.Namespace(**{**vars(arguments), **floats}))
    batches = token_batches(texts, tokenizer, length=arguments.length, tokens=arguments.limit)
    batches = [on_device(each, model.device) for each in batches]
    found = compare_models(model, reference, batches, shares=arguments.shares)
    if arguments.save is not None:
        found.save(arguments.save)
    show(arguments, found.to_json(), str(found))


COMMANDS = (
    Command("eval", EVAL, _add_eval, _eval, _check_eval),
    Command("compare", COMPARE, _add_compare, _compare, _check_compare),
)
