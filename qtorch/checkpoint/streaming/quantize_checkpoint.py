"""quantize_checkpoint, convert_checkpoint, save_gguf: a checkpoint rewritten tensor by tensor, without the model.

At no time is more in memory than one tensor with its codes. The new checkpoint appears complete or not at all, and a
call that was killed is continued by the next one with the same arguments.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...dtypes import QuantizedTensor
from ...model import report as reports
from ...model.misfit import OnMisfit
from ...model.report import LayerReport, QuantizeReport, quantized_row, skipped_row, warn_of_few_tokens
from ...model.targets import Reach, named_errors
from ...primitives.files import naming
from ...quantize_api import check_are_recipes
from ...recipes.base import Recipe
from .. import formats  # noqa: F401 (registers the formats)
from ..formats.gguf.writing import GgufFormat, check_gguf
from ..formats.transformers_folder import recipe_json
from ..save_folder import SAVE_FORMATS, check_destination, save_folder, save_format
from ..sources import Contents, Source
from ..tensor_file import OWN_FORMAT, check_name
from . import assignment, calibrate, forms
from .partial import Partial, identity_of, model_config, open_any, take_left_over

VERSION = 1

_MAX_NAME = 200
"""Bytes of the name of what is written: those of shards and of the unfinished folder are longer, and at most 255."""

Transform = Callable[[str, Tensor], tuple[Tensor, LayerReport | None]]


@named_errors("quantize_checkpoint")
def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    recipe: Recipe | Mapping[str, Recipe | None],
    *,
    targets: Reach = "linear",
    on_misfit: OnMisfit = "error",
    format: str = OWN_FORMAT,
    max_shard_size: int = 5 * 2**30,
    progress: bool = False,
    dry_run: bool = False,
    model: nn.Module | None = None,
) -> QuantizeReport:
    """Quantize the weights of a checkpoint, tensor by tensor, without building the model.

    The weights are those that `quantize_` and `save_quantized` would write, bit for bit. `dst` appears complete or not
    at all. If the process dies, the same call continues after the tensors that are on disk; with other arguments it
    starts anew. Until then they are in ``.<name of dst>.partial`` beside it.

    Args:
        src: a folder of transformers, a safetensors file, or any checkpoint that `load_quantized` reads. Tensors that
            are quantized already are kept.
        dst: a new file for the own format and for "gguf", a new folder for the others; all but the own format get the
            configuration and the tokenizer of `src`.
        recipe: one recipe, or an ordered mapping from names to recipes as for `quantize_`. A linear layer is what has a
            `weight` of two axes; embeddings, the experts of a mixture in one parameter, and which way around a weight
            is stored are told by names and ``config.json`` (see `streaming.assignment`). As by `quantize_`, heads
            (``lm_head``) are quantized and routers are not; in the formats of other packages, whose readers expect it,
            one recipe leaves heads alone, too: ask for them by name, or with ``targets="all"``.
        targets: what the recipe reaches, a word or some as for `quantize_`.
        on_misfit: as for `quantize_`.
        format: ``"qtorch"``, ``"transformers"``, ``"compressed-tensors"`` or ``"gguf"``, as for `save_quantized`.
        max_shard_size: maximum size of a file in bytes, unless one tensor is larger.
        progress: show a progress bar.
        dry_run: quantize, but write nothing; recipes that calibrate round to nearest then, and the report has an
            `estimate` of the memory and the time that they will take.
        model: for recipes that calibrate in the order of the model, such as ``gptq(int4_weight_only(), batches)``: a
            model whose parameters are on the meta device; by default transformers builds that of config.json. One
            block of it is in memory at a time. What is done is kept in ``.<name of dst>.calibration`` until `dst` is
            complete; the outputs of blocks on the data are there, too.

    Returns:
        A report of what was done to each weight; print it.

    Raises:
        FileExistsError: `dst` exists.
        FileNotFoundError: there is no `src`, or no folder for `dst`.
        BlockingIOError: another process writes `dst`.
        ValueError: a weight cannot be quantized by its recipe or stored in the format, or an entry of the mapping has
            no effect. Nothing appears at `dst`.
        TypeError: `recipe` is not a recipe.
    """
    check_are_recipes("quantize_checkpoint", recipe)
    src, dst = Path(src), Path(dst)
    _check_paths("quantize_checkpoint", src, format, dst)
    with _open(src, format) as source:
        contents = _contents(source)
        assigned = assignment.assign(contents, recipe, source, model_config(src), format, targets, on_misfit)

        chosen = {name: target for name, target in assigned.items() if target.recipe and target.recipe.in_order}
        of_chosen = calibrate.CalibratedWeights(source, chosen, dst, model) if chosen else None
        estimate = of_chosen.estimate() if of_chosen is not None and dry_run else None
        calibrated = None if dry_run else of_chosen

        def quantize(name: str, tensor: Tensor) -> tuple[Tensor, LayerReport | None]:
            target = assigned.get(name)
            if isinstance(tensor, QuantizedTensor):
                size = contents[name].nbytes
                shape = tuple(tensor.shape)
                return tensor, LayerReport(name, shape, "skipped", reports.QUANTIZED_BEFORE, size, size)
            if target is None:
                return tensor, None
            if target.recipe is None:
                return tensor, skipped_row(target)
            report = None
            if calibrated is not None and name in chosen:
                made, report = calibrated.weight(name)
            else:
                made = assignment.check_values(name, target, tensor).make(target, tensor)
            return made, replace(quantized_row(target, tensor, made), calibration=report)

        arguments = {"recipe": recipe_json(recipe), "call": "quantize_checkpoint"}
        if targets != "linear":
            arguments["targets"] = targets if isinstance(targets, str) else sorted(targets)
        if on_misfit != "error":
            arguments["on_misfit"] = on_misfit
        try:
            if dry_run:
                rows = _tried(source, contents, quantize, progress)
            else:
                rows = _rewrite(source, contents, dst, quantize, format, max_shard_size, progress, arguments)
            if calibrated is not None:
                calibrated.remove()
        finally:
            if calibrated is not None:
                calibrated.close()
    warn_of_few_tokens("quantize_checkpoint", rows)
    before = sum(math.prod(of.shape) for of in contents.values() if of.scheme is not None)
    size = sum(of.nbytes for of in contents.values())
    parameters = sum(math.prod(of.shape) for of in contents.values())
    report = QuantizeReport(tuple(rows), dry_run, parameters, before, size, estimate=estimate)
    return replace(report, model_bytes_after=size - report.bytes_before + report.bytes_after)


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = OWN_FORMAT,
    max_shard_size: int = 5 * 2**30,
    progress: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint in another format, tensor by tensor: no number changes, and what is quantized stays so.

    `options` are those of the format, JSON data: of "gguf" the `types`, `requantize` and the folder of the `tokenizer`,
    as for `save_gguf`. Other arguments, and errors, are those of `quantize_checkpoint`.
    """
    src, dst = Path(src), Path(dst)
    _check_paths("convert_checkpoint", src, format, dst)
    with _open(src, format) as source:
        keep: Transform = lambda name, tensor: (tensor, None)  # noqa: E731
        arguments: dict[str, Any] = {"call": "convert_checkpoint"}
        if options:
            save_format(format, options=options)  # an error before anything is read
            arguments["options"] = dict(options)
        _rewrite(source, _contents(source), dst, keep, format, max_shard_size, progress, arguments)


