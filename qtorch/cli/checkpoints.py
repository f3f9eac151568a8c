"""Subcommands that read and write checkpoints: quantize, convert, inspect."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from . import arguments as shared
from .arguments import METHODS, Command, UsageError, format_of, in_words, positive, show, shows_progress

QUANTIZE = """Quantize a checkpoint.

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


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", type=Path, metavar="SRC")
    add("dst", type=Path, nargs="?", metavar="DST", help="not needed with --dry-run")
    shared.add_recipe(parser, required=True)
    shared.add_target(parser)
    calibration = parser.add_argument_group("calibration").add_argument
    calibration("--calibrate", type=Path, metavar="FILE|FOLDER", help="a text file, or a folder of them")
    calibration("--method", choices=METHODS, default="auto", help="default auto; gptq takes less time")
    count = partial(calibration, type=positive, metavar="N")
    count("--calibrate-tokens", default=65536, help="tokens that are used; default 65536")
    count("--calibrate-length", default=512, help="tokens of a sequence; default 512")
    add("--dry-run", action="store_true", help="print the report, write nothing")


def _check_quantize(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for what can be said without torch."""
    if arguments.dst is None and not arguments.dry_run:
        raise UsageError("DST is missing; only --dry-run does without")
    if arguments.calibrate is not None:
        if not (arguments.src / "config.json").is_file():
            raise UsageError(f"--calibrate: {arguments.src} is no folder of transformers with a config.json")
        shared.check_tokenizer(arguments.src, "--calibrate")
        if not arguments.calibrate.exists():
            raise UsageError(f"--calibrate: {arguments.calibrate}: no such file or folder")


def _quantize(arguments: argparse.Namespace) -> None:
    from ..checkpoint.streaming.quantize_checkpoint import quantize_checkpoint
    from .recipes import asked_recipe, asked_targets

    recipe = asked_recipe(arguments)
    if arguments.calibrate is not None:
        recipe = _calibrated(arguments, recipe)
    format = format_of(arguments)
    default = Path({"qtorch": "quantized.safetensors", "gguf": "quantized.gguf"}.get(format, "quantized"))
    report = quantize_checkpoint(
        arguments.src, arguments.dst or default, recipe, targets=asked_targets(arguments),
        on_misfit=arguments.on_misfit, format=format, max_shard_size=arguments.max_shard_size,
        progress=shows_progress(arguments), dry_run=arguments.dry_run,
    )  # fmt: skip
    show(arguments, {"format": format, **report.to_json()}, str(report))


def _calibrated(arguments: argparse.Namespace, recipe: Any) -> Any:
    """The recipe, or the mapping, that is calibrated on the texts of ``--calibrate``."""
    from ..calibration.data import read_texts, token_batches
    from ..calibration.methods import with_data

    tokenizer = shared.read_tokenizer(arguments.src, "--calibrate")
    try:
        texts = read_texts(arguments.calibrate)
        batches = token_batches(texts, tokenizer, length=arguments.calibrate_length, tokens=arguments.calibrate_tokens)
        return with_data(recipe, batches, arguments.method)
    except (OSError, ValueError) as error:
        raise UsageError(f"--calibrate: {error}") from error


CONVERT = """Write a checkpoint in another format; no number changes.

SRC is any checkpoint that `qtorch inspect` reads, quantized or not; DST and the formats are those of `qtorch quantize`.
What a format cannot hold exactly is refused by name. Only gguf, a file of llama.cpp, takes --type and --requantize.
"""


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", type=Path, metavar="SRC")
    add("dst", type=Path, metavar="DST")
    shared.add_target(parser)
    kind = "gguf: the type of weights in floating point, Q8_0, of all or of those with a NAME, or regular expression"
    add("--type", action="append", default=[], metavar="[NAME=]TYPE", help=kind)
    add("--requantize", action="store_true", help="gguf: round weights once more that are quantized in another way")


def _convert(arguments: argparse.Namespace) -> None:
    from ..checkpoint.streaming.quantize_checkpoint import convert_checkpoint

    format = format_of(arguments)
    options = None
    if arguments.type or arguments.requantize:
        if format != "gguf":
            raise UsageError(f"--type and --requantize are for --format gguf, got {format}")
        pairs = [text.rpartition("=") for text in arguments.type]
        options = {"types": {name or ".*": kind for name, _, kind in pairs}, "requantize": arguments.requantize}
    convert_checkpoint(
        arguments.src, arguments.dst, format=format, max_shard_size=arguments.max_shard_size,
        progress=shows_progress(arguments), options=options,
    )  # fmt: skip
    files = [path for path in arguments.dst.rglob("*") if path.is_file()] if arguments.dst.is_dir() else [arguments.dst]
    nbytes = sum(path.stat().st_size for path in files)
    data = {"format": format, "path": str(arguments.dst), "bytes": nbytes}
    show(arguments, data, f"wrote {arguments.dst}: {format}, {in_words(nbytes)}")


INSPECT = """Tell what is in a checkpoint: the name, shape, numerics and size of every tensor.

It reads headers only, of any format: folders of transformers, safetensors files, checkpoints of this package and of the
packages that it reads. A checkpoint need not be trusted.
"""


def _inspect(arguments: argparse.Namespace) -> None:
    from ..checkpoint import formats  # noqa: F401 (registers the formats)
    from ..checkpoint.streaming.partial import open_any
    from ..model.report import format_table

    with open_any(arguments.path) as source:
        aliases = dict(source.aliases)
        rows = [_row(name, source.contents(name)) for name in sorted(source.names - aliases.keys())]
        format = source.format
    total = sum(row["bytes"] for row in rows)
    quantized = sum(row["scheme"] is not None for row in rows)
    data = {"path": str(arguments.path), "format": format, "bytes": total, "quantized": quantized}
    data |= {"aliases": aliases, "tensors": rows}
    shapes = ["x".join(map(str, row["shape"])) for row in rows]
    cells = [(r["name"], shape, r["dtype"], r["scheme"] or "", in_words(r["bytes"])) for r, shape in zip(rows, shapes)]
    table = format_table(("tensor", "shape", "dtype", "quantized", "size"), cells)
    lines = [table, *(f"{name} = {of}" for name, of in aliases.items())]
    lines.append(f"{format}: {len(rows)} tensors, {quantized} of them quantized, {in_words(total)}")
    show(arguments, data, "\n".join(lines))


def _row(name: str, contents: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(contents.shape),
        "dtype": str(contents.dtype).removeprefix("torch."),
        "bytes": contents.nbytes,
        "scheme": None if contents.scheme is None else str(contents.scheme.spec),
    }


COMMANDS = (
    Command("quantize", QUANTIZE, _add_quantize, _quantize, _check_quantize),
    Command("inspect", INSPECT, shared.add_path, _inspect),
    Command("convert", CONVERT, _add_convert, _convert),
)
