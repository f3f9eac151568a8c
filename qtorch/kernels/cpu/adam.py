"""A step of Adam, compiled: one pass over the parameter, its gradient and its moments."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layouts.packed import packed_length
from ...primitives.flat_blocks import FlatBlocks
from ..custom_ops import implement, note, portable
from ..ops.adam import AdamStep, Moment, adam_step
from .compiled_library import TYPES, library, threads
from .structs import Adam, struct_of

_pack = struct_of(Adam).pack

FORM_NUMBERS = {"32": 0, "8": 1, "4": 2, "float8": 3}
"""As in src/adam.h."""

_BITS = {"8": 8, "4": 4, "float8": 8}

LARGEST_FLOAT8_SCALE = torch.finfo(torch.bfloat16).max / 448.5
"""As `choose_qparams_affine_with_min_max` has it."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@implement("adam_step", "cpu")
def cpu_adam_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """See `adam_step`."""
    compiled = library()
    if compiled is None:
        note("adam_step.torch")
        portable(adam_step)(weight, grad, moments, blocks, step)
        return
    check_step(weight, grad, moments, blocks, step)
    note(f"adam_step.{compiled.instruction_set}")
    pointers = [pointer for moment in moments for pointer in _pointers(moment)]
    pointers += [0] * (6 - len(pointers))
    compiled.adam(
        _pack(
            weight.data_ptr(),
            TYPES[weight.dtype],
            grad.data_ptr(),
            TYPES[grad.dtype],
            *blocks,
            FORM_NUMBERS[step.form],
            *pointers,
            step.beta1,
            step.beta2,
            1 - step.beta1,
            1 - step.beta2,
            step.eps,
            step.decay,
            step.l2,
            step.step_size,
            step.correction,
            LARGEST_FLOAT8_SCALE,
            step.key is not None and weight.dtype == torch.bfloat16,
            step.key or 0,
            step.first,
            threads(),
        )
    )
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def _pointers(moment: Moment) -> tuple[int, int]:
    return moment.data.data_ptr(), 0 if moment.scale is None else moment.scale.data_ptr()


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
        dtypes = (torch.float8_e4m3fn,) if step.form == "float8" else (torch.uint8,)
        wanted.append((name, moment.data, rows * (packed_length(width, bits) if bits < 8 else width), dtypes))
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
