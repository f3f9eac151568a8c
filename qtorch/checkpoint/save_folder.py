"""Saving a model as a folder in a format of another package: config.json and safetensors files, in one step.

    config.json, generation_config.json     of a model of transformers; `quantization_config` by the format
    model.safetensors                       or model-00001-of-0000N.safetensors and model.safetensors.index.json

All files are written to a temporary folder beside the target. A new folder gets its name in one step; files of a folder
that exists are replaced one by one, config.json last.
"""

import glob
import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor, serialize
from ..model.install import PreparedModule
from ..primitives.files import read_json
from ..primitives.tracing import plain_name
from . import header, hf_folder, sources
from .tensor_file import NAMES, places_of, write_tensors

SAVE_FORMATS: "dict[str, type[SaveFormat]]" = {}
"""Every registered format by its name."""

C = TypeVar("C", bound="type[SaveFormat]")


class SaveFormat(ABC):
    """One checkpoint that is being written in a format of another package.

    A format is added by one file: a subclass with `@register_save_format`. Then ``save_quantized(model, folder,
    format=name)`` writes it, and so does `quantize_checkpoint`, which never has the whole model in memory.

    The caller passes every parameter and buffer to `store` once, in any order, and further names of it to `alias`,
    writes what `store` returns to safetensors files, and at the end puts `config()` into config.json as
    `quantization_config`.

    Args:
        config: contents of the config.json of the model; empty for a model without. A format may take further options.

    Attributes:
        name: what `save_quantized(format=...)` takes.
        suffix: of the file that `write` makes, in place of a folder; empty for folders.
    """

    name: ClassVar[str]
    suffix: ClassVar[str] = ""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.model_config: Mapping[str, Any] = config or {}

    @classmethod
    def prepare(cls, source: sources.Source, config: Mapping[str, Any]) -> sources.Source:
        """`source`, with the names that `store` takes."""
        return source

    @abstractmethod
    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The plain tensors, by stored name, that stand for the parameter or buffer `name`.

        What the format cannot hold is a `ValueError`, which names it and says what to write instead.
        """

    def alias(self, name: str, original: str) -> None:  # noqa: B027 (optional)
        """Take note that `name`, which is not stored, is another name of the tensor that was stored as `original`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The `quantization_config` for config.json, from everything that was stored."""

    def metadata(self, keys: Iterable[str]) -> dict[str, str]:
        """Metadata of a file with the stored tensors `keys`; by default none."""
        return {}

    def write(self, parts: Sequence[Path], path: Path, folder: Path) -> None:
        """Write the file of a format with a `suffix`, from the safetensors files with all that was stored; `folder` is
        that of the model, or of config.json and the tokenizer."""
        raise NotImplementedError

    @abstractmethod
    def progress(self) -> Any:
        """JSON data of what was stored so far, for `resume`."""

    @abstractmethod
    def resume(self, progress: Any) -> None:
        """Continue a checkpoint that another object of this class has begun, from its `progress`; what is not of this
        format is a `ValueError`. The next tensor that `store` gets may be one that it had got already."""


def register_save_format(cls: C) -> C:
    """Class decorator: register a format under its name."""
    if SAVE_FORMATS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"register_save_format: the name {cls.name!r} is taken by {SAVE_FORMATS[cls.name]!r}")
    return cls


def save_format(
    name: str, config: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
) -> SaveFormat:
    """A new checkpoint in the format `name`, for a model with this config.json, with the options of the format."""
    if name not in SAVE_FORMATS:
        known = ", ".join(repr(known) for known in ["qtorch", *sorted(SAVE_FORMATS)])
        raise ValueError(f"format {name!r} is not known; known are {known}")
    return SAVE_FORMATS[name](config, **(options or {}))


def check_destination(function: str, format: str, path: Path) -> str:
    """The suffix of the file that `format` makes, empty for folders; an error if `path` is not of that kind."""
    suffix = SAVE_FORMATS[format].suffix if format in SAVE_FORMATS else ""
    if suffix and (path.suffix != suffix or path.is_dir()):
        raise ValueError(f"{function}: the format {format!r} is a file, such as {path.name}{suffix}, got {path}")
    if not suffix and (path.suffix in (".gguf", ".safetensors") or path.exists()) and not path.is_dir():
        raise NotADirectoryError(f"{function}: {path} is a file; format {format!r} is written to a folder")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{function}: there is no folder {path.absolute().parent}")
    return suffix


# What every format asks of the tensors that it saves, and the writing of a file.


def _problem_of(value: Any) -> str | None:
    """Why a value cannot be saved, or None."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if nn.parameter.is_lazy(value):
        return "not initialized yet; run the model once"
    if value.is_meta:
        return "on the meta device"
    if isinstance(value, QuantizedTensor):
        known = value.dtype in serialize.LOGICAL_DTYPES
        return None if known else f"a {type(value).__name__} of {value.dtype}, and files are of floats; torch.save it"
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(value).__name__}, which has no canonical form"
    if value.layout is not torch.strided or value.dtype not in NAMES:
        return f"a {value.layout} tensor of {value.dtype}, which safetensors cannot hold"
    return None


