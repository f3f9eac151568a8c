"""A step of Adam, compiled: one pass over the parameter, its gradient and its moments."""

import torch
from torch import Tensor

from ...primitives.granularity import FlatBlocks
from ..custom_ops import implement, note, portable
from ..ops.adam import LARGEST_SCALE, AdamStep, Moment, adam_step, check_step
from .compiled_library import TYPES, library, threads
from .memory import address
from .structs import Adam, struct_of

_pack = struct_of(Adam).pack

FORM_NUMBERS = {"32": 0, "8": 1, "4": 2, "float8": 3}  # as in src/adam.h


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
    pointers = [address(part) for moment in moments for part in moment]
    pointers += [0] * (6 - len(pointers))
    compiled.adam(_pack(
        address(weight), TYPES[weight.dtype], address(grad), TYPES[grad.dtype], *blocks, FORM_NUMBERS[step.form],
        *pointers, step.beta1, step.beta2, 1 - step.beta1, 1 - step.beta2, step.eps, step.decay, step.l2,
        step.step_size, step.correction, LARGEST_SCALE[step.form],
        step.key is not None and weight.dtype == torch.bfloat16, step.key or 0, step.first, threads(),
    ))  # fmt: skip
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
