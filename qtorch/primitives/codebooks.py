"""Look-up-table quantization: a code is the index of the nearest value in a table.

    quantize      code = argmin_i |x / scale - table[i]|
    dequantize    x = table[code] * scale

The table is shared by all blocks (NF4) or each block has its own (k-means). Its values ascend, so the nearest entry is
found by comparing with the midpoints; a value at a midpoint goes to the lower entry. Arithmetic is in fp32.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import floatx, qparams, slices, spec
from .affine import check_floating_point, with_non_finite
from .double_quant import check_scale_spec, dequantize_scale, quantize_scale
from .granularity import BlockView, Granularity, InBlocks, PerGroup, PerRow
from .jsonable import jsonable, to_json
from .qdtype import QDType, qdtype
from .rounding import Rounding

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

_KMEANS_ELEMENTS = 1 << 24
"""Number of elements that k-means processes at a time; it needs about 40 bytes for each."""

_SEARCHED = 32
"""Number of midpoints from which a search among them is faster than a comparison with each."""


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
    if table.dim() > 1:  # in the split view, which has the entries as one more axis
        middles = torch.stack([view.split_scale(entry) for entry in middles.unbind(-1)], -1)

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
        codes = slices.in_slices(lambda x, s: quantize(x, s, middles), x, s, axes=x.dim())
    else:
        codes = slices.in_slices(quantize, x, s, middles, axes=x.dim())
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
    return view.merge(slices.in_slices(dequantize, index, view.split_scale(scale), starts, axes=index.dim()))


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
        importance: weight of each element, same shape, not negative; all equal by default, and in rows of zeros.
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
    w = torch.where(w.sum(-1, keepdim=True) > 0, w, 1.0)
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
    """Quantiles (i + 1/2) / size of sorted values, with respect to their density raised to the power 1/3. That is the
    density of the optimal table of many values (Panter and Dite, 1951); plain quantiles would leave the tails to one
    entry. With gaps d between neighbours the density is w / d, and the mass of a gap is d (w / d)^(1/3) = w^(1/3)
    d^(2/3), half of it at either end."""
    gaps = x.diff(dim=-1) ** (2 / 3)
    before, after = (torch.nn.functional.pad(gaps, pad) for pad in ((1, 0), (0, 1)))
    mass = (w ** (1 / 3) * (before + after)).cumsum(-1)
    steps = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) / size
    return x.gather(-1, torch.searchsorted(mass, mass[..., -1:] * steps).clamp(max=x.shape[-1] - 1))


def _check_table(view: BlockView, table: Tensor) -> None:
    if table.dim() != 1 and tuple(table.shape[:-1]) != view.scale_shape:
        shapes = f"1-d, or of shape {(*view.scale_shape, 'L')}, got {tuple(table.shape)}"
        raise ValueError(f"the table of a tensor of shape {view.shape} in blocks of {view.block} is {shapes}")


@jsonable
class CodebookSpec(InBlocks):
    """How one tensor is quantized with look-up tables. Hashable, JSON-able.

    Args:
        dtype: unsigned type of the codes, uint1 to uint8; the table has 2^bits entries.
        granularity: which elements share a scale, and a table unless all share one.
        table: ascending values of the table that all blocks share, or None for k-means in each block.
        iterations: of k-means.
        scale_dtype: dtype of the scales; None is fp32 for rows and tensors, the dtype of the tensor for groups.
        scale_spec: how the scales are quantized (see `double_quant`); None leaves them in floating point.
        eps: smallest scale, also 0, for tables without 0; None is the smallest normal number of the scale's dtype.
        rounding: `Rounding` of the codes; STOCHASTIC is for a `table`.

    Raises:
        ValueError: the codes are not unsigned integers, the table does not fit them, `scale_spec` is not allowed, or
            stochastic rounding without a `table`.
    """

    dtype: QDType
    granularity: Granularity = PerRow()
    table: tuple[float, ...] | None = None
    iterations: int = LLOYD_ITERATIONS
    scale_dtype: torch.dtype | None = None
    scale_spec: spec.QuantSpec | None = None
    eps: float | None = None
    rounding: Rounding = Rounding.NEAREST_EVEN

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", qdtype(self.dtype))
        if self.dtype.storage != torch.uint8 or self.dtype.is_floating_point:
            raise ValueError(f"CodebookSpec: codes are uint1 to uint8, got {self.dtype}")
        check_scale_spec(self.scale_spec)
        if self.table is None:
            if self.rounding is Rounding.STOCHASTIC:
                raise ValueError("CodebookSpec: stochastic rounding takes a table that all blocks share: table=(...)")
            return
        object.__setattr__(self, "table", tuple(float(value) for value in self.table))
        if len(self.table) != 2**self.dtype.bits:
            raise ValueError(f"CodebookSpec: {self.dtype} has {2**self.dtype.bits} codes, got {len(self.table)} values")
        if any(not low < high for low, high in zip(self.table, self.table[1:], strict=False)):
            raise ValueError(f"CodebookSpec: the table must ascend, got {self.table}")

    @property
    def has_zero_point(self) -> bool:
        return False

    @property
    def ends(self) -> tuple[float, float]:
        """The range that x / scale covers."""
        return (-1.0, 1.0) if self.table is None else (self.table[0], self.table[-1])

    def choose_scale(self, input: Tensor) -> Tensor:
        """The smallest number for which x / scale lies between the `ends`, not yet quantized by `scale_spec`.

        It is at least `eps`, also for an all-zero block, and NaN for a block with a NaN or an infinity.
        """
        check_floating_point("choose_scale", input)
        scale_dtype = self.scale_dtype or (input.dtype if isinstance(self.granularity, PerGroup) else torch.float32)
        low, high = qparams.min_max(input, self.block_size(input.shape))
        info = torch.finfo(torch.float32 if scale_dtype is torch.float64 else scale_dtype)  # of `highest`
        first, last = self.ends
        highest = torch.maximum(low / first if first < 0 else -low, high / last if last > 0 else high)
        smallest = info.tiny if self.eps is None else self.eps
        return with_non_finite(highest.clamp(smallest, info.max), highest).to(scale_dtype)

    def choose_table(self, input: Tensor, scale: Tensor, importance: Tensor | None = None) -> Tensor:
        """The shared table, fp32, or a table per block, fp16: its values are at most 1, so 11 bits are precise enough,
        unless `scale`, that which will be stored, was quantized to far less: they end at the largest of fp16.
        `importance` are weights of the elements in k-means."""
        if self.table is not None:
            if importance is not None:
                raise ValueError(f"importance is for k-means, the table of {self} is fixed; leave it out")
            return torch.tensor(self.table, dtype=torch.float32, device=input.device)
        view = BlockView(input.shape, self.block_size(input.shape))
        x = view.as_rows(view.split(input).float() / view.split_scale(scale).float()).clamp(-65504, 65504)
        weights = None if importance is None else view.as_rows(view.split(importance.float()))
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

    def quantize(self, input: Tensor, scale: Tensor, table: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Codes of `input`, uint8; see `quantize_codebook`. Stochastic rounding goes to one of the two neighbouring
        entries, with the value as its expectation."""
        block = self.block_size(input.shape)
        if self.rounding is Rounding.NEAREST_EVEN:
            return quantize_codebook(input, block, scale, table)
        view = BlockView(input.shape, block)
        x = view.split(input).float() / view.split_scale(scale).float()
        return view.merge(floatx.stochastic_index(x, table.float(), generator).to(torch.uint8))

    def dequantize(
        self, codes: Tensor, scale: Tensor, table: Tensor, output_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Reals of `codes`; see `dequantize_codebook`."""
        return dequantize_codebook(codes, self.block_size(codes.shape), scale, table, output_dtype)

    def to_nearest(self) -> "CodebookSpec":
        """The same spec, rounding to nearest."""
        return replace(self, rounding=Rounding.NEAREST_EVEN)

    def __str__(self) -> str:
        table = "k-means" if self.table is None else "NF4" if self.table == NF4_TABLE else "table"
        words = [self.dtype.name, table, repr(self.granularity)]
        if self.scale_spec is not None:
            words.append(f"scale {self.scale_spec.dtype.name} {self.scale_spec.granularity!r}")
        return " ".join(words)


# PowerSpec: a look-up table whose values are powers of equidistant numbers.
#
#     signed      table[c] = sign(c - C) (|c - C| / N)^p,    C = 2^(bits - 1),    N = C - 1
#     unsigned    table[c] = (c / N)^p,                      N = 2^bits - 1
#
# Zero is a value, one and (signed) minus one are too, and steps grow with the magnitude: with p = 4 and 8 bits they
# are 3.1 % of the value (unsigned: 1.6 %) at one, and 31 % (16 %) at 1e-4. So numbers of very different sizes share a
# scale, as the moments of Adam need; and a kernel computes values and nearest codes by multiplications and roots,
# without reading the table.


@functools.cache
def power_table(bits: int, power: int, signed: bool) -> tuple[float, ...]:
    """The table at the top of the file, its arithmetic in fp32: |k| times the rounded 1 / N, squared once or twice.

    Raises:
        ValueError: `power` is not 2 or 4, or `bits` not 2 to 8.
    """
    if power not in (2, 4) or not 2 <= bits <= 8:
        raise ValueError(f"power_table takes 2 to 8 bits and the power 2 or 4, got {bits} bits and the power {power}")
    codes = torch.arange(2**bits, device="cpu") - (2 ** (bits - 1) if signed else 0)
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    values = codes.abs().float() * torch.ones((), dtype=torch.float32, device="cpu").div(highest)
    for _ in range(power // 2):
        values = values * values
    return tuple((values * codes.sign()).tolist())


@jsonable
class PowerSpec(CodebookSpec):
    """A `CodebookSpec` with the table at the top of the file, which `table` need not give.

    Args:
        power: 2 or 4.
        signed: whether the values have signs; the codes are unsigned either way.

    Raises:
        ValueError: `table` is another one, or an argument is out of range.
    """

    power: int = 4
    signed: bool = True

    def __post_init__(self) -> None:
        table = power_table(qdtype(self.dtype).bits, self.power, self.signed)
        if self.table not in (None, table):
            raise ValueError(f"PowerSpec computes its table, which is not {self.table}; leave it out")
        object.__setattr__(self, "table", table)
        super().__post_init__()
        # `super` makes a copy; with one object for all, comparisons of specs are short.
        object.__setattr__(self, "table", table)

    @property
    def ends(self) -> tuple[float, float]:
        return -1.0, 1.0

    def quantize(self, input: Tensor, scale: Tensor, table: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Codes of `input`, uint8: the nearest values, of two the one nearer to zero; that of a NaN is undefined.

        With N^p |x / scale| = y between k^p and (k + 1)^p, the code is k where y is at most their middle, in fp32. As
        in `quantize_affine`, the division is a multiplication by the reciprocal.
        """
        check_floating_point("quantize", input)
        view = BlockView(input.shape, self.block_size(input.shape))
        highest = 2 ** (self.dtype.bits - 1) - 1 if self.signed else 2**self.dtype.bits - 1
        half = torch.arange(highest, dtype=torch.float32, device=input.device) + 0.5
        square = half * half
        middles = (square + 1.5) * square + 0.0625 if self.power == 4 else square + 0.25

        def quantize(x: Tensor, s: Tensor) -> Tensor:
            place = x.float() * (1.0 / s.float())
            size = place.abs() * torch.tensor(float(highest**self.power), device=x.device, dtype=torch.float32)
            codes = torch.bucketize(size, middles, out_int32=True)
            if self.signed:
                codes = torch.where(place < 0, -codes, codes) + (highest + 1)
            return codes.to(torch.uint8)

        x = view.split(input)
        return view.merge(slices.in_slices(quantize, x, view.split_scale(scale), axes=x.dim()))

    def __json__(self) -> dict[str, Any]:
        fields = ("dtype", "granularity", "scale_dtype", "scale_spec", "power", "signed")
        return {"type": "PowerSpec", **{name: to_json(getattr(self, name)) for name in fields}}

    def __str__(self) -> str:
        sign = "signed" if self.signed else "unsigned"
        return f"{self.dtype.name} {sign} power {self.power} {self.granularity!r}"


def power_spec(dtype: QDType | str, power: int, signed: bool) -> PowerSpec:
    """A spec whose rows share a scale."""
    return PowerSpec(qdtype(dtype), PerRow(), power=power, signed=signed)
