"""VectorSpec: four weights of a row are one entry of a codebook of 256, a byte: 2 bits a weight.

    w[4 j : 4 j + 4] = entry[byte] * scale of the group,    entry: 256 vectors of 4 integers in [-27, 27]

In four dimensions 256 vectors cover a normal distribution with a mean squared error of .0975 of its variance; the four
best values of one dimension leave .1175. The entries are 32 vectors, each with its signs flipped in pairs:

    entry[b + 32 (s0 + 2 s1 + 4 s2)] = BASES[b] * (sign(s0), sign(s1), sign(s2), sign(s0) sign(s1) sign(s2)),
    sign(0) = 1, sign(1) = -1

so 128 small integers are the whole codebook, which processors look up in registers. They were fitted to normal numbers
by Lloyd's algorithm, with a standard deviation of `DEVIATION`, and never change: files hold nothing but bytes.

A `RotatedVectorSpec` rotates each group before, by S H S with H Sylvester's Hadamard matrix and S a diagonal of signs
that look random: weights come close to a normal distribution, and no input weighs much more than the others.

Sources: QuIP#, arXiv 2402.04396 (Hadamard matrices with random signs; codebooks of lattices); AQLM, arXiv 2401.06118.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .affine import ZeroPointDomain
from .granularity import BlockView
from .jsonable import jsonable
from .qdtype import qdtype
from .rotated_spec import RotatedSpec, sylvester
from .scale_rules import MinMaxRule
from .spec import QuantSpec

VECTOR = 4
"""Weights of a vector."""

# fmt: off
BASES = (
    (4, 4, 4, 2), (9, 4, 3, -6), (2, 4, 4, 11), (2, 4, 11, -5), (3, 12, 4, -4), (15, 4, 6, 2), (8, 13, 5, 7),
    (10, 2, 14, 6), (6, 11, 14, 1), (13, 5, 4, 13), (6, 2, 6, -18), (14, 14, 5, -1), (5, 13, 2, -15), (2, 8, 13, 14),
    (11, 10, 11, -10), (20, 5, 3, -8), (0, 20, 10, 7), (4, 4, 22, -6), (7, 25, 1, -7), (15, 13, 15, 12), (2, 7, 7, 26),
    (19, 8, 19, -4), (8, 0, 20, 20), (27, 8, 8, 4), (22, 1, 12, -16), (20, 19, 2, -11), (6, 21, 7, 19),
    (16, 8, 0, -24), (2, 17, 23, -9), (10, 7, 27, 6), (12, 24, 14, 0), (10, 16, 14, -20),
)
# fmt: on
"""See the top of the file; the first three of each are not negative."""

LARGEST = 27
DEVIATION = 11.25
"""Standard deviation of the normal numbers for which the entries are best."""

_SLICE = 1 << 14
"""Vectors whose distances to all entries are in memory at a time."""


def _signs() -> Tensor:
    flips = torch.tensor([[1 - 2 * (s >> i & 1) for i in range(3)] for s in range(8)], device="cpu", dtype=torch.int8)
    return torch.cat([flips, flips.prod(1, keepdim=True).to(torch.int8)], 1)


_OF_BASES = torch.tensor(BASES, device="cpu", dtype=torch.int8)
ENTRIES = (_signs().unsqueeze(1) * _OF_BASES).flatten(0, 1)
"""(256, 4) int8: the vector of each byte."""

_KEYS, _BYTES = ENTRIES.view(torch.int32).flatten().sort()


def nearest_entries(vectors: Tensor, metric: Tensor | None = None) -> Tensor:
    """The entries c with the least (v - c) M (v - c)^T for vectors v (V, 4) fp32: (V, 4) int8.

    Args:
        metric: M (4, 4), positive definite; the identity by default.
    """
    entries = ENTRIES.to(vectors.device)
    numbers = entries.float()
    weighted = numbers if metric is None else numbers @ metric
    half = (weighted * numbers).sum(1) / 2
    best = [torch.addmm(-half, part, weighted.t()).argmax(1) for part in vectors.split(_SLICE)]
    return entries[torch.cat(best)] if best else entries[:0]


def pack_vectors(codes: Tensor, axis: int = -1) -> Tensor:
    """One byte for each 4 codes along `axis`, int8, which must be entries (else `ValueError`): uint8."""
    runs = codes.movedim(axis, -1).contiguous()
    keys = runs.view(torch.int32)
    known, bytes_ = _KEYS.to(codes.device), _BYTES.to(codes.device)
    place = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
    if not codes.is_meta and not torch.equal(known[place], keys):
        wrong = int((known[place] != keys).sum())
        raise ValueError(f"{wrong} of {keys.numel()} vectors along axis {axis} are no entries of the codebook")
    return bytes_[place].to(torch.uint8).movedim(-1, axis)


def unpack_vectors(packed: Tensor, axis: int = -1) -> Tensor:
    """Inverse of `pack_vectors`: int8."""
    runs = packed.movedim(axis, -1)
    keys = ENTRIES.to(packed.device).view(torch.int32).flatten()
    codes = keys.index_select(0, runs.reshape(-1).int()).reshape(runs.shape)
    return codes.view(torch.int8).movedim(-1, axis)


@jsonable
@dataclass(frozen=True)
class VectorSpec(QuantSpec):
    """A `QuantSpec` whose codes are entries of a codebook; see the top of the file. Arguments are those of `QuantSpec`,
    of which the range, the mapping and the rule for scales are fixed: the scale is the root mean square of a group,
    divided by `DEVIATION`. No entry is zero: zeros become numbers of about 1e-37, as large as the smallest scale.

    Raises:
        ValueError: a block of a matrix is no vector whose length is a multiple of 4, or an argument is another than the
            codebook's own (see `codebook_arguments`).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in codebook_arguments().items():
            if getattr(self, name) != value:
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}, got {getattr(self, name)!r}")
        sizes = [size for size in self.granularity.pattern(2) if size != 1]
        if len(sizes) != 1 or (sizes[0] % VECTOR and sizes[0] != -1):
            rule = "blocks are vectors whose length is a multiple of 4, such as PerGroup(256)"
            raise ValueError(f"{type(self).__name__}: {rule}, got {self.granularity}")

    def axis(self, ndim: int) -> int:
        """The axis along which vectors lie, counted from the end."""
        return next(i for i, size in enumerate(self.granularity.pattern(ndim)) if size != 1) - ndim

    def choose_range(self, input: Tensor) -> tuple[Tensor, Tensor]:
        view = BlockView(input.shape, self.block_size(input.shape))
        squares = view.as_rows(view.split(input)).double().square()  # fp32 overflows from 1.8e19 on
        mean = squares.sum(-1) / max(1, squares.shape[-1])
        high = (mean.sqrt() * (LARGEST / DEVIATION)).float().reshape(view.scale_shape)
        return -high, high

    def quantize(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, generator: torch.Generator | None = None
    ) -> Tensor:
        view, axis = BlockView(input.shape, self.block_size(input.shape)), self.axis(input.dim())
        x = view.merge(view.split(input).float() / view.split_scale(scale).float()).movedim(axis, -1)
        return nearest_entries(x.reshape(-1, VECTOR)).view(x.shape).movedim(-1, axis).contiguous()

    def fake_quantize(self, input: Tensor, generator: torch.Generator | None = None) -> Tensor:
        values = self.dequantize(self.quantize(input.detach(), *self.choose_qparams(input.detach())), input.dtype)
        return input + (values - input).detach()

    def __str__(self) -> str:
        return f"vectors of {VECTOR} in a byte {self.granularity!r}"


