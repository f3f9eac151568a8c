"""A step of Adam on CUDA, by Triton: one launch a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.flat_blocks import FlatBlocks
from .. import features
from ..custom_ops import implement, note
from ..ops.adam import AdamStep, Moment
from ..ops.adam_check import LARGEST_SCALE, check_step


@implement("adam_step", "cuda", where=features.cuda_lacks("triton") is None)
def triton_adam_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """See `adam_step`."""
    from .triton.adam import adam

    check_step(weight, grad, moments, blocks, step)
    note("adam_step.triton")
    adam(weight, grad, moments, blocks, step, LARGEST_SCALE[step.form])
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
