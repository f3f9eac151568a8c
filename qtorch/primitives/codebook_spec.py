"""CodebookSpec: how a tensor is quantized with look-up tables, the counterpart of `QuantSpec`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .codebook import (
    LLOYD_ITERATIONS,
    NF4_TABLE,
    choose_scale_codebook,
    dequantize_codebook,
    kmeans_codebook,
    quantize_codebook,
)
from .double_quant import check_scale_spec, dequantize_scale, quantize_scale
from .granularity import Block, BlockView, Granularity, PerGroup, PerRow, scale_shape
from .jsonable import jsonable
from .qdtype import QDType, qdtype
from .spec import QuantSpec

_KMEANS_ELEMENTS = 1 << 24
"""Number of elements that k-means processes at a time; it needs about 40 bytes for each."""


@jsonable
@dataclass(frozen=True)
class CodebookSpec:
    """How one tensor is quantized with look-up tables. Hashable, JSON-able.

    Args:
        dtype: unsigned type of the codes, uint1 to uint8; the table has 2^bits entries.
        granularity: which elements share a scale, and a table unless all share one.
        table: ascending values of the table that all blocks share, or None for k-means in each block.
        iterations: of k-means.
        scale_dtype: dtype of the scales; None is fp32 for rows and tensors, the dtype of the tensor for groups.
        scale_spec: how the scales are quantized (see `double_quant`); None leaves them in floating point.

    Raises:
        ValueError: the codes are not unsigned integers, the table does not fit them, or `scale_spec` is not allowed.
    """

    dtype: QDType
    granularity: Granularity = PerRow()
    table: tuple[float, ...] | None = None
    iterations: int = LLOYD_ITERATIONS
    scale_dtype: torch.dtype | None = None
    scale_spec: QuantSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", qdtype(self.dtype))
        if self.dtype.storage != torch.uint8 or self.dtype.is_floating_point:
            raise ValueError(f"CodebookSpec: codes are uint1 to uint8, got {self.dtype}")
        check_scale_spec(self.scale_spec)
        if self.table is None:
            return
        object.__setattr__(self, "table", tuple(float(value) for value in self.table))
        if len(self.table) != 2**self.dtype.bits:
            raise ValueError(f"CodebookSpec: {self.dtype} has {2**self.dtype.bits} codes, got {len(self.table)} values")
        if any(not low < high for low, high in zip(self.table, self.table[1:], strict=False)):
            raise ValueError(f"CodebookSpec: the table must ascend, got {self.table}")

    @property
    def has_zero_point(self) -> bool:
        return False

    def block_size(self, shape: Sequence[int]) -> Block:
        """As `QuantSpec.block_size`."""
        return self.granularity.block(shape)

    def scale_shape(self, shape: Sequence[int]) -> Block:
        """As `QuantSpec.scale_shape`."""
        return scale_shape(shape, self.block_size(shape))

    def choose_scale(self, input: Tensor) -> Tensor:
        """The largest magnitude of each block; not yet quantized by `scale_spec`."""
        grouped = isinstance(self.granularity, PerGroup)
        scale_dtype = self.scale_dtype or (input.dtype if grouped else torch.float32)
        return choose_scale_codebook(input, self.block_size(input.shape), scale_dtype)

    def choose_table(self, input: Tensor, scale: Tensor, importance: Tensor | None = None) -> Tensor:
        """The shared table, fp32, or a table per block, fp16: its values are at most 1, so 11 bits are precise enough.

        Args:
            scale: the scale as it will be stored.
            importance: weight of each element in k-means, same shape as `input`.
        """
        if self.table is not None:
            if importance is not None:
                raise ValueError(f"importance is for k-means, the table of {self} is fixed; leave it out")
            return torch.tensor(self.table, dtype=torch.float32, device=input.device)
        view = BlockView(input.shape, self.block_size(input.shape))
        x = _blocks_last(view, view.split(input).float() / view.split_scale(scale).float())
        weights = None if importance is None else _blocks_last(view, view.split(importance.float()))
        table = x.new_zeros(x.shape[0], 2**self.dtype.bits, dtype=torch.float16)
        rows = max(1, _KMEANS_ELEMENTS // max(1, x.shape[1]))
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            of_part = None if weights is None else weights[part]
            table[part] = kmeans_codebook(x[part], self.dtype.bits, of_part, self.iterations)
        return table.reshape(*view.scale_shape, table.shape[1])

    def choose_qparams(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Scale, after quantization by `scale_spec`, and table: the arguments of `quantize`."""
        scale = dequantize_scale(quantize_scale(self.choose_scale(input), self.scale_spec), self.scale_spec)
        return scale, self.choose_table(input, scale)

    def quantize(self, input: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        """Codes of `input`, uint8; see `quantize_codebook`."""
        return quantize_codebook(input, self.block_size(input.shape), scale, table)

    def dequantize(
        self, codes: Tensor, scale: Tensor, table: Tensor, output_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Reals of `codes`; see `dequantize_codebook`."""
        return dequantize_codebook(codes, self.block_size(codes.shape), scale, table, output_dtype)

    def with_granularity(self, granularity: Granularity) -> CodebookSpec:
        """The same spec with another granularity."""
        return replace(self, granularity=granularity)

    def __str__(self) -> str:
        table = "k-means" if self.table is None else "NF4" if self.table == NF4_TABLE else "table"
        words = [self.dtype.name, table, repr(self.granularity)]
        if self.scale_spec is not None:
            words.append(f"scale {self.scale_spec.dtype.name} {self.scale_spec.granularity!r}")
        return " ".join(words)


def _blocks_last(view: BlockView, x: Tensor) -> Tensor:
    """The split view as (blocks in the order of the scale, elements of a block)."""
    outside = [axis for axis in range(x.dim()) if axis not in view.dims]
    count = math.prod(view.scale_shape)
    size = x.numel() // count if count else 0
    return x.permute(*outside, *view.dims).reshape(count, size)
