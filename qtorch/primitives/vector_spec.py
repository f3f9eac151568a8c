"""VectorSpec: four weights of a row are one entry of a codebook of 256, a byte: 2 bits a weight.

    w[4 j : 4 j + 4] = entry[byte] * scale of the group,    entry: 256 vectors of 4 odd integers in [-59, 59]

In four dimensions 256 vectors cover a normal distribution with a mean squared error of .0978 of its variance; the four
best values of one dimension leave .1175. The entries are 32 vectors, each with its signs flipped in pairs:

    entry[b + 16 s + 128 h] = BASES[b + 16 h] * (sign(s0), sign(s1), sign(s2), sign(s0) sign(s1) sign(s2))

with b of 4 bits, h of one, s0 the lowest of the three bits of s, sign(0) = 1 and sign(1) = -1. So 128 small integers
are the whole codebook, which processors look up in registers; of odd integers, -(2 m + 1) = 2 (~m) + 1, so that signs
cost them one instruction. They were fitted to normal numbers by Lloyd's algorithm, with a standard deviation of
`DEVIATION`, and never change: files hold nothing but bytes.

A `RotatedVectorSpec` rotates rows before, block by block, by S H S with H Sylvester's Hadamard matrix and S a diagonal
of signs that look random: weights come close to a normal distribution, and no input weighs much more than the others. A
block is a group, or, where a row has one scale, the largest power of two up to 256 that divides the row.

Sources: QuIP#, arXiv 2402.04396 (Hadamard matrices with random signs; codebooks of lattices); AQLM, arXiv 2401.06118.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import affine, rotated_spec, spec
from .granularity import Block, BlockView, IndivisibleError, PerBlock
from .jsonable import jsonable
from .qdtype import qdtype
from .scale_rules import MinMaxRule

VECTOR = 4
"""Weights of a vector."""

# fmt: off
BASES = (
    (9, 9, 9, 5), (3, 9, 9, 23), (21, 9, 7, -13), (5, 9, 25, -11), (7, 27, 9, -7), (33, 9, 13, 5), (21, 3, 29, 13),
    (17, 29, 11, 15), (25, 11, 9, 29), (15, 23, 31, 3), (13, 5, 13, -37), (23, 21, 23, -21), (5, 17, 29, 29),
    (31, 31, 11, -3), (11, 29, 5, -33), (1, 41, 23, -13), (9, 9, 47, -13), (45, 11, 7, -19), (15, 55, 1, -15),
    (33, 29, 31, 27), (41, 15, 41, -9), (5, 15, 15, 57), (17, 3, 41, 43), (45, 1, 25, 35), (35, 17, 1, 51),
    (43, 41, 5, -25), (59, 19, 17, 7), (27, 51, 31, -1), (11, 47, 17, 41), (5, 37, 51, -19), (23, 15, 59, 13),
    (23, 33, 31, -43),
)
# fmt: on
"""See the top of the file; the first three of each are positive."""

LARGEST = 59
DEVIATION = 24.25
"""Standard deviation of the normal numbers for which the entries are best."""

LARGEST_ROTATION = 256
"""Of rows that have one scale."""

_SLICE = 1 << 14
"""Vectors whose distances to all entries are in memory at a time."""


_FLIPS = torch.tensor([[1 - 2 * (s >> i & 1) for i in range(3)] for s in range(8)], device="cpu", dtype=torch.int8)
_SIGNS = torch.cat([_FLIPS, _FLIPS.prod(1, keepdim=True).to(torch.int8)], 1)
_OF_BASES = torch.tensor(BASES, device="cpu", dtype=torch.int8)
ENTRIES = (_SIGNS.unsqueeze(1) * _OF_BASES.view(2, 1, 16, VECTOR)).reshape(-1, VECTOR)
"""(256, 4) int8: the vector of each byte."""

_WORDS = ENTRIES.view(torch.int32).flatten().tolist()  # numbers, for a compiler takes no tensors of the module
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
    keys = torch.tensor(_WORDS, dtype=torch.int32, device=packed.device)
    codes = keys.index_select(0, runs.reshape(-1).int()).reshape(runs.shape)
    return codes.view(torch.int8).movedim(-1, axis)


@jsonable
class VectorSpec(spec.QuantSpec):
    """A `QuantSpec` whose codes are entries of a codebook; see the top of the file. Arguments are those of `QuantSpec`,
    of which the range, the mapping and the rule for scales are fixed: the scale is the root mean square of a group,
    divided by `DEVIATION`. No entry is zero, so that a group of zeros has the scale 0.

    Raises:
        ValueError: a block is neither a row nor a part of it whose length is a multiple of 4, or an argument is another
            than the codebook's own (see `codebook_arguments`).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in codebook_arguments().items():
            if getattr(self, name) != value:
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}, got {getattr(self, name)!r}")
        if not self._allows(self._sizes()):
            raise ValueError(f"{type(self).__name__}: blocks are {self.blocks}, got {self.granularity}")

    blocks: ClassVar[str] = "rows, or parts of rows whose length is a multiple of 4"

    def _sizes(self) -> list[int]:
        """Those of a block that are not 1."""
        ndim = len(self.granularity.sizes) if isinstance(self.granularity, PerBlock) else 0
        return [size for size in self.granularity.pattern(max(ndim, 2)) if size != 1]

    @staticmethod
    def _allows(sizes: list[int]) -> bool:
        """Whether a block may have these `_sizes`."""
        return len(sizes) == 1 and (sizes[0] == -1 or sizes[0] % VECTOR == 0)

    def block_size(self, shape: Sequence[int]) -> Block:
        block = super().block_size(shape)
        if block[self.axis(len(shape))] % VECTOR:
            raise IndivisibleError(f"vectors of {VECTOR} do not divide the blocks {block} of a tensor of shape {shape}")
        return block

    def axis(self, ndim: int) -> int:
        """The axis along which vectors lie, counted from the end."""
        return next(i for i, size in enumerate(self.granularity.pattern(ndim)) if size != 1) - ndim

    def choose_range(self, input: Tensor) -> tuple[Tensor, Tensor]:
        view = BlockView(input.shape, self.block_size(input.shape))
        squares = view.as_rows(view.split(input)).double().square()  # fp32 overflows from 1.8e19 on
        mean = squares.sum(-1) / max(1, squares.shape[-1])
        high = (mean.sqrt() * (LARGEST / DEVIATION)).float().reshape(view.scale_shape)
        return -high, high

    def _stored_qparams(
        self, min_val: Tensor, max_val: Tensor, input_dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        tensors, zero_point = super()._stored_qparams(min_val, max_val, input_dtype)
        return {"scale": torch.where(max_val == 0, 0, tensors["scale"])}, zero_point

    def quantize(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, generator: torch.Generator | None = None
    ) -> Tensor:
        view, axis = BlockView(input.shape, self.block_size(input.shape)), self.axis(input.dim())
        x = view.merge(view.split(input).float() / view.split_scale(scale).float()).movedim(axis, -1)
        return nearest_entries(x.reshape(-1, VECTOR)).view(x.shape).movedim(-1, axis).contiguous()

    def fake_quantize(self, input: Tensor, generator: torch.Generator | None = None) -> Tensor:
        x = input.detach()
        scale, _ = self.choose_qparams(x)
        return input + (self.dequantize(self.quantize(x, scale, None), scale, None, input.dtype) - x)

    def __str__(self) -> str:
        return f"vectors of {VECTOR} in a byte {self.granularity!r}"


def codebook_arguments() -> dict[str, Any]:
    """The arguments of `QuantSpec` that every `VectorSpec` has."""
    fixed = {"dtype": qdtype("int8"), "quant_min": -float(LARGEST), "quant_max": float(LARGEST)}
    return {**fixed, "zero_point_domain": affine.ZeroPointDomain.NONE, "scale_rule": MinMaxRule(), "scale_spec": None}


@jsonable
class RotatedVectorSpec(rotated_spec.RotatedSpec, VectorSpec):
    """A `VectorSpec` whose rows are rotated; see the top of the file.

    Raises:
        ValueError: as `VectorSpec`; or the length of a group is no power of two.
    """

    blocks: ClassVar[str] = "rows, or parts of rows whose length is a power of two, of 4 or more"

    def __post_init__(self) -> None:
        VectorSpec.__post_init__(self)

    @staticmethod
    def _allows(sizes: list[int]) -> bool:
        return VectorSpec._allows(sizes) and (sizes[0] == -1 or sizes[0] & (sizes[0] - 1) == 0)

    @property
    def rotation(self) -> int:
        """The largest block that is rotated; the longest that divides it and a row is."""
        size = self._sizes()[0]
        return LARGEST_ROTATION if size == -1 else size

    @property
    def unrotated(self) -> VectorSpec:
        return VectorSpec(**{f.name: getattr(self, f.name) for f in fields(self)})

    def rotated(self, values: Tensor) -> Tensor:
        axis = self.axis(values.dim())
        size = math.gcd(self.rotation, values.shape[axis])
        return rotate_vectors(values.movedim(axis, -1), size).movedim(-1, axis)

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
    rows, columns = (rotated_spec.sylvester(length, x.device, dtype) for length in flips.shape)
    return (rows @ blocks @ columns * flips).flatten(-3)
