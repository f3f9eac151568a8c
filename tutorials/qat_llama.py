"""Quantization-aware training of a small language model: how much of what rounding costs does it win back?

A Llama of 1M parameters is trained on the source of Python's standard library, read as bytes. From there it goes on in
floating point, and, with as many steps more, in training for what will be served. Perplexities are those of the next
byte of the validation text:

    float        after all steps
    PTQ          that model, quantized by the recipe
    QAT          trained by `qat(recipe)` and converted
    LSQ          trained by `lsq(recipe=recipe)`, which learns the scales too, and converted
    recovered    (PTQ - QAT) / (PTQ - float)

    python -m tutorials.qat_llama [--short]
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import qtorch
from benchmarks import pretrain_llama
from benchmarks.pretrain_llama import Text
from qtorch.recipes.base import Recipe, WeightRecipe
from qtorch.training import parameter_groups


@dataclass(frozen=True)
class Scheme:
    """What is served, and the recipes that train for it, by name."""

    serves: WeightRecipe
    trains: dict[str, Recipe] = field(default_factory=dict)


INT4 = qtorch.int8_dynamic_activation_int4_weight(group_size=32)
INT3 = qtorch.intx_weight_only("int3", group_size=32)

SCHEMES = {
    "int8 activations, int4 g32 weights": Scheme(
        INT4, {"QAT": qtorch.training.qat(INT4), "LSQ": qtorch.training.lsq(recipe=INT4)}
    ),
    "int3 g32 weights": Scheme(INT3, {"QAT": qtorch.training.qat(INT3), "LSQ": qtorch.training.lsq(recipe=INT3)}),
}


@dataclass
class Run:
    """Sizes of a run."""

    size: str = "1M"
    length: int = 128
    rows: int = 16
    steps: int = 700
    more_steps: int = 250
    lr: float = 3e-3
    more_lr: float = 5e-4
    batches: int = 12


SHORT = Run("tiny", length=32, rows=2, steps=6, more_steps=3, batches=1)


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "head" not in name


def train(model: nn.Module, text: Text, run: Run, first: int, steps: int, lr: float) -> None:
    """By AdamW, with a warm-up and a cosine to a twentieth of `lr`; the batches are those from `first` on."""
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr), betas=(0.9, 0.95))
    warmup = max(1, steps // 10)
    for step in range(steps):
        progress = max(0, step - warmup) / max(1, steps - warmup)
        rate = lr * min((step + 1) / warmup, 0.525 + 0.475 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = text.batch(0, first + step, run.rows, run.length)
        loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def perplexity(model: nn.Module, text: Text, run: Run) -> float:
    """Of the next byte, on the validation text."""
    model.eval()
    losses = [
        functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        for inputs, targets in text.validation_batches(run.batches, 2 * run.rows, run.length)
    ]
    return math.exp(torch.stack(losses).mean().item())


def learn(run: Run, say: Callable[[str], None] = print) -> dict[str, dict[str, float]]:
    """Perplexities by scheme and by "float", "PTQ" and the names of the training recipes."""
    torch.manual_seed(0)
    pretrain_llama.SIZES.setdefault("tiny", (64, 96, 1, 2))
    text = pretrain_llama.read_text(None, limit=1 << 20 if run is SHORT else 64 << 20)
    start = pretrain_llama.make_model(run.size, run.length, extra_norms=False)
    train(start, text, run, 0, run.steps, run.lr)
    say(f"{'float, ' + str(run.steps) + ' steps':40s}{perplexity(start, text, run):10.4f}")

    model = copy.deepcopy(start)
    train(model, text, run, run.steps, run.more_steps, run.more_lr)
    in_float = perplexity(model, text, run)
    say(f"{'float, ' + str(run.more_steps) + ' more':40s}{in_float:10.4f}")
    results = {}
    for name, scheme in SCHEMES.items():
        quantized = copy.deepcopy(model)
        qtorch.quantize_(quantized, scheme.serves, is_quantized)
        results[name] = found = {"float": in_float, "PTQ": perplexity(quantized, text, run)}
        say(f"{name + ', PTQ':40s}{found['PTQ']:10.4f}")
        for method, recipe in scheme.trains.items():
            trained = copy.deepcopy(start)
            qtorch.quantize_(trained, recipe, is_quantized)
            train(trained, text, run, run.steps, run.more_steps, run.more_lr)
            prepared = perplexity(trained, text, run)
            qtorch.quantize_(trained, qtorch.training.convert())
            found[method] = perplexity(trained, text, run)
            if abs(found[method] - prepared) > 1e-4 * prepared:
                raise AssertionError(f"{name}, {method}: {prepared} became {found[method]} by conversion")
            recovered = (found["PTQ"] - found[method]) / (found["PTQ"] - in_float)
            say(f"{name + ', ' + method:40s}{found[method]:10.4f}   recovered {recovered:.0%}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a smaller model and few steps, to see it run")
    learn(SHORT if parser.parse_args().short else Run())


if __name__ == "__main__":
    main()
