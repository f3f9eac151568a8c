"""What kernels for `adam_step` share: the check of its arguments, and the bounds of scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layouts.packed import packed_length
from ...primitives.flat_blocks import FlatBlocks
from .adam import AdamStep, Moment

LARGEST_SCALE = {
    "32": 0.0,
    "8": torch.finfo(torch.float32).max,
    "4": torch.finfo(torch.float32).max,
    "float8": torch.finfo(torch.bfloat16).max / 448.5,
}
"""As the specs of the form have it, see `choose_scale_codebook` and `choose_qparams_affine_with_min_max`."""

_BITS = {"8": 8, "4": 4, "float8": 8}

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """Raise `ValueError` if a kernel would read or write outside of these tensors."""
    count = blocks.rows * blocks.length
    wanted: list[tuple[str, Tensor | None, int, tuple[torch.dtype, ...]]] = [
        ("weight", weight, count, _FLOATS),
        ("grad", grad, count, _FLOATS),
    ]
    for name, moment in zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), moments, strict=False):
        if step.form == "32":
            wanted.append((name, moment.data, count, (torch.float32,)))
            continue
        rows, width = blocks.shape
        bits = _BITS[step.form]
        dtype = torch.float8_e4m3fn if step.form == "float8" else torch.uint8
        wanted.append((name, moment.data, rows * (packed_length(width, bits) if bits < 8 else width), (dtype,)))
        wanted.append((f"{name}'s scale", moment.scale, rows, (torch.float32,)))
    for name, tensor, size, dtypes in wanted:
        ok = tensor is not None and tensor.numel() == size and tensor.dtype in dtypes and tensor.is_contiguous()
        if tensor is None or not ok or tensor.device != weight.device:
            found = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"adam_step: {name} must have {size} contiguous elements of {' or '.join(map(str, dtypes))} on "
                f"{weight.device}, got {found}"
            )
        if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + size) * tensor.itemsize:
            raise ValueError(f"adam_step: {name} has no memory: its storage was resized")
