"""The format of checkpoints: keys of the header, slots of a model, and checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from torch import Tensor, nn

from .tensor_file import data_of

HEADER = "qtorch"
"""Metadata key of the header, JSON text."""

HEADER_CHECKSUM = "qtorch.crc32"

OWN_FORMAT = "qtorch"
"""The name of this format."""

Place = tuple[nn.Module, str, Tensor]
"""A place that holds a parameter or buffer: (module, attribute, tensor)."""


def places_of(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every place that holds a parameter or buffer: (full name, (module, attribute, tensor))."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, (module, attribute, tensor)


def checksum(tensor: Tensor) -> int:
    """crc32 of the data, the dtype and the shape of a tensor."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(data_of(tensor.contiguous()), kind)


def text_checksum(text: str) -> str:
    """crc32 of the header, as text, since safetensors metadata are strings."""
    return str(zlib.crc32(text.encode(errors="surrogatepass")))
