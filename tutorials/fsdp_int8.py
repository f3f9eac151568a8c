"""FSDP2 and INT8 training: a model in shards, stopped and continued by another number of processes.

    torchrun --nproc-per-node=2 -m tutorials.fsdp_int8 --checkpoint /tmp/run                   a minute or two on a CPU
    torchrun --nproc-per-node=1 -m tutorials.fsdp_int8 --checkpoint /tmp/run --resume 30       the second half again
    torchrun --nproc-per-node=2 -m tutorials.fsdp_int8 --checkpoint /tmp/run --short           a few steps

    --weights float     weights in fp32, gathered in fp32; their products in INT8 (int8_mixed_precision_training)
    --weights int8      weights that are held, gathered and updated as codes (int8_weight_only_quantized_training)

Each process holds a shard of every weight, its gradient and the states of the optimizer, here 8-bit ones, and has a
part of the rows of a batch. Half way and at the end, all of it is written by torch.distributed.checkpoint. What goes on
from there, on any number of processes, has the losses of the run that was not stopped, but for the order of sums, and,
with codes as weights, for the noise of their rounding, which depends on the shards.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from qtorch import quantize_
from qtorch.training import AdamW8bit, int8_mixed_precision_training, int8_weight_only_quantized_training

from .small_gpt import SmallGPT, batch, is_in_block, loss_of

RECIPES = {"float": int8_mixed_precision_training(), "int8": int8_weight_only_quantized_training()}

ROWS = 16
"""Of a batch; the number of processes divides it."""


def say(*words: Any) -> None:
    """Print, in the first process."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def sharded(weights: str, blocks: int) -> SmallGPT:
    """The model, quantized and then sharded: each block on its own, so that one at a time is gathered."""
    torch.manual_seed(0)
    model = SmallGPT(blocks=blocks)
    quantize_(model, RECIPES[weights], is_in_block)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def bytes_of(model: SmallGPT) -> int:
    """Bytes of the weights that this process holds."""
    weights: Any = model.parameters()
    return sum(weight.to_local().nbytes for weight in weights)


def train_step(model: SmallGPT, optimizer: AdamW8bit, step: int) -> float:
    """The loss of a step over the rows of all processes."""
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step, ROWS))
    loss = loss_of(model(inputs), targets)
    loss.backward()  # FSDP2 gives each process the mean gradient of its shards
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save(model: SmallGPT, optimizer: AdamW8bit, folder: str) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model: SmallGPT, optimizer: AdamW8bit, folder: str) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=RECIPES, default="float")
    parser.add_argument("--checkpoint", required=True, help="folder that all processes see")
    parser.add_argument("--resume", type=int, default=0, metavar="STEP", help="from what was saved after that step")
    parser.add_argument("--short", action="store_true", help="a few steps")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("run it by torchrun --nproc-per-node=2 -m tutorials.fsdp_int8")
    # About in-place changes of the logits, which there are none of.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo")

    model = sharded(options.weights, 1 if options.short else 3)
    optimizer = AdamW8bit(model.parameters(), lr=2e-3)
    say(f"processes: {dist.get_world_size()}; bytes of weights in each: {bytes_of(model):,}")
    steps = 6 if options.short else 60
    if options.resume:
        load(model, optimizer, f"{options.checkpoint}/step-{options.resume}")
    for step in range(options.resume, steps):
        loss = train_step(model, optimizer, step)
        if (step + 1) % (steps // 6) == 0:
            say(f"step {step + 1:2}: loss {loss:.5f}")
        if step + 1 in (steps // 2, steps):
            save(model, optimizer, f"{options.checkpoint}/step-{step + 1}")

    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may outlive it


if __name__ == "__main__":
    main()
