"""Look-up-table quantization: a code is the index of the nearest value in a table.

    quantize      code = argmin_i |x / scale - table[i]|
    dequantize    x = table[code] * scale

The table is shared by all blocks (NF4) or each block has its own (k-means). Its values ascend, so the nearest entry is
found by comparing with the midpoints; a value at a midpoint goes to the lower entry. Arithmetic is in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .affine import check_floating_point
from .granularity import BlockView
from .non_finite import with_non_finite
from .qparams import min_max
from .slices import in_slices

# fmt: off
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""4-bit NormalFloat (QLoRA, arXiv 2305.14314, appendix E): quantiles of the normal distribution, 8 below and 7 above an
exact zero, scaled to [-1, 1]."""

LLOYD_ITERATIONS = 20

_SEARCHED = 32
"""Number of midpoints from which a search among them is faster than a comparison with each."""


def choose_scale_codebook(input: Tensor, block_size: Sequence[int], scale_dtype: torch.dtype) -> Tensor:
    """The largest magnitude of each block, in the shape of the scale, so that x / scale lies in [-1, 1].

    It is at least the smallest normal number of `scale_dtype`, also for an all-zero block, and NaN for a block with a
    NaN or an infinity.

    Raises:
        TypeError: `input` is not in floating point.
    """
    check_floating_point("choose_scale_codebook", input)
    low, high = min_max(input, block_size)
    info = torch.finfo(scale_dtype)
    highest = torch.maximum(-low, high)
    return with_non_finite(highest.clamp(info.tiny, info.max), highest).to(scale_dtype)


def quantize_codebook(input: Tensor, block_size: Sequence[int], scale: Tensor, table: Tensor) -> Tensor:
    """Codes of `input`, same shape, in uint8; ties go to the lower entry. The code of a NaN is undefined.

    Args:
        input: fp32, fp16 or bf16, any shape.
        block_size: elements that share a scale, one size per axis, -1 for a whole axis.
        scale: one element per block.
        table: (L,), or one per block (*scale.shape, L); ascending, L at most 256.

    Raises:
        TypeError: `input` is not in floating point.
        ValueError: the shape of `table` or `scale` does not fit.
    """
    check_floating_point("quantize_codebook", input)
    view = BlockView(input.shape, block_size)
    _check_table(view, table)
    middles = (table[..., 1:].float() + table[..., :-1].float()) / 2
    middles = middles if table.dim() == 1 else _split_table(view, middles)

    def quantize(x: Tensor, s: Tensor, middles: Tensor) -> Tensor:
        x = x.float() / s.float()
        if middles.dim() == 1 and middles.shape[0] >= _SEARCHED:
            return torch.bucketize(x, middles, out_int32=True).to(torch.uint8)
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for middle in middles.unbind(-1):
            codes += x > middle
        return codes

    x, s = view.split(input), view.split_scale(scale)
    if table.dim() == 1:
        codes = in_slices(lambda x, s: quantize(x, s, middles), x, s, axes=x.dim())
    else:
        codes = in_slices(quantize, x, s, middles, axes=x.dim())
    return view.merge(codes)


