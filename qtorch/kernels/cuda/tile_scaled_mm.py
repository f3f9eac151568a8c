"""`tile_scaled_mm` on CUDA, by Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import features
from ..custom_ops import implement, note, portable
from ..ops import tile_scaled_mm as operation
from ..ops.int_matmul import int32_terms


@implement("tile_scaled_mm", "cuda", where=features.cuda_lacks("triton") is None)
def triton_tile_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `tile_scaled_mm`."""
    from .triton.tile_scaled_mm import tile_scaled_mm

    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
    if a.shape[1] // a_scale.shape[1] > int32_terms():
        return portable(operation.tile_scaled_mm)(a, b, a_scale, b_scale, dtype)
    note("tile_scaled_mm.triton")
    return tile_scaled_mm(a, b, a_scale, b_scale, dtype)
