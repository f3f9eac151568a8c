"""Weight-only products without compiled kernels, on a dequantized copy of the weight where one may be kept.

Dequantizing a slice at a time with torch operators takes longer than the product of a few rows, so a copy within
`qtorch.config.float_copy_bytes` serves any number of rows. int8 codes with a scale per row have a faster way,
`fixed_point_mm`, and get no copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...layouts.packed import unpack_codes
from ...primitives.affine import ZeroPointDomain, dequantize_affine
from ...primitives.granularity import block_of
from ...primitives.qdtype import qdtype
from ..custom_ops import implement, note, portable
from ..linear.packed_weight_only import packed_weight_mm
from ..ops.weight_only_mm import weight_only_mm
from .float_copies import float_copy, wanted


@implement("packed_weight_mm", "cpu")
def packed_weight_mm_cpu(
    x: Tensor,
    qdata: Tensor,
    n: int,
    axis: int,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """See `packed_weight_mm`."""
    # A transposed weight is a view, new for each product: its copy would be used once.
    if wanted() and axis == -1:
        read = lambda: unpack_codes(qdata, qdtype(dtype), x.shape[1])  # noqa: E731
        y = _on_copy("packed_weight_mm", x, qdata, read, n, scale, zero_point, dtype, low, high, domain)
        if y is not None:
            return y
    return portable(packed_weight_mm)(x, qdata, n, axis, scale, zero_point, dtype, low, high, domain)


@implement("weight_only_mm", "cpu")
def weight_only_mm_cpu(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, low: float, high: float, domain: str
) -> Tensor:
    """See `weight_only_mm`."""
    n = len(codes)
    if wanted() and (dtype != "int8" or zero_point is not None or scale.shape != (n, 1)):
        y = _on_copy("weight_only_mm", x, codes, lambda: codes, n, scale, zero_point, dtype, low, high, domain)
        if y is not None:
            return y
    return portable(weight_only_mm)(x, codes, scale, zero_point, dtype, low, high, domain)


def _on_copy(
    name: str,
    x: Tensor,
    codes: Tensor,
    read: Callable[[], Tensor],
    n: int,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor | None:
    """The product, or None where no copy may be kept. `read` gives the codes (n, K)."""
    shape = (n, x.shape[1])

    def make() -> Tensor:
        block = block_of(shape, scale.shape)
        bounds = (qdtype(dtype), low, high, ZeroPointDomain[domain])
        return dequantize_affine(read(), block, scale, zero_point, *bounds, x.dtype)

    with torch.no_grad():
        copy = float_copy(codes, scale, zero_point, x.dtype, make, n * x.shape[1] * x.element_size())
    if copy is None:
        return None
    note(f"{name}.float_copy")
    return functional.linear(x, copy)
