"""CodebookSpec: how a tensor is quantized with look-up tables; what `QuantSpec` is to affine quantization."""

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
from .granularity import Block, BlockView, Granularity, PerGroup, PerRow, scale_shape
from .jsonable import jsonable
from .qdtype import QDType, qdtype
from .spec import QuantSpec

_KMEANS_ELEMENTS = 1 << 24
"""Elements that k-means takes at a time: it needs about 40 bytes for each."""

QuantizedScale = tuple[Tensor, Tensor, Tensor]
"""(codes of the scale's shape, their fp32 scale per block, fp32 mean) of a scale that is quantized itself."""


@jsonable
@dataclass(frozen=True)
class CodebookSpec:
    """How one tensor is quantized. Hashable, JSON-able.

    Args:
        dtype: unsigned type of the codes, uint1 to uint8; the table has 2^bits entries.
        granularity: which elements share a scale, and a table of their own unless there is a shared one.
        table: values of the table that all blocks share, ascending; None: k-means for each block.
        iterations: of k-means.
        scale_dtype: dtype of the scales; None is fp32 for rows and tensors, the tensor's own dtype for groups.
        scale_spec: double quantization (QLoRA, arXiv 2305.14314, section 3): how the scales, less their mean, are
            quantized; its groups run over all the scales of a tensor. None keeps them as they are.

    Raises:
        ValueError: the codes are not unsigned integers, or the table does not fit them.
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
        if self.scale_spec is not None and (
            not isinstance(self.scale_spec.granularity, PerGroup) or self.scale_spec.has_zero_point
        ):
            raise ValueError(f"CodebookSpec: scales are quantized in groups, symmetric; got {self.scale_spec}")
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

    def scale_of_scale_shape(self, shape: Sequence[int]) -> Block:
        """Shape of the scale of the scales of a tensor of this shape."""
        count = math.prod(self.scale_shape(shape))
        size = self._scale_spec.granularity.pattern(1)[0]
        return (-(-count // (max(1, count) if size == -1 else size)),)

    def choose_scale(self, input: Tensor) -> Tensor:
        """The largest magnitude of each block; not yet quantized by `scale_spec`."""
        grouped = isinstance(self.granularity, PerGroup)
        scale_dtype = self.scale_dtype or (input.dtype if grouped else torch.float32)
        return choose_scale_codebook(input, self.block_size(input.shape), scale_dtype)

    def choose_table(self, input: Tensor, scale: Tensor, importance: Tensor | None = None) -> Tensor:
        """The shared table, fp32; or that of each block, fp16, whose 11 bits are plenty in units of the scale.

        Args:
            scale: as it will be stored.
            importance: of each element, same shape as `input`, for k-means.
        """
        if self.table is not None:
            if importance is not None:
                raise ValueError(f"importance weights k-means; the table of {self} is fixed")
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

    def quantize(self, input: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        """Codes of `input`, uint8; see `quantize_codebook`."""
        return quantize_codebook(input, self.block_size(input.shape), scale, table)

    def dequantize(
        self, codes: Tensor, scale: Tensor, table: Tensor, output_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Reals of `codes`; see `dequantize_codebook`."""
        return dequantize_codebook(codes, self.block_size(codes.shape), scale, table, output_dtype)

    def quantize_scale(self, scale: Tensor) -> QuantizedScale:
        """Quantize scales with `scale_spec`, less their mean, in groups over all of them; the last may be shorter."""
        spec, flat = self._scale_spec, scale.reshape(-1).float()
        mean = flat.mean() if flat.numel() else flat.new_zeros(())
        padded = _in_groups(flat - mean, spec)
        scale_of_scale, _ = spec.choose_qparams(padded)
        codes = spec.quantize(padded, scale_of_scale, None).reshape(-1)[: flat.numel()]
        return codes.reshape(scale.shape), scale_of_scale.reshape(-1), mean

    def dequantize_scale(self, quantized: QuantizedScale) -> Tensor:
        """Inverse of `quantize_scale`, fp32, positive. Of a block so much smaller than others that its scale rounds to
        zero, as good as nothing is left."""
        codes, scale_of_scale, mean = quantized
        spec = self._scale_spec
        padded = _in_groups(codes.reshape(-1), spec)
        flat = spec.dequantize(padded, scale_of_scale.reshape(-1, 1), None).reshape(-1)[: codes.numel()]
        return (flat.reshape(codes.shape) + mean).clamp(min=torch.finfo(torch.float32).tiny)

    def with_granularity(self, granularity: Granularity) -> CodebookSpec:
        """The same numerics in other blocks."""
        return replace(self, granularity=granularity)

    @property
    def _scale_spec(self) -> QuantSpec:
        if self.scale_spec is None:
            raise ValueError(f"{self}: its scales are not quantized")
        return self.scale_spec

    def __str__(self) -> str:
        table = "k-means" if self.table is None else "NF4" if self.table == NF4_TABLE else "table"
        words = [self.dtype.name, table, repr(self.granularity)]
        if self.scale_spec is not None:
            words.append(f"scale {self.scale_spec.dtype.name} {self.scale_spec.granularity!r}")
        return " ".join(words)


def _in_groups(flat: Tensor, spec: QuantSpec) -> Tensor:
    """(n,) -> (ceil(n / group), group), filled up with zeros, which change no absmax."""
    size = spec.granularity.pattern(1)[0]
    size = max(1, flat.numel()) if size == -1 else size
    # Float8 has no pad; its zero is the zero byte.
    missing = -flat.numel() % size
    return torch.cat([flat, flat.new_zeros(missing)]).reshape(-1, size) if missing else flat.reshape(-1, size)


def _blocks_last(view: BlockView, x: Tensor) -> Tensor:
    """The split view as (blocks in the order of the scale, elements of a block)."""
    outside = [axis for axis in range(x.dim()) if axis not in view.dims]
    count = math.prod(view.scale_shape)
    size = x.numel() // count if count else 0
    return x.permute(*outside, *view.dims).reshape(count, size)
