"""Arguments that several subcommands share, and what they print."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

FORMATS = ("qtorch", "transformers", "compressed-tensors", "gptq", "awq", "gguf")
"""Formats that can be written. (Their registry needs torch.)"""

METHODS = ("auto", "gptq")
"""Methods of calibration. (Their table needs torch.)"""

DTYPES = ("float32", "bfloat16", "float16")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class UsageError(ValueError):
    """Arguments that contradict each other, or do not name what they have to name."""


class Command(NamedTuple):
    """A subcommand: what `--help` says of it, in a line and more; what declares its arguments, runs it, and checks what
    can be checked without torch."""

    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    check: Callable[[argparse.Namespace], None] | None = None


def check(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch: no checkpoint, and no recipe, is there."""
    source: Path = arguments.src if "src" in arguments else arguments.path
    if not os.path.exists(source):  # not `Path.exists`, which raises for a name that is too long
        raise UsageError(f"{source}: no such file or folder")
    if source.is_dir() and not any(file.name.endswith(_WEIGHTS) for file in source.iterdir()):
        what = "is empty" if not any(source.iterdir()) else "has no file of weights, such as model.safetensors"
        raise UsageError(f"{source}: the folder {what}")
    if getattr(arguments, "recipe", None) is not None:
        name, known = arguments.recipe.partition("(")[0].strip(), _recipe_names()
        if name not in known:
            raise UsageError(unknown_recipe(name, known))
    if wrong := next((each for each in getattr(arguments, "set", ()) if "=" not in each), None):
        raise UsageError(f"--set takes NAME=VALUE, got {wrong!r}")
    if getattr(arguments, "config", None) is not None:
        if not arguments.config.is_file():
            raise UsageError(f"--config: {arguments.config}: no such file")
        if arguments.set:
            raise UsageError("--set belongs to --recipe; write the arguments into the file of --config")


_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")


def _recipe_names() -> list[str]:
    """The names of all recipes, read from the sources: their registry needs torch."""
    sources = [path for room in ("recipes", "calibration", "training") for path in _ROOT.glob(f"{room}/**/*.py")]
    return [name for path in sources for name in re.findall(r'^@register_recipe\("(\w+)"\)', path.read_text(), re.M)]


_ROOT = Path(__file__).parents[1]


def unknown_recipe(name: str, known: Collection[str]) -> str:
    """The error for a name that no recipe has."""
    if name in METHODS:
        return f"{name} calibrates a recipe: --recipe int4_weight_only --calibrate TEXT --method {name}"
    near = get_close_matches(name, known) or [each for each in known if each.startswith(name[:3])] or known
    return f"there is no recipe {name!r}; did you mean {', '.join(sorted(near)[:4])}?"


def check_tokenizer(folder: Path, option: str) -> None:
    """Raise `UsageError` for a folder without the files of a tokenizer; `option` of the command line needs one."""
    if not any(re.match(r"(tokenizer|vocab|spiece|sentencepiece|tekken).*", file.name) for file in folder.iterdir()):
        raise UsageError(f"{option}: {folder} has no tokenizer, no file such as tokenizer.json; copy it there")


def read_tokenizer(folder: Path, option: str) -> Any:
    """The tokenizer of a folder, by transformers."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{option} needs transformers: pip install transformers") from error
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"{option}: {folder} has no tokenizer: {str(error).splitlines()[0]}") from error


def add_path(parser: argparse.ArgumentParser) -> None:
    """The checkpoint that is read."""
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER")


def add_recipe(parser: argparse.ArgumentParser, required: bool) -> None:
    """The arguments that `recipes.asked_recipe` reads."""
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group(required=required).add_argument
    either("--recipe", metavar="NAME", help="a recipe for all linear layers: int4_weight_only, int8_weight_only(), ...")
    either("--config", type=Path, metavar="FILE", help='JSON, a recipe for each name: {"lm_head": null, ".*": "..."}')
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the recipe: group_size=32")
    reach = "what the recipe reaches: linear (the default), all, experts, embedding, ..."
    add("--targets", default="linear", metavar="KIND[,KIND]", help=reach)
    misfit = "what becomes of weights that groups do not divide; default error"
    add("--on-misfit", default="error", choices=("error", "pad", "coarser", "skip"), help=misfit)


def add_computation(parser: argparse.ArgumentParser, dtype: str) -> None:
    """The arguments that say in which dtype and where something is computed."""
    add = parser.add_argument
    add("--dtype", choices=DTYPES, help=f"of {dtype}")
    add("--device", default="cpu", help="default cpu")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is written."""
    add = parser.add_argument
    add("--format", choices=FORMATS, help="of what is written; see above")
    add("--max-shard-size", type=size, default=5 * 2**30, metavar="SIZE", help="of a file, such as 2GB; default 5GiB")
    add("--quiet", action="store_true", help="no progress bar")


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a positive number, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """A number of bytes: 1000, 500MB, 2GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def format_of(arguments: argparse.Namespace) -> str:
    """The format asked for; by default that of a folder of transformers for such a folder, else the own one."""
    if arguments.format is not None:
        return str(arguments.format)
    return "transformers" if (arguments.src / "config.json").is_file() else "qtorch"


def shows_progress(arguments: argparse.Namespace) -> bool:
    """Whether to show a progress bar: on a terminal."""
    return not arguments.quiet and sys.stderr.isatty()


def show(arguments: argparse.Namespace, data: Any, text: str) -> None:
    """Print `data` as JSON, or `text`."""
    print(json.dumps(data, indent=1) if arguments.json else text)


def in_words(nbytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
