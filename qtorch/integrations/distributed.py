"""DistributedDataParallel around a model with quantized weights.

At its start it sends all parameters of rank 0 to the others, joined to one flat tensor; frozen quantized tensors, such
as the base of adapters, cannot be joined. So it is told to leave them out, and their inner tensors are sent here.

Weights that are trained in codes are rounded stochastically, in the same way on all ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..dtypes import QuantizedTensor
from ..dtypes.ops import count_write
from ..primitives.jsonable import to_json
from ..training.weights.share_rounding import share_rounding


def ignore_frozen(replica: DistributedDataParallel, module: nn.Module) -> None:
    """Exclude the frozen quantized weights of `module` from what `replica`, in construction, sends, and send them.

    Raises:
        ValueError: the weights of another rank are quantized differently.
    """
    parameters: Iterable[tuple[str, Any]] = module.named_parameters(remove_duplicate=False)
    frozen = {
        name: parameter
        for name, parameter in parameters
        if isinstance(parameter, QuantizedTensor) and not parameter.trains
    }
    replica.parameters_to_ignore.update(frozen)
    if _sends_at_start():
        _check_schemes_are_equal(frozen, replica.process_group)
        for parameter in dict.fromkeys(frozen.values()):
            for inner in parameter.inner_tensors.values():
                _send(inner, replica.process_group)
            count_write(parameter)


def round_alike(replica: DistributedDataParallel, module: nn.Module) -> None:
    """Share the noise of the rounding of weights in codes, from a seed that rank 0 draws."""
    if not _sends_at_start():
        return
    device = next(module.parameters()).device
    seed = torch.randint(2**62, (1,), device="cpu").to(device)
    dist.broadcast(seed, group=replica.process_group, group_src=0)
    share_rounding(module, int(seed))


def _sends_at_start() -> bool:
    """The argument `init_sync` of the constructor that is running; with False, no rank waits for another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not DistributedDataParallel.__init__.__code__:
        frame = frame.f_back
    return frame is None or bool(frame.f_locals.get("init_sync", True))


def _check_schemes_are_equal(frozen: dict[str, QuantizedTensor], group: dist.ProcessGroup) -> None:
    digest = hashlib.sha256()
    for name, parameter in frozen.items():
        digest.update(f"{name} {to_json(parameter.scheme)} {list(parameter.inner_tensors)}".encode())
    device = next(iter(frozen.values())).device
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=device)
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, own, group=group)
    if not all(torch.equal(own, other) for other in all_of_them):
        raise ValueError(
            "DistributedDataParallel: the weights of this rank are quantized differently from those of another rank; "
            "quantize or load the same model on every rank"
        )


def _send(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace the elements of `tensor` by those of rank 0. Bytes are sent, so that every dtype can be."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(flat, group=group, group_src=0)
    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
