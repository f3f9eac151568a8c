"""What launchers share: checks of arguments, sizes of blocks, and which tile of a result a program computes.

The checks raise `ValueError`, which says what was given and what is wanted.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives import qdtype
from ....primitives.layouts import packed_length

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on one device that Triton can use, and that their elements lie there in memory."""
    given = {name: t for name, t in tensors.items() if t is not None}
    devices = {t.device for t in given.values()}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {found}")
    (device,) = devices
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"{op} runs on CUDA, or with TRITON_INTERPRET=1 on CPU; the tensors are on {device}")
    for name, t in given.items():
        if t.is_neg():
            raise ValueError(f"{op}: {name} of shape {tuple(t.shape)} is a lazy negative: .resolve_neg()")
        if not t.data_ptr() and t.numel():
            raise ValueError(f"{op}: {name} of shape {tuple(t.shape)} has no memory: a {type(t).__name__}")


def check_matrix(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a tensor is 2-d and has one of these dtypes."""
    if x.dim() != 2 or x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{op}: {name} must be a matrix of {wanted}, got shape {tuple(x.shape)} of {x.dtype}")


def check_shape(op: str, name: str, x: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Check that a tensor has one of these shapes, or is None. Vectors are read without a stride."""
    if x is not None and tuple(x.shape) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(x.shape)}")
    if x is not None and x.dim() == 1 and not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got a vector of stride {x.stride(0)}")


def check_seed(op: str, seed: Tensor) -> None:
    """Check that a tensor is a seed for Philox."""
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"{op}: the seed is one int64, got shape {tuple(seed.shape)} of {seed.dtype}")


def power_of_two_in(*sizes: int) -> int:
    """The largest power of two that divides all of these."""
    size = 0
    for s in sizes:
        size |= s
    return size & -size


def row_step(x: Tensor) -> int:
    """The stride of the rows of a scale, zero where one row stands for all."""
    return x.stride(0) if x.shape[0] > 1 else 0


def without_terms(y: Tensor, bias: Tensor | None) -> Tensor:
    """The result of a product that adds up nothing: zeros, or the bias in each row."""
    return y.zero_() if bias is None else y.copy_(bias.expand_as(y))


