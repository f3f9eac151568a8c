"""Tensor parallelism with quantized layers: two processes compute what one does.

    torchrun --nproc-per-node=2 -m tutorials.tensor_parallel              a minute or two on a CPU
    torchrun --nproc-per-node=2 -m tutorials.tensor_parallel --short      a few steps, to see that it runs

The blocks of a small transformer are cut: queries, keys, values and the first layer of the MLP by columns, so that each
process has some of the heads and of the features, and the layers after them by rows. Every process sees all rows.

1. Training in INT8, on all processes and, beside it, in each of them alone. A process sees a part of most rows and
   columns that have one scale; the scales are those of the whole ones, and sums of integers are added up before they
   are scaled. So losses and weights are equal to the last bit.
2. Serving the trained model with frozen INT8 weights: quantize, then cut. Here scaled sums are added up, which differs
   in the last bits; where that tips the rounding of an activation in a later layer, by a step of its codes.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from qtorch import quantize_
from qtorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from qtorch.training import convert, int8_mixed_precision_training

from .small_gpt import SmallGPT, batch, is_in_block, loss_of


def say(*words: Any) -> None:
    """Print, in the first process."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def cut(model: SmallGPT, mesh: Any) -> None:
    """Leave each process its part of the layers in the blocks."""
    columns = ["attention.query", "attention.key", "attention.value", "up"]
    rows = ["attention.out", "down"]
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps):
        inputs, targets = batch(step, rows=16)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, Any]:
    """All weights, as one process has them."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def numbers(weight: Any) -> Tensor:
    return weight.floats() if hasattr(weight, "floats") else weight


def held(model: nn.Module) -> int:
    """Elements of the weights in the blocks that this process has."""
    weights: Any = [p for name, p in model.named_parameters() if "blocks" in name]
    return sum((w.to_local() if hasattr(w, "to_local") else w).numel() for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("run it by torchrun --nproc-per-node=2 -m tutorials.tensor_parallel")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)

    # 1. Training
    blocks, steps = (1, 4) if options.short else (3, 60)
    model = SmallGPT(blocks=blocks)
    quantize_(model, int8_mixed_precision_training(), is_in_block)
    alone = copy.deepcopy(model)
    cut(model, mesh)
    say(f"each of {mesh.size()} processes has {held(model) / held(alone):.0%} of the weights in the blocks")
    losses = [train(m, steps) for m in (model, alone)]
    for step in (0, steps // 2, steps - 1):
        say(f"step {step + 1:2}: loss {losses[0][step]:.6f}, in one process {losses[1][step]:.6f}")
    pairs = zip(whole(model).values(), alone.state_dict().values(), strict=True)
    say(f"largest difference of a weight: {max((numbers(a) - numbers(b)).abs().max().item() for a, b in pairs)}")

    # 2. Serving
    served = SmallGPT(blocks=blocks)
    quantize_(served, int8_mixed_precision_training(), is_in_block)
    served.load_state_dict(whole(model))
    quantize_(served, convert())
    served.requires_grad_(False)
    expected = served(batch(1000, rows=4)[0])
    cut(served, mesh)
    got = served(batch(1000, rows=4)[0])
    say(f"frozen, in INT8: logits differ by {(got - expected).norm() / expected.norm():.1e} from one process")

    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may outlive it


if __name__ == "__main__":
    main()
