"""What every format asks of the tensors that it saves, and the writing of a file."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..dtypes.serialize import LOGICAL_DTYPES
from ..prepared_module import PreparedModule
from .tensor_file import NAMES, write_tensors

TOKEN = "[0-9a-f]" * 8
"""A pattern of the part of a name that is chosen at random."""


def problem_of(value: Any) -> str | None:
    """Why a value cannot be saved, or None."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if nn.parameter.is_lazy(value):
        return "not initialized yet; run the model once"
    if value.is_meta:
        return "on the meta device"
    if isinstance(value, QuantizedTensor):
        known = value.dtype in LOGICAL_DTYPES
        return None if known else f"a {type(value).__name__} of {value.dtype}, and files are of floats; torch.save it"
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(value).__name__}, which has no canonical form"
    if value.layout is not torch.strided or value.dtype not in NAMES:
        return f"a {value.layout} tensor of {value.dtype}, which safetensors cannot hold"
    return None


def check_converted(model: nn.Module, keeps_state: bool) -> None:
    """Raise `ValueError` where a layer is in training.

    Args:
        keeps_state: unless training has given it tensors of its own: the file has these, and fits no other layer.
    """
    for name, module in model.named_modules():
        if not isinstance(module, PreparedModule) or (keeps_state and module.state_dict().keys() - {"weight", "bias"}):
            continue
        raise ValueError(
            f"save_quantized: {name or 'the model'} is a {type(module).__name__}, a layer in training that is not "
            "converted yet, and the file would hold a float one: quantize_(model, convert()), or torch.save its "
            "state_dict()"
        )


def identity(tensor: Tensor) -> Any:
    """A key that is equal for tensors that share their data and have the same form."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.scheme, *[identity(inner) for inner in tensor.inner_tensors.values()]
    if tensor.numel() == 0:
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), *bits


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A folder ``.<name>.<8 hexadecimal digits>.tmp`` beside `path`; those of processes that died are removed."""
    with alone_in(path.parent):
        for stale in path.parent.glob(f".{glob.escape(path.name)}.{TOKEN}.tmp"):
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
