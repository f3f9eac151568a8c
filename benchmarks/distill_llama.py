"""Distillation of a small Llama: what a quantized model gains from its float model as a teacher, at equal steps.

A Llama is trained on the source of Python's standard library, read as bytes, in floating point. From there it is
trained for what will be served, by `qat` on the labels, and by `qat` with the float model as teacher: its logits, or
the 16 most likely tokens of 256, hidden states, and labels beside it. On the validation text: the divergence from the
float model, in nats a byte, and the perplexity, of the converted model.

    python -m benchmarks.distill_llama [--size 1M] [--seeds 3] [--steps 800] [--more 200] [--save]
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from benchmarks.common import save
from benchmarks.pretrain_llama import SIZES, Text, make_model, read_text
from qtorch.recipes.base import WeightRecipe
from qtorch.training import (
    Distillation,
    Teacher,
    TopLogits,
    convert,
    distill,
    distillation_loss,
    parameter_groups,
    qat,
)

SCHEMES: dict[str, WeightRecipe] = {
    "int4 g32, int8 activations": qtorch.int8_dynamic_activation_int4_weight(group_size=32),
    "int3 g32": qtorch.intx_weight_only("int3", group_size=32),
    "int2 g32": qtorch.intx_weight_only("int2", group_size=32),
}
LAYERS = r"model\.layers\.\d+"
SIZE = (64, 192, 2, 2)
"""Of `pretrain_llama.SIZES`; blocks of 32 divide all of them."""


@dataclass(frozen=True)
class Method:
    """How a model is trained: by a teacher, or by its `most` likely tokens, and the loss of labels times `labels`."""

    distillation: Distillation | None = None
    labels: float = 0.0
    most: int | None = None


METHODS = {
    "qat": Method(labels=1.0),
    "qat, teacher": Method(Distillation()),
    "qat, teacher and labels": Method(Distillation(), labels=1.0),
    "qat, teacher and hidden states": Method(Distillation(hidden=1.0)),
    "qat, 16 tokens of the teacher": Method(Distillation(), most=16),
    "qat, 16 tokens of the teacher and labels": Method(Distillation(), labels=1.0, most=16),
}


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "head" not in name


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, method: Method, teacher: Teacher | None) -> Tensor:
    loss, logits = torch.zeros(()), None
    if method.distillation is not None:
        assert teacher is not None
        learns_from = TopLogits.of(teacher(inputs)[0].logits, method.most) if method.most else teacher
        loss, output = distill(model, learns_from, method.distillation, input_ids=inputs)
        logits = output.logits
    if method.labels:
        logits = model(inputs).logits if logits is None else logits
        loss = loss + method.labels * functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss


def train(
    model: nn.Module,
    text: Text,
    options: Any,
    first: int,
    steps: int,
    lr: float,
    method: Method = METHODS["qat"],
    teacher: Teacher | None = None,
) -> None:
    """By AdamW with a warm-up and a cosine to a tenth."""
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr), betas=(0.9, 0.95))
    for step in range(steps):
        rate = lr * min((step + 1) / (steps // 10), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = text.batch(options.seed, first + step, options.rows, options.length)
        loss = loss_of(model, inputs, targets, method, teacher)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def measure(model: nn.Module, teacher: Teacher, text: Text, options: Any) -> tuple[float, float]:
    """(divergence from the teacher, perplexity)."""
    model.eval()
    sums = torch.zeros(2)
    batches = text.validation_batches(options.batches, options.rows, options.length)
    for inputs, targets in batches:
        logits, wanted = model(inputs).logits, teacher(inputs)[0].logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        sums += torch.stack([distillation_loss(logits, wanted), loss])
    divergence, loss = (sums / len(batches)).tolist()
    return divergence, math.exp(loss)


def learn(text: Text, options: Any) -> dict[str, tuple[float, float]]:
    torch.manual_seed(options.seed)
    start = make_model(options.size, options.length, extra_norms=False)
    train(start, text, options, 0, options.steps, 3e-3)
    teacher = Teacher(start, LAYERS)
    found = {"float": measure(start, teacher, text, options)}
    for name, serves in SCHEMES.items():
        served = copy.deepcopy(start)
        qtorch.quantize_(served, serves, is_quantized)
        found[f"{name}: quantized"] = measure(served, teacher, text, options)
        for title, method in METHODS.items():
            model = copy.deepcopy(start)
            qtorch.quantize_(model, qat(serves), is_quantized)
            train(model, text, options, options.steps, options.more, options.more_lr, method, teacher)
            qtorch.quantize_(model, convert())
            found[f"{name}: {title}"] = measure(model, teacher, text, options)
            print(options.seed, f"{name}: {title}", *found[f"{name}: {title}"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--more", type=int, default=200)
    parser.add_argument("--more-lr", type=float, default=5e-4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/distill_llama.json")
    options = parser.parse_args()
    SIZES["small"] = SIZE
    text, rows = read_text(None), []
    for seed in range(options.seeds):
        options.seed = seed
        rows += [
            {"seed": seed, "run": name, "divergence": kl, "perplexity": ppl}
            for name, (kl, ppl) in learn(text, options).items()
        ]
    for name in dict.fromkeys(row["run"] for row in rows):
        of_run = [row for row in rows if row["run"] == name]
        print(f"{name:55s}", *(f"{row['divergence']:.4f} {row['perplexity']:.3f}" for row in of_run), sep="   ")
    if options.save:
        save("distill_llama", rows)


if __name__ == "__main__":
    main()
