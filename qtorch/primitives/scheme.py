"""Scheme: the metadata of a quantized tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .jsonable import jsonable
from .spec import LinearSpec, QuantSpec


def constant_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as integers; symbolic sizes of a compiler become constants, since metadata cannot vary within a graph.

    Raises:
        ValueError: a size is not an integer.
    """
    if not all(type(size) is int or isinstance(size, torch.SymInt) for size in shape):
        raise ValueError(f"a shape takes integers, got {shape!r}")
    return tuple(map(int, shape))


@jsonable
@dataclass(frozen=True)
class Scheme:
    """Metadata of a quantized tensor: hashable, JSON-able, no tensors and no callables.

    Kernels are looked up by it, so its hash is computed once.

    Args:
        spec: how the tensor and its activation are quantized, and the layout of the codes.
        shape: logical shape.
        dtype: logical dtype, that of the dequantized tensor.

    Raises:
        ValueError: a size of the shape is not an integer.
    """

    spec: LinearSpec
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", constant_shape(self.shape))
        object.__setattr__(self, "_hash", hash((self.spec, self.shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    # Rebuilt rather than copied: string hashes differ from process to process.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the codes: that of the tensor, unless a subclass stores them as a matrix."""
        return self.shape

    @property
    def weight(self) -> QuantSpec | Any:
        return self.spec.weight

    @property
    def activation(self) -> QuantSpec | None:
        return self.spec.activation

    @property
    def layout(self) -> Any:
        return self.spec.layout
