"""The arguments of a launch that describe a quantized weight, checked."""

import torch
from torch import Tensor

from .arguments import check_matrix, check_shape, power_of_two_divisor

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