def codebook_arguments() -> dict[str, object]:
    """The arguments of `QuantSpec` that every `VectorSpec` has."""
    fixed = {"dtype": qdtype("int8"), "quant_min": -float(LARGEST), "quant_max": float(LARGEST)}
    return {**fixed, "zero_point_domain": ZeroPointDomain.NONE, "scale_rule": MinMaxRule(), "scale_spec": None}


@jsonable
@dataclass(frozen=True)
class RotatedVectorSpec(RotatedSpec, VectorSpec):
    """A `VectorSpec` whose groups are rotated; see the top of the file.

    Raises:
        ValueError: as `VectorSpec`; or the length of a group is no power of two.
    """

    @property
    def unrotated(self) -> VectorSpec:
        return VectorSpec(**{f.name: getattr(self, f.name) for f in fields(self)})

    def rotated(self, values: Tensor) -> Tensor:
        axis = self.axis(values.dim())
        return rotate_vectors(values.movedim(axis, -1), self.rotation).movedim(-1, axis)

    def __str__(self) -> str:
        return f"{VectorSpec.__str__(self)} rotated"


@functools.cache
def signs(size: int) -> tuple[int, ...]:
    """The diagonal of S: 1 and -1 from a hash of the position, of as many positions."""
    found = []
    for position in range(1, size + 1):
        bits = position * 0x9E3779B1 % 2**32
        bits = (bits ^ bits >> 15) * 0x85EBCA77 % 2**32
        found.append(1 - 2 * ((bits ^ bits >> 13) & 1))
    return tuple(found)


def rotate_vectors(x: Tensor, size: int) -> Tensor:
    """x (..., C) in blocks of the last axis, each times S H S (size, size), in fp32, or fp64 if x is; twice, it is the
    identity."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # H is the Kronecker product of two smaller ones.
    left = 1 << int(math.log2(size)) // 2
    flips = torch.tensor(signs(size), device=x.device, dtype=dtype).view(left, -1)
    blocks = x.to(dtype).unflatten(-1, (-1, *flips.shape)) * flips
    rows, columns = (sylvester(length, x.device, dtype) for length in flips.shape)
    return (rows @ blocks @ columns * flips).flatten(-3)
