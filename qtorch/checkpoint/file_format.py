"""The format of the files: what the header of the root is called, its version, and checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

FORMAT_VERSION = 1

HEADER = "qtorch"
"""Metadata key of the header, JSON text."""

HEADER_CHECKSUM = "qtorch.crc32"

Slot = tuple[nn.Module, str, Tensor]
"""A place that holds a parameter or buffer: (module, attribute, tensor)."""


def slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Every place that holds a parameter or buffer: (full name, (module, attribute, tensor))."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, (module, attribute, tensor)


def is_of_torch_save(path: Path) -> bool:
    """Whether a file is one of `torch.save`: a zip archive, or the pickle of old versions."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or start[:1] == b"\x80"


def checksum(tensor: Tensor) -> int:
    """Of the data, the dtype and the shape."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, kind)


def text_checksum(text: str) -> str:
    """Of the header, as safetensors keeps metadata: in text."""
    return str(zlib.crc32(text.encode()))