def _open(src: Path, format: str) -> Source:
    source = open_any(src)
    return SAVE_FORMATS[format].prepare(source, model_config(src)) if format in SAVE_FORMATS else source


def _check_paths(function: str, src: Path, format: str, dst: Path) -> None:
    if not os.path.exists(src):
        raise FileNotFoundError(f"{src}: no such file")
    if format != OWN_FORMAT:
        save_format(format)
    if format == OWN_FORMAT and dst.suffix != ".safetensors":
        raise ValueError(f"{function}: {OWN_FORMAT!r} is a file, such as {dst.name}.safetensors, got {dst=!s}")
    if len(os.fsencode(dst.name)) > _MAX_NAME:
        raise ValueError(f"{function}: {dst.name!r:.80} has more than {_MAX_NAME} bytes; files are named after it")
    if format in SAVE_FORMATS:
        check_destination(function, format, dst)
    elif not os.path.isdir(dst.absolute().parent):
        raise FileNotFoundError(f"{function}: there is no folder {dst.absolute().parent}")


def _contents(source: Source) -> dict[str, Contents]:
    """What is stored, in a fixed order, under names that a file can hold."""
    names = sorted(source.names - source.aliases.keys())
    for name in names:
        with naming(source.path):
            check_name(name)
    return {name: source.contents(name) for name in names}