def check_converted(model: nn.Module, keeps_state: bool) -> None:
    """Raise `ValueError` where a layer is in training; where the file `keeps_state`, unless training has given it
    tensors of its own: the file has these, and fits no other layer."""
    for name, module in model.named_modules():
        if not isinstance(module, PreparedModule) or (keeps_state and module.state_dict().keys() - {"weight", "bias"}):
            continue
        raise ValueError(
            f"save_quantized: {name or 'the model'} is a {type(module).__name__}, a layer in training that is not "
            "converted yet, and the file would hold a float one: quantize_(model, convert()), or torch.save its "
            "state_dict()"
        )


def _identity(tensor: Tensor) -> Any:
    """A key that is equal for tensors that share their data and have the same form."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.scheme, *[_identity(inner) for inner in tensor.inner_tensors.values()]
    if tensor.numel() == 0:
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), *bits


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A folder ``.<name>.<8 hexadecimal digits>.tmp`` beside `path`; those of processes that died are removed."""
    with alone_in(path.parent):
        for stale in path.parent.glob(f".{glob.escape(path.name)}.{header.TOKEN}.tmp"):
            if (held := _hold(stale)) is not None:
                shutil.rmtree(stale, ignore_errors=True)
                os.close(held)
        folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        folder.mkdir()
        held = _hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While no other saver, of this or another process, is in such a block for the same folder, if it can be locked."""
    held = _hold(folder, wait=True)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _hold(folder: Path, wait: bool = False) -> int | None:
    """The locked folder, open; None if it is locked by another, or cannot be."""
    try:
        import fcntl

        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if wait else os.O_NOFOLLOW))
    except (ImportError, OSError):  # Windows
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file and flush it to disk."""
    try:
        write_tensors(path, tensors, {"format": "pt", **metadata})
    except OSError as error:
        raise type(error)(error.errno, f"save_quantized: cannot write {path}: {error.strerror}") from error


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def save_folder(
    model_or_state_dict: nn.Module | Mapping[str, Tensor], folder: str | os.PathLike[str], format: str, *,
    max_shard_size: int, options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Save a model, or a state dict, in a format of `SAVE_FORMATS`: `save_quantized` for folders, and for the files of
    other packages."""
    folder = Path(folder)
    suffix = check_destination("save_quantized", format, folder)
    with temporary_beside(folder.absolute()) as temporary:
        config = _write_configs(model_or_state_dict, temporary)
        made = save_format(format, config, options)
        _write_tensors(model_or_state_dict, made, temporary, max_shard_size)
        if suffix:
            made.write(sorted(temporary.glob("model*.safetensors")), temporary / folder.name, temporary)
            os.replace(temporary / folder.name, folder)
            return
        write_json(temporary / hf_folder.CONFIG, {**config, "quantization_config": made.config()})
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
    contents: dict[str, Any] = read_json(folder / hf_folder.CONFIG)
    contents.setdefault("architectures", [type(model).__name__])
    if contents["architectures"] is None:
        contents["architectures"] = [type(model).__name__]
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained") and model.can_generate():  # type: ignore[operator]
        generation.save_pretrained(folder)
    return {**contents, **dtype}


def with_first_names(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, first name of the tensor), of tensors that can be saved."""
    seen: dict[Any, str] = {}
    for name, tensor in named.items():
        if problem := _problem_of(tensor):
            raise ValueError(f"save_quantized: {name} is {problem}")
        yield name, tensor, seen.setdefault(_identity(tensor), name)


def _write_tensors(source: Any, format: SaveFormat, folder: Path, limit: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: set[str] = set()
    total = 0

    def write() -> None:
        write_file(folder / f"{len(shards)}.unnamed", pending, format.metadata(pending))
        shards.append(list(pending))
        pending.clear()

    named = {} if isinstance(source, nn.Module) else {plain_name(name): tensor for name, tensor in source.items()}
    if isinstance(source, nn.Module):
        check_converted(source, keeps_state=False)
        kept = set(map(plain_name, source.state_dict(keep_vars=True)))
        named = {name: tensor for name, (_, _, tensor) in places_of(source) if name in kept}
    for name, tensor, original in with_first_names(named):
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
    names = file_names(len(shards))
    for number, name in enumerate(names):
        (folder / f"{number}.unnamed").rename(folder / name)
    if len(shards) > 1:
        write_index(folder, dict(zip(names, shards, strict=True)), total)


def file_names(count: int) -> list[str]:
    """Names of the files with the weights."""
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total: int) -> None:
    """Write the index of files with these tensors, of `total` bytes."""
    places = {key: name for name, keys in files.items() for key in keys}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, data: Any) -> None:
    """Write a file and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _move(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    new = {path.name for path in temporary.iterdir()}
    for name in sorted(new, key=lambda name: (name == hf_folder.CONFIG, name == INDEX, name)):
        os.replace(temporary / name, folder / name)
    for stale in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX]:
        if stale.name not in new:
            stale.unlink(missing_ok=True)
