"""Blocks of other packages as ours, and the schemes of what is read.

Elsewhere the last block of an axis may be shorter than the others, and blocks may run over the ends of rows. Here
blocks divide an axis. So blocks are cut into equal parts that do, and each part gets a copy of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.hf_folder import HFFolder
from ..layouts import LAYOUTS, Layout, PackedLayout
from ..layouts.packed import can_pack_bits
from ..primitives.affine import MappingType, ZeroPointDomain
from ..primitives.codebook_spec import CodebookSpec
from ..primitives.granularity import Granularity, PerGroup, PerRow
from ..primitives.qdtype import QDType, qdtype
from ..primitives.scheme import Scheme
from ..primitives.spec import LinearSpec, QuantSpec

SMALLEST_PART = 8
"""With smaller parts, scales would take more memory than floats do."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Cut(NamedTuple):
    """How blocks of `block` elements along an axis of `size` are cut into parts of `part`, which divide both."""

    size: int
    block: int
    part: int

    @classmethod
    def of(cls, size: int, block: int, *, flattened: bool = False, smallest: int = SMALLEST_PART) -> Cut:
        """The largest parts that divide the block and the axis.

        Args:
            flattened: blocks run over the flattened tensor, so that one may hold elements of several rows.

        Raises:
            ValueError: the parts are smaller than `smallest`, and than the axis.
        """
        part = math.gcd(size, block) if flattened or block < size else size
        if part < min(smallest, size):
            raise ValueError(
                f"groups of {block} in rows of {size} end inside rows; equal groups would have {part} elements, and "
                "their scales more bytes than the weight has in 16 bits: dequantize this weight, and quantize it anew"
            )
        return cls(size, block, part)

    def copies(self, scale: Tensor, axis: int) -> Tensor:
        """One element for each part, along `axis`, of a scale with one for each block."""
        if self.part == self.block or scale.shape[axis] == 1:
            return scale
        return scale.repeat_interleave(self.block // self.part, axis).narrow(axis, 0, self.size // self.part)

    @property
    def granularity(self) -> Granularity:
        """For the last axis, in blocks of one row."""
        return PerRow() if self.part == self.size else PerGroup(self.part)


def integer_spec(bits: int, granularity: Granularity, scale_dtype: torch.dtype) -> QuantSpec:
    """Unsigned codes with zero points that are codes: w = (q - z) * s."""
    return QuantSpec(qdtype(f"uint{bits}"), granularity, MappingType.ASYMMETRIC, scale_dtype=scale_dtype)


def symmetric_spec(dtype: QDType | torch.dtype | str, granularity: Granularity, scale_dtype: torch.dtype) -> QuantSpec:
    """Codes without zero points: w = q * s."""
    none = ZeroPointDomain.NONE
    return QuantSpec(qdtype(dtype), granularity, zero_point_domain=none, scale_dtype=scale_dtype)


def layout_of(dtype: QDType) -> Layout:
    """The layout of what is read: packed if that is smaller."""
    return PackedLayout() if can_pack_bits(dtype) else LAYOUTS["plain"]()


def weight_only(spec: QuantSpec | CodebookSpec, shape: Sequence[int], dtype: torch.dtype) -> Scheme:
    """The scheme of a weight whose activations stay in floating point."""
    return Scheme(LinearSpec(spec, layout=layout_of(spec.dtype)), tuple(shape), dtype)


def check_stored(folder: HFFolder, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> None:
    """Check a stored tensor by its header.

    Args:
        dtypes: allowed ones.
        shape: None allows any size.

    Raises:
        ValueError: the tensor is missing, or differs; the message names the file and the tensor.
    """
    stored = folder.stored.get(name)
    if stored is None:
        raise ValueError(f"{folder.path}: {name} is missing")
    fits = len(stored.shape) == len(shape) and all(w in (None, n) for n, w in zip(stored.shape, shape, strict=True))
    if not fits or stored.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{folder.file_of(name)}: {name} has shape {stored.shape} and dtype "
            f"{str(stored.dtype).removeprefix('torch.')}, its format says ({sizes}) and {wanted}"
        )


def with_suffix(folder: HFFolder, suffix: str) -> list[str]:
    """What stands before `suffix` in the names of stored tensors, sorted."""
    return sorted(name.removesuffix(suffix) for name in folder.stored if name.endswith(suffix))


def group_sizes(config: Mapping[str, Any]) -> list[int]:
    """The group sizes that a quantization_config names, for the model or for single layers."""
    parts: list[Any] = [config]
    for key in ("dynamic", "extra_config"):
        of_layers = config.get(key)
        parts += list(of_layers.values()) if isinstance(of_layers, dict) else []
    sizes = [part.get(key) for part in parts if isinstance(part, dict) for key in ("group_size", "q_group_size")]
    return [size for size in sizes if type(size) is int and (size > 0 or size == -1)]


def block_of_groups(length: int, count: int, sizes: Sequence[int]) -> int:
    """The number of elements of a group, in rows of `length` that have `count` groups.

    Args:
        sizes: those that the configuration names; the last group of a row may be shorter.

    Raises:
        ValueError: no size gives this number of groups, or several do.
    """
    if count == 1:
        return length
    if not sizes and length % count == 0:
        return length // count
    fitting = {size for size in sizes if size > 0 and -(-length // size) == count}
    if len(fitting) != 1:
        named = ", ".join(map(str, sizes)) or "none"
        raise ValueError(f"rows of {length} have {count} groups; the group_size of the configuration is {named}")
    return fitting.pop()