def _bar(contents: Mapping[str, Contents], progress: bool) -> tqdm[Any]:
    return tqdm(total=sum(of.nbytes for of in contents.values()), unit="B", unit_scale=True, disable=not progress)


@torch.no_grad()
def _tried(source: Source, contents: Mapping[str, Contents], transform: Transform, progress: bool) -> list[LayerReport]:
    """The rows of the report of a call that writes nothing."""
    rows = []
    with _bar(contents, progress) as bar:
        for name, of in contents.items():
            _, row = transform(name, source.tensor(name))
            rows.append(row)
            bar.update(of.nbytes)
    return [row for row in rows if row is not None]


@torch.no_grad()
def _rewrite(
    source: Source, contents: Mapping[str, Contents], dst: Path, transform: Transform, format: str, max_shard_size: int,
    progress: bool, arguments: dict[str, Any],
) -> list[LayerReport]:  # fmt: skip
    """Store ``transform(name, tensor)`` of every tensor; the rows of the report."""
    names = list(contents)
    identity = {"version": VERSION, "source": [source.format, identity_of(source.path)]}
    arguments = {**identity, "format": format, "max_shard_size": max_shard_size, **arguments}
    target = dst.absolute()
    if os.path.lexists(target):
        of_earlier = take_left_over(target, arguments, names)
        if of_earlier is None:
            raise FileExistsError(f"{dst} exists; remove it, or give another name")
        return of_earlier
    form = forms.form_of(format, source.path, source.aliases, arguments.get("recipe"), arguments)
    with Partial(target, arguments, form, names, max_shard_size) as partial, _bar(contents, progress) as bar:
        bar.update(sum(contents[name].nbytes for name in names[: partial.done]))
        for name in names[partial.done :]:
            made, row = transform(name, source.tensor(name))
            partial.add(name, made, row)
            del made
            bar.update(contents[name].nbytes)
        partial.finish()
        return partial.rows


def save_gguf(
    model_or_folder: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    types: str | Mapping[str, str] | None = None,
    requantize: bool = False,
) -> None:
    """Save a model of transformers as a GGUF file, which llama.cpp runs.

    Quantized weights whose numbers a type of GGUF has are written code for code: those of `gguf_q4_0()` and its kin,
    of `mxfp4_weight_only()`, of a GGUF file that was read, and others whose scales are numbers of fp16.

    Args:
        model_or_folder: a model with a `config`; or any checkpoint that `load_quantized` reads, with a config.json
            beside it, which is converted tensor by tensor.
        path: the file, which ends in ".gguf".
        tokenizer: a tokenizer of transformers, or the folder of one; by default that of the folder. A file without one
            takes numbers of tokens only.
        types: the type of the weights in floating point, such as "Q8_0", or an ordered mapping from names of modules,
            or regular expressions, to types, of which the first that matches counts. By default they keep their dtype.
        requantize: round weights once more that are quantized and not of the type that is asked for, or of any: they
            become what `types` says, or Q8_0, and a warning names them.

    Raises:
        ImportError: the package `gguf` is missing.
        ValueError: the architecture is not known, llama.cpp would compute something else, a quantized weight is of no
            type, or an entry of `types` is unknown or has no effect.
        FileExistsError: a checkpoint is converted, and `path` exists.
    """
    check_gguf()
    with tempfile.TemporaryDirectory() as temporary:
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(temporary)
            tokenizer = temporary
        options = {"types": types, "requantize": requantize}
        options["tokenizer"] = None if tokenizer is None else os.fspath(tokenizer)
        if isinstance(model_or_folder, nn.Module):
            save_folder(model_or_folder, path, GgufFormat.name, max_shard_size=5 * 2**30, options=options)
        else:
            convert_checkpoint(model_or_folder, path, format=GgufFormat.name, options=options)