class GroupedCodes:
    """Integer codes (N, K) of 1 to 8 bits, packed or not, with the scales of their groups, as a launch takes them.

    Args:
        op: name for messages.
        k: K.
        qdata: the codes; uint8 if they are packed along rows by `pack_codes`.
        scale: (N, groups), or (1, groups) if that is in `rows`; groups divides K.
        zero_point: like `scale`, or None.
        dtype: name of the `QDType` of the codes.
        rows: what the first size of `scale` may be beside N.

    Attributes:
        bits, offset: width of a stored code, and what was added to it before it was packed, 2^(bits-1) if signed.
        segment: bytes of a part of a packed row (see `unpack.py`); K if it is not packed.
        groups, group: the number of groups of a row, and their size.
    """

    def __init__(
        self, op: str, k: int, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, *rows: int
    ) -> None:
        kind = qdtype(dtype)
        # Of few columns a packed row may have as many bytes as columns; codes with a byte each are then signed.
        packed = qdata.shape[-1] != k or (qdata.dtype == torch.uint8 and packed_length(k, kind.bits) == k)
        packed = packed and kind.bits < 8
        check_matrix(op, "qdata", qdata, (torch.uint8,) if packed else (torch.int8, torch.uint8))
        self.bits = kind.bits if packed else 8
        self.offset = 2 ** (self.bits - 1) if packed and kind.is_signed else 0
        self.n, self.k = qdata.shape[0], k
        self.segment = -(-k // 8) if packed else k
        check_shape(op, "qdata", qdata, (self.n, self.segment * self.bits if packed else k))
        if scale.dim() != 2 or scale.shape[0] not in (self.n, *rows) or not scale.shape[1] or k % scale.shape[1]:
            wanted = " or ".join(f"({size}, groups)" for size in ("N", *rows))
            raise ValueError(
                f"{op}: the scale must have shape {wanted}, groups dividing K, got {tuple(scale.shape)} for "
                f"N, K = {(self.n, k)}"
            )
        check_shape(op, "zero_point", zero_point, tuple(scale.shape))
        self.groups = scale.shape[1]
        self.group = max(1, k // self.groups)
        self.qdata = qdata if qdata.stride(1) == 1 else qdata.contiguous()

    @property
    def whole_segments(self) -> bool:
        """Whether all segments are full: K needs no mask."""
        return self.k in (self.segment, 8 * self.segment)


SMALLEST_TILE = 32
"""Of the contracted axis: with groups that allow less, scales are gathered for each code."""

ZEROS = {"NONE": 0, "INT": 1, "FLOAT": 2, "OFFSET": 2, "FRACTIONAL": 3, "TABLE": -1}
"""ZERO of the kernels by the name of a `ZeroPointDomain`, or of a table in its place, -2 for one of each group; see
`intx_weight_mm`."""


class WeightArguments(GroupedCodes):
    """`GroupedCodes` that meet floating point; `middle` and `domain` as in `cuda_weight_mm`."""

    def __init__(
        self, op: str, k: int, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, middle: float,
        domain: str,
    ) -> None:  # fmt: skip
        if domain not in ZEROS:
            raise ValueError(f"{op} takes a domain of {list(ZEROS)}, got {domain!r}")
        table = zero_point if domain == "TABLE" else None
        super().__init__(op, k, qdata, scale, zero_point if table is None else None, dtype, 1)
        own = table is not None and table.dim() > 1
        shape = (2**self.bits,)
        check_shape(op, "the table", table, (scale.shape[0], self.groups, *shape) if own else shape)
        zero = -2 if own else ZEROS[domain] if zero_point is not None else 0
        zero_point = scale if zero_point is None else zero_point
        self.pointers = (self.qdata, scale, zero_point)
        self.sizes = (k, self.segment)
        of_zeros = (row_step(zero_point), zero_point.stride(1)) if own or table is None else (0, 0)
        self.steps = (self.qdata.stride(0), row_step(scale), scale.stride(1), *of_zeros)
        self.numerics = {
            # A row in one group is any group that is long enough: kernels are compiled for each size.
            "GROUP": self.group if self.groups > 1 else 1 << 30,
            "BITS": self.bits,
            "OFFSET": float(self.offset),
            "MIDDLE": float(middle) if domain == "FLOAT" else 0.0,
            "ZERO": zero,
        }
        self.key = f"{'float_zero' if zero >= 2 else 'int'}{self.bits}"

    def tile(self, wanted: int) -> tuple[int, bool, bool]:
        """(BLOCK_K, whether a tile lies in one group, whether no mask is needed)."""
        fitting = min(wanted, power_of_two_in(self.segment, self.group if self.groups > 1 else 0))
        if fitting < min(wanted, SMALLEST_TILE):
            return min(wanted, 128), self.groups == 1, False
        return fitting, True, self.whole_segments

    def constants(self, x: Tensor, block_m: int, block_k: int) -> dict[str, object]:
        """The constants of `weight_products` for tiles of about `block_k` columns."""
        block_k, one_group, even = self.tile(block_k)
        return {
            **self.numerics,
            "ONE_GROUP": one_group,
            "EVEN": even,
            "SCALE_PRODUCT": one_group and block_m <= 64 and self.numerics["ZERO"] < 2,
            "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
            "ASM": x.device.type == "cuda",
            "BLOCK_M": block_m,
            "BLOCK_K": block_k,
        }


@triton.jit
def tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of the tile of program number `program`: column by column within bands of GROUP_M rows of tiles, so
    that programs that run together read the same rows and columns from the L2 cache."""
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * columns)
    height = min(rows - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * columns)
    return band * GROUP_M + within % height, within // height
