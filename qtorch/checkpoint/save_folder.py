"""Saving a model as a folder in a format of another package: config.json and safetensors files, in one step.

    config.json, generation_config.json     of a model of transformers; `quantization_config` by the format
    model.safetensors                       or model-00001-of-0000N.safetensors and model.safetensors.index.json

All files are written to a temporary folder beside the target. A new folder gets its name in one step; files of a folder
that exists are replaced one by one, config.json last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..files import read_json
from .file_format import places_of
from .save_format import SaveFormat, save_format
from .to_save import alone_in, check_converted, identity, problem_of, temporary_beside, write_file

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def save_folder(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    format: str,
    *,
    max_shard_size: int,
) -> None:
    """Save a model, or a state dict, in a format of `save_format.SAVE_FORMATS`.

    A model of transformers also gets its config.json, and generation_config.json; a tokenizer has `save_pretrained` of
    its own. Tied weights are saved once. Of several that save to a folder at a time, the last one wins.

    Args:
        folder: is made if it does not exist; its parent must exist.
        max_shard_size: maximum size of a file in bytes, unless one tensor is larger.

    Raises:
        ValueError: a tensor cannot be saved in this format; nothing is written.
        OSError: the files cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_quantized: {folder} is a file; format {format!r} is written to a folder")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"save_quantized: there is no folder {folder.absolute().parent}")
    with temporary_beside(folder.absolute()) as temporary:
        config = _write_configs(model_or_state_dict, temporary)
        made = save_format(format, config)
        _write_tensors(model_or_state_dict, made, temporary, max_shard_size)
        config = {**config, "quantization_config": made.config()}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        with alone_in(folder.absolute().parent):
            _move(temporary, folder)


def _write_configs(model: Any, folder: Path) -> dict[str, Any]:
    """Write what a model of transformers knows about itself; the contents of config.json, of others the dtype only."""
    tensors = model.parameters() if isinstance(model, nn.Module) else model.values()
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    dtype = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "save_pretrained"):
        return dtype
    config.save_pretrained(folder)
    contents: dict[str, Any] = read_json(folder / CONFIG)
    contents.setdefault("architectures", [type(model).__name__])
    if contents["architectures"] is None:
        contents["architectures"] = [type(model).__name__]
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained") and model.can_generate():  # type: ignore[operator]
        generation.save_pretrained(folder)
    return {**contents, **dtype}


def _named_tensors(source: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, first name of the tensor) of what is in the state dict."""
    if isinstance(source, nn.Module):
        check_converted(source, keeps_state=False)
        kept = source.state_dict(keep_vars=True).keys()
        named = {name: tensor for name, (_, _, tensor) in places_of(source) if name in kept}
    else:
        named = dict(source)
    seen: dict[Any, str] = {}
    for name, tensor in named.items():
        if problem := problem_of(tensor):
            raise ValueError(f"save_quantized: {name} is {problem}")
        yield name, tensor, seen.setdefault(identity(tensor), name)


def _write_tensors(source: Any, format: SaveFormat, folder: Path, limit: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: set[str] = set()
    total = 0

    def write() -> None:
        shards.append(list(pending))
        write_file(folder / _shard(len(shards), 0), pending, format.metadata(pending))
        pending.clear()

    for name, tensor, original in _named_tensors(source):
        if name != original:
            format.alias(name, original)
            continue
        for key, value in format.store(name, tensor.detach()).items():
            if key in seen:
                raise ValueError(f"save_quantized: two tensors would be stored as {key}")
            seen.add(key)
            if pending and sum(kept.nbytes for kept in pending.values()) + value.nbytes > limit:
                write()
            pending[key] = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            total += value.nbytes
    write()
    if len(shards) == 1:
        (folder / _shard(1, 0)).rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        (folder / _shard(number, 0)).rename(folder / _shard(number, len(shards)))
        places |= dict.fromkeys(keys, _shard(number, len(shards)))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _move(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    new = {path.name for path in temporary.iterdir()}
    order = sorted(new, key=lambda name: (name == CONFIG, name == INDEX, name))
    for name in order:
        os.replace(temporary / name, folder / name)
    for stale in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX]:
        if stale.name not in new:
            stale.unlink(missing_ok=True)