def dequantize_codebook(
    codes: Tensor, block_size: Sequence[int], scale: Tensor, table: Tensor, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Reals of `codes`, same shape, in `output_dtype`; arguments as in `quantize_codebook`."""
    view = BlockView(codes.shape, block_size)
    _check_table(view, table)
    flat = table.reshape(-1).float()
    starts = None
    if table.dim() > 1:
        # The tables of all blocks are one flat table, in which each begins at a multiple of L.
        starts = torch.arange(0, table.numel(), table.shape[-1], device=codes.device, dtype=torch.int32)
        starts = view.split_scale(starts)

    def dequantize(index: Tensor, s: Tensor, starts: Tensor | None) -> Tensor:
        index = index.int() if starts is None else index.int() + starts
        values = flat.index_select(0, index.reshape(-1)).reshape(index.shape)
        return values.mul_(s.float()).to(output_dtype)

    index = view.split(codes)
    return view.merge(in_slices(dequantize, index, view.split_scale(scale), starts, axes=index.dim()))


def kmeans_codebook(
    input: Tensor, bits: int, importance: Tensor | None = None, iterations: int = LLOYD_ITERATIONS
) -> Tensor:
    """Fit a table of 2^bits values to each row by Lloyd's algorithm, for the least (weighted) squared error.

    The algorithm starts from quantiles, is deterministic, and never increases the error. An entry with an empty cluster
    moves to an end of the cluster with the largest error, so that a row of few distinct values is represented exactly.
    In one dimension a cluster is an interval of the sorted values, so an iteration is a binary search for its ends and
    a difference of running sums.

    Args:
        input: (..., n): one table for each of the leading indices.
        bits: 1 to 8.
        importance: weight of each element, same shape, not negative; all equal by default.
        iterations: 0 gives the quantiles.

    Returns:
        (..., 2^bits), fp32, ascending; zeros where n is 0.

    Raises:
        TypeError: `input` is not in floating point.
        ValueError: `bits` out of range, or `importance` of another shape.
    """
    check_floating_point("kmeans_codebook", input)
    if not 1 <= bits <= 8:
        raise ValueError(f"kmeans_codebook takes 1 to 8 bits, got {bits}")
    if importance is not None and importance.shape != input.shape:
        raise ValueError(f"importance has shape {tuple(importance.shape)}, the input {tuple(input.shape)}")
    size = 2**bits
    if input.numel() == 0:
        return torch.zeros(*input.shape[:-1], size, dtype=torch.float32, device=input.device)
    # Running sums in fp32 would lose the small clusters of a long row.
    x, order = input.sort(-1)
    x = x.double()
    w = torch.ones_like(x) if importance is None else importance.double().gather(-1, order)
    sums = [torch.nn.functional.pad(t.cumsum(-1), (1, 0)) for t in (w, w * x, w * x * x)]
    table = _quantiles(x, w, size)
    for _ in range(iterations):
        middles = (table[..., 1:] + table[..., :-1]) / 2
        # Ties go to the lower entry: a value equal to the midpoint belongs to the cluster below it.
        ends = torch.searchsorted(x, middles, right=True)
        ends = torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=x.shape[-1])
        mass, total, squares = (t.gather(-1, ends).diff(dim=-1) for t in sums)
        lowest = x.gather(-1, ends[..., :-1].clamp(max=x.shape[-1] - 1))
        highest = x.gather(-1, (ends[..., 1:] - 1).clamp(min=0))
        # Differences of running sums are inexact for clusters of small weight.
        mean = (total / mass).clamp(lowest, highest)
        table = torch.where(mass > 0, mean, table)
        error = torch.where(mass > 0, squares - total * mean, 0.0)
        worst = error.argmax(-1, keepdim=True)
        low, center, high = (t.gather(-1, worst) for t in (lowest, table, highest))
        unused = (mass == 0).to(torch.uint8).argmax(-1, keepdim=True)
        better = (mass.gather(-1, unused) == 0) & (error.gather(-1, worst) > 0)
        moved = torch.where(high - center > center - low, high, low)
        table = table.scatter(-1, unused, torch.where(better, moved, table.gather(-1, unused))).sort(-1).values
    # A mean of equal numbers may be rounded up or down, which could break the order.
    return table.float().cummax(-1).values


def _quantiles(x: Tensor, w: Tensor, size: int) -> Tensor:
    """Quantiles (i + 1/2) / size of sorted values, with respect to their density raised to the power 1/3.

    That is the density of the optimal table of many values (Panter and Dite, 1951); plain quantiles would leave the
    tails to one entry. With gaps d between neighbours the density is w / d, and the mass of a gap is
    d (w / d)^(1/3) = w^(1/3) d^(2/3), half of it at either end.
    """
    gaps = x.diff(dim=-1) ** (2 / 3)
    before, after = (torch.nn.functional.pad(gaps, pad) for pad in ((1, 0), (0, 1)))
    mass = (w ** (1 / 3) * (before + after)).cumsum(-1)
    steps = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) / size
    positions = torch.searchsorted(mass, mass[..., -1:] * steps)
    return x.gather(-1, positions.clamp(max=x.shape[-1] - 1))


def _split_table(view: BlockView, table: Tensor) -> Tensor:
    """Tables (*scale.shape, L) in the split view, which has L as one more axis."""
    return torch.stack([view.split_scale(entry) for entry in table.unbind(-1)], -1)


def _check_table(view: BlockView, table: Tensor) -> None:
    if table.dim() != 1 and tuple(table.shape[:-1]) != view.scale_shape:
        raise ValueError(
            f"the table of a tensor of shape {view.shape} in blocks of {view.block} is 1-d, or of shape "
            f"{(*view.scale_shape, 'L')}, got {tuple(table.shape)}"
        )
