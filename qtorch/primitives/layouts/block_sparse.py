"""BlockSparseLayout: a matrix of square blocks most of which are zero; the others are stored.

Each row of blocks keeps the same number of them, so all rows take the same time, and what is kept is a dense matrix:

    qdata     (N, K') codes of the kept blocks side by side, K' = kept * block_size; fewer than 8 bits are packed
    scale     that of (N, K')
    columns   (N / block_size, kept) int32: the column of blocks of each, in ascending order

Blocks that are dropped read back as zero codes with the smallest scale. If fewer than `kept` are not zero, the first
zero blocks are stored too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..granularity import IndivisibleError
from ..pruning import kept_blocks
from ..spec import QuantSpec, Scheme
from .base import Form, Forms, Layout, Plain, register_layout, scale_forms
from .packed import can_pack_bits, pack_codes, packed_length, unpack_codes


@register_layout
class BlockSparseLayout(Layout):
    """The blocks of a matrix that are not zero, as many in each row of blocks.

    Args:
        block_size: rows and columns of a block.
        sparsity: share of the blocks of each row of blocks that is dropped, in [0, 1); see `kept_blocks`.

    Raises:
        ValueError: `block_size` is not positive, or `sparsity` not in [0, 1).
    """

    name = "block_sparse"
    tensors = ("qdata", "scale", "zero_point", "columns")
    any_codes = False

    block_size: int = 32
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size < 1 or not 0 <= self.sparsity < 1:
            raise ValueError(f"BlockSparseLayout takes a positive block_size and a sparsity in [0, 1), got {self}")

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.has_zero_point:
            raise ValueError(f"BlockSparseLayout takes weights without zero point, whose zeros are zero, got {weight}")
        if weight.scale_spec is not None:
            raise ValueError(f"BlockSparseLayout takes scales that are not quantized themselves, got {weight}")
        if weight.dtype.storage.itemsize != 1:
            raise ValueError(f"BlockSparseLayout takes codes of a byte, the weight has {weight.dtype}")

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        size, shape = self.block_size, scheme.shape
        if len(shape) != 2 or not all(shape) or shape[0] % size or shape[1] % size:
            raise IndivisibleError(
                f"BlockSparseLayout: blocks of {size} x {size} do not divide a weight of shape {tuple(shape)}; take "
                "another block_size"
            )
        rows, columns = scheme.weight.block_size(shape)
        whole = columns == shape[1] and rows in (1, shape[0])
        if not whole and (rows != 1 or size % columns):
            raise ValueError(
                f"BlockSparseLayout: takes scales per row, per tensor, or per group of a divisor of {size} columns, "
                f"the weight has {scheme.weight.granularity}"
            )

    def kept(self, scheme: Scheme) -> int:
        """Blocks in each row of blocks."""
        return kept_blocks(scheme.shape[1] // self.block_size, self.sparsity)

    def stored_shape(self, scheme: Scheme) -> tuple[int, int]:
        """(N, K'), the shape of the matrix that is stored."""
        return scheme.shape[0], self.kept(scheme) * self.block_size

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        n, k = self.stored_shape(scheme)
        kind = scheme.weight.dtype
        if can_pack_bits(kind):
            return (Form((n, packed_length(k, kind.bits)), {torch.uint8}),)
        return (Form((n, k), {kind.storage}),)

    def forms(self, scheme: Scheme) -> Forms:
        columns = Form((scheme.shape[0] // self.block_size, self.kept(scheme)), {torch.int32})
        stored = scale_forms(scheme.weight, self.stored_shape(scheme))
        return {"qdata": self.codes_forms(scheme), **stored, "columns": (columns,)}

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, _ = plain
        columns = self._columns(codes, scheme)
        stored = gather_blocks(codes, columns, self.block_size)
        kind = scheme.weight.dtype
        return {
            "qdata": pack_codes(stored, kind) if can_pack_bits(kind) else stored,
            "scale": gather_blocks(scale, columns, groups) if (groups := self._groups(scheme)) else scale,
            "columns": columns,
        }

    def unpack(self, tensors: Mapping[str, Any], scheme: Scheme) -> Plain:
        qdata, scale, columns = (tensors[name] for name in ("qdata", "scale", "columns"))
        kind, size = scheme.weight.dtype, self.block_size
        stored = unpack_codes(qdata, kind, columns.shape[1] * size) if can_pack_bits(kind) else qdata
        codes = scatter_blocks(stored.view(torch.uint8), columns, size, scheme.shape[1], 0).view(kind.storage)
        if groups := self._groups(scheme):
            smallest = torch.finfo(scale.dtype).tiny
            scale = scatter_blocks(scale, columns, groups, groups * scheme.shape[1] // size, smallest)
        return codes, scale, None

    def _groups(self, scheme: Scheme) -> int:
        """Scales along the row of a block; 0 where blocks share them."""
        columns = scheme.weight.block_size(scheme.shape)[1]
        return 0 if columns == scheme.shape[1] else self.block_size // columns

    def _columns(self, codes: Tensor, scheme: Scheme) -> Tensor:
        """The columns of the blocks to keep, (rows of blocks, kept) int32; `ValueError` if more are not zero."""
        kept = self.kept(scheme)
        used = (codes.view(torch.uint8) != 0).unflatten(1, (-1, self.block_size))
        used = used.unflatten(0, (-1, self.block_size)).any(3).any(1)
        if not codes.is_meta and (most := int(used.sum(1).max())) > kept:
            raise ValueError(
                f"BlockSparseLayout(sparsity={self.sparsity}) keeps {kept} of {used.shape[1]} blocks in each row of "
                f"blocks, a row has {most} that are not zero; prune the weight with prune_blocks"
            )
        first = used.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :kept]
        return first.sort(dim=1).values.to(torch.int32)


def gather_blocks(matrix: Tensor, columns: Tensor, width: int) -> Tensor:
    """(N, C) -> (N, kept * width): of each row of blocks those in `columns`, blocks being `width` wide in `matrix`."""
    blocks = matrix.unflatten(0, (columns.shape[0], -1)).unflatten(2, (-1, width))
    index = columns.long()[:, None, :, None].expand(-1, blocks.shape[1], -1, width)
    found = blocks.view(torch.uint8) if matrix.itemsize == 1 else blocks
    return found.gather(2, index).view(matrix.dtype).flatten(2).flatten(0, 1)


def scatter_blocks(stored: Tensor, columns: Tensor, width: int, length: int, fill: float) -> Tensor:
    """Inverse of `gather_blocks`: (N, kept * width) -> (N, length), `fill` elsewhere."""
    blocks = stored.unflatten(0, (columns.shape[0], -1)).unflatten(2, (-1, width))
    index = columns.long()[:, None, :, None].expand(-1, blocks.shape[1], -1, width)
    result = torch.full((*blocks.shape[:2], length // width, width), fill, dtype=stored.dtype, device=stored.device)
    if stored.itemsize == 1:  # the small floats have no `scatter`
        result, blocks = result.view(torch.uint8), blocks.view(torch.uint8)
    return result.scatter_(2, index, blocks).view(stored.dtype).flatten(2).flatten(0, 1)
