"""A tensor subclass that trains: own arithmetic for the forward product and for both products of the backward.

    python -m tutorials.trainable_tensor_subclass            a minute
    python -m tutorials.trainable_tensor_subclass --short    a few steps, to see that it runs

A linear layer that trains multiplies three times:

    output       y  = x @ w.T      forward
    grad_input   dx = g @ w        backward, g the gradient of y
    grad_weight  dw = g.T @ x      backward

`ByHand` is a weight that does all three itself, in an autograd function of ten lines: x in 8 bits and w in 4 bits
forward, g in 8 bits backward. `SPEC` says the same in a `TrainingSpec`, which the engine of qtorch runs on integers.
The tutorial compares the two, product by product, and then trains the same network in floating point, by hand, and by
the spec.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import PerRow, QuantSpec, compute_error
from qtorch.recipes.base import register_recipe
from qtorch.training import GemmSpec, MasterWeight, TrainingSpec
from qtorch.training.recipes.base import TrainingRecipe

X = QuantSpec("int8", PerRow(), quant_min=-127)
W = QuantSpec("int4", PerRow(), quant_min=-7)
G = QuantSpec("int8", PerRow(), quant_min=-127)

# An operand is quantized along the axis that its product sums over, so w is quantized again for the backward.
SPEC = TrainingSpec(
    output=GemmSpec(lhs=X, rhs=W),
    grad_input=GemmSpec(lhs=G, rhs=W),
    grad_weight=GemmSpec(),  # full precision
)


# --- by hand ---


class ThreeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ByHand) -> Tensor:
        w = weight.floats()
        ctx.save_for_backward(x, w)
        return X.fake_quantize(x) @ W.fake_quantize(w).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (x, w) = gradients, ctx.saved_tensors
        grad_input = G.fake_quantize(g) @ W.fake_quantize(w.t()).t()
        grad_weight = g.t() @ x
        return grad_input, grad_weight


class ByHand(MasterWeight):
    """A weight that trains. Optimizers, checkpoints and `state_dict` see the float tensor that it holds; only products
    come here."""

    def linear(self, input: Tensor, bias: Tensor | None) -> Tensor:
        y = ThreeProducts.apply(input.flatten(0, -2), self).unflatten(0, input.shape[:-1])
        return y if bias is None else y + bias


@register_recipe("tutorial_by_hand")
@dataclass(frozen=True)
class ByHandTraining(TrainingRecipe):
    def training_spec(self) -> TrainingSpec:
        return SPEC  # `convert()` reads it: what the forward product becomes after training

    def apply(self, weight: Tensor) -> Tensor:
        return ByHand.of(weight, SPEC)


RECIPES = {"float": None, "by hand": ByHandTraining(), "by the spec": qtorch.training.mixed_precision_training(SPEC)}


# --- the three products ---


def three_products(recipe: Any, layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    if recipe is not None:
        qtorch.quantize_(layer, recipe)
    y = layer(x)
    y.backward(g)
    return {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}


def compare(say: Callable[[str], None]) -> dict[str, tuple[float, float]]:
    """SQNR in dB of each product: against float, and of the two implementations against each other."""
    torch.manual_seed(0)
    layer, x, g = nn.Linear(128, 96), torch.randn(64, 128), torch.randn(64, 96)
    found = {name: three_products(recipe, layer, x, g) for name, recipe in RECIPES.items()}
    say(f"{'SQNR in dB':14}{'spec, float':>14}{'spec, by hand':>16}")
    errors = {}
    for name, exact in found["float"].items():
        by_spec, by_hand = found["by the spec"][name], found["by hand"][name]
        errors[name] = float(compute_error(exact, by_spec)), float(compute_error(by_hand, by_spec))
        say(f"{name:14}{errors[name][0]:14.1f}{errors[name][1]:16.1f}")
    return errors


# --- training ---


def data(count: int) -> tuple[Tensor, Tensor]:
    """Points of ten spirals in the plane, lifted to 32 dimensions by sines."""
    label = torch.randint(10, (count,))
    radius = torch.rand(count)
    angle = 2 * torch.pi * label / 10 + 3 * radius + 0.05 * torch.randn(count)
    point = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    frequencies = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)) * 4
    return torch.cat([(point @ frequencies).sin(), (point @ frequencies).cos()], 1), label


def train(recipe: Any, steps: int, say: Callable[[str], None]) -> tuple[float, float, float]:
    """(first loss, last loss, accuracy in % of the converted model)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    if recipe is not None:
        qtorch.quantize_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x, label = data(256)
        loss = functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            say(f"  step {step:4}   loss {loss.item():.4f}")
    if recipe is not None:
        qtorch.quantize_(model, qtorch.training.convert())
    x, label = data(2000)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == label).float().mean().item() * 100
    return losses[0], losses[-1], accuracy


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few steps, to see that it runs")
    steps = 40 if parser.parse_args(arguments).short else 300
    results: dict[str, Any] = {"products": compare(say)}
    for name, recipe in RECIPES.items():
        say(name)
        results[name] = train(recipe, steps, say)
        say(f"  accuracy {results[name][2]:.1f} %{'' if recipe is None else ' after convert()'}")
    return results


if __name__ == "__main__":
    main()
