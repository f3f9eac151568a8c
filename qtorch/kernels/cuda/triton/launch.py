"""What launchers share: checks of arguments, sizes of blocks, and which tile of a result a program computes."""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on one device that Triton can use, and that their elements lie there in memory.

    Raises:
        ValueError: they are not.
    """
    given = {name: t for name, t in tensors.items() if t is not None}
    devices = {t.device for t in given.values()}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {found}")
    (device,) = devices
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"{op} runs on CUDA, or with TRITON_INTERPRET=1 on CPU; the tensors are on {device}")
    for name, t in given.items():
        if t.is_neg() or (not t.data_ptr() and t.numel()):
            what = "is a lazy negative: .resolve_neg()" if t.is_neg() else f"has no memory: a {type(t).__name__}"
            raise ValueError(f"{op}: {name} of shape {tuple(t.shape)} {what}")


def check_matrix(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a tensor is 2-d and has one of these dtypes.

    Raises:
        ValueError: it is not.
    """
    if x.dim() != 2 or x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{op}: {name} must be a matrix of {wanted}, got shape {tuple(x.shape)} of {x.dtype}")


def check_shape(op: str, name: str, x: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Check that a tensor has one of these shapes, or is None.

    Raises:
        ValueError: another.
    """
    if x is not None and tuple(x.shape) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(x.shape)}")


def power_of_two_divisor(*sizes: int) -> int:
    """The largest power of two that divides all of these."""
    size = 0
    for s in sizes:
        size |= s
    return size & -size


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


SMALLEST_TILE = 32
"""Of the contracted axis: with groups that allow less, scales are gathered for each code."""

ZEROS = {"NONE": 0, "INT": 1, "FLOAT": 2, "OFFSET": 2, "FRACTIONAL": 3}
"""ZERO of the kernels by the name of a `ZeroPointDomain`; see `intx_weight_mm`."""


class WeightArguments:
    """Integer codes (N, K) of 1 to 8 bits, 1 to 7 of them packed, with their scales and zero points.

    Args:
        op: name for messages.
        k: K.
        qdata, scale, zero_point, bits, offset, middle, domain: see `intx_weight_mm`.

    Raises:
        ValueError: other dtypes or shapes.
    """

    def __init__(
        self,
        op: str,
        k: int,
        qdata: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        bits: int,
        offset: int,
        middle: float,
        domain: str,
    ) -> None:
        if not 1 <= bits <= 8 or domain not in ZEROS:
            raise ValueError(f"{op} takes codes of 1 to 8 bits and a domain of {list(ZEROS)}, got {bits}, {domain!r}")
        check_matrix(op, "qdata", qdata, (torch.uint8,) if bits < 8 else (torch.int8, torch.uint8))
        self.n, self.k = qdata.shape[0], k
        self.segment = k if bits == 8 else -(-k // 8)
        check_shape(op, "qdata", qdata, (self.n, self.segment if bits == 8 else self.segment * bits))
        if scale.dim() != 2 or scale.shape[0] not in (1, self.n) or not scale.shape[1] or k % scale.shape[1]:
            raise ValueError(
                f"{op}: scale must have shape (N, groups) or (1, groups), groups dividing K, got {tuple(scale.shape)} "
                f"for N, K = {(self.n, k)}"
            )
        check_shape(op, "zero_point", zero_point, tuple(scale.shape))
        zero = ZEROS[domain] if zero_point is not None else 0
        self.qdata = qdata if qdata.stride(1) == 1 else qdata.contiguous()
        self.scale, self.zero_point = scale, scale if zero_point is None else zero_point
        self.groups = scale.shape[1]
        self.group = max(1, k // self.groups)
        steps = (self.qdata.stride(0), *_steps(self.scale), *_steps(self.zero_point))
        self.pointers = (self.qdata, self.scale, self.zero_point)
        self.sizes = (k, self.segment)
        self.steps = steps
        # A row in one group is any group that is long enough: kernels are compiled for each size.
        group = self.group if self.groups > 1 else 1 << 30
        middle = middle if domain == "FLOAT" else 0.0
        self.numerics = {"GROUP": group, "BITS": bits, "OFFSET": float(offset), "MIDDLE": float(middle), "ZERO": zero}
        self.key = "float_zero" if zero >= 2 else "int"

    def tile(self, wanted: int) -> tuple[int, bool, bool]:
        """(BLOCK_K, whether a tile lies in one group, whether no mask is needed)."""
        fitting = min(wanted, power_of_two_divisor(self.segment, self.group if self.groups > 1 else 0))
        if fitting < min(wanted, SMALLEST_TILE):
            return min(wanted, 128), self.groups == 1, False
        return fitting, True, self.k in (self.segment, 8 * self.segment)


def _steps(x: Tensor) -> tuple[int, int]:
    """Strides of a scale, zero along an axis of one element that stands for all."""
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(1)


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
