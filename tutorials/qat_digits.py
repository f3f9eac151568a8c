"""A small ResNet on handwritten digits, in fewer and fewer bits: after training, in training, and with learned steps.

    python -m tutorials.qat_digits              the table, and docs/guides/qat_digits.png; a few minutes
    python -m tutorials.qat_digits --short      a few batches of each, to see that it runs

The images are scikit-learn's, 8 x 8 pixels; nothing is downloaded. Weights and activations of all layers but the first
and the last, which have 8 bits, are quantized three ways, from the same model:

    float   that model
    PTQ     quantized after training: the range of each tensor is that with the least squared error
    QAT     trained on with fake quantization; ranges follow the weights and the activations
    LSQ     the same, and the steps of weights and activations are parameters (arXiv 1902.08153)

What is evaluated is the converted model: integers of that many bits, multiplied and summed as integers.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import LinearSpec, MappingType, PackedLayout, PerTensor, QuantSpec, quantize_
from qtorch.calibration import moving_average
from qtorch.primitives import MSERule
from qtorch.recipes.base import Recipe, WeightRecipe, register_recipe
from qtorch.training import calibrate, convert, lsq, parameter_groups, qat

BITS = (8, 4, 3, 2)
LAYERS = r"stem|head|blocks\.\d\.(conv1|conv2|shortcut)"
"""Convolutions are quantized where a key names them."""


# --- the model and the data ---


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


@dataclass
class Digits:
    """Half of the images to train on, half to test; the same for every seed of a model."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls) -> Digits:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x, y = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(bunch.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        train, test = order.tensor_split(2)
        return cls(x[train], y[train], x[test], y[test])

    def batches(self, epochs: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """In random order, each image moved by up to a pixel."""
        for _ in range(epochs):
            for index in torch.randperm(len(self.train_y)).split(size):
                x = functional.pad(self.train_x[index], (1, 1, 1, 1))
                top, left = torch.randint(3, (2,)).tolist()
                yield x[:, :, top : top + 8, left : left + 8], self.train_y[index]


def train(model: nn.Module, data: Digits, epochs: int, lr: float, limit: int | None = None) -> nn.Module:
    """AdamW, the rate falling to zero; learned steps have no weight decay."""
    optimizer = torch.optim.AdamW(parameter_groups(model, lr, weight_decay=1e-2))
    batches = list(data.batches(epochs))[:limit]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], len(batches))
    model.train()
    for x, y in batches:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Of the test images, %."""
    return 100 * (model(data.test_x).argmax(1) == data.test_y).float().mean().item()


# --- the three ways ---


@register_recipe("few_bits")
@dataclass(frozen=True)
class FewBits(WeightRecipe):
    """A recipe of one's own: weights in `bits` per output channel, activations in `bits` with one range, which is
    observed in training. What trains it, converts it and runs it follows from the spec."""

    bits: int

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(f"int{self.bits}", scale_rule=MSERule(steps=9, smallest=0.2))
        high = 2 ** (self.bits - 1) - 1
        activation = QuantSpec("int8", PerTensor(), MappingType.ASYMMETRIC, quant_min=-high - 1, quant_max=high)
        return LinearSpec(weight, activation, static=True, layout=PackedLayout() if self.bits < 8 else None)


def with_ptq(model: nn.Module, bits: int, data: Digits) -> nn.Module:
    quantize_(model, {LAYERS: lsq(bits, bits, edge_bits=8)})
    calibrate(model, data.train_x.split(256))
    quantize_(model, convert())
    return model


def with_qat(model: nn.Module, bits: int, data: Digits, epochs: int, limit: int | None) -> nn.Module:
    def recipe(bits: int) -> Recipe:
        return qat(FewBits(bits), observer=moving_average(0.1))

    quantize_(model, {"stem|head": recipe(8), LAYERS: recipe(bits)})
    calibrate(model, data.train_x.split(256))
    train(model, data, epochs, 2e-3 / bits, limit)
    quantize_(model, convert())
    return model


def with_lsq(model: nn.Module, bits: int, data: Digits, epochs: int, limit: int | None) -> nn.Module:
    quantize_(model, {LAYERS: lsq(bits, bits, edge_bits=8)})
    calibrate(model, data.train_x.split(256))
    train(model, data, epochs, 2e-3 / bits, limit)
    quantize_(model, convert())
    return model


# --- the table and the plot ---


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few batches, two widths, no plot")
    parser.add_argument("--seeds", type=int, default=1, help="models to average over")
    parser.add_argument(
        "--epochs", type=int, default=25, help="of each training with quantization; half of those in floating point"
    )
    parser.add_argument("--plot", type=Path, default=Path(__file__).parents[1] / "docs" / "guides" / "qat_digits.png")
    options = parser.parse_args(arguments)
    bits, limit, seeds = ((8, 2), 8, 1) if options.short else (BITS, None, options.seeds)
    data, table = Digits.load(), {"float": [0.0] * len(bits)}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = train(ResNet(), data, 2 * options.epochs, 1e-2, limit)
        for i, b in enumerate(bits):
            found = {
                "float": model,
                "PTQ": with_ptq(copy.deepcopy(model), b, data),
                "QAT": with_qat(copy.deepcopy(model), b, data, options.epochs, limit),
                "LSQ": with_lsq(copy.deepcopy(model), b, data, options.epochs, limit),
            }
            for name, it in found.items():
                table.setdefault(name, [0.0] * len(bits))[i] += accuracy(it, data) / seeds
            print(
                f"seed {seed}, {b} bits: " + ", ".join(f"{name} {accuracy(it, data):.2f}" for name, it in found.items())
            )
    print("accuracy, %  " + "".join(f"{b:>5} bits" for b in bits))
    for name, row in table.items():
        print(f"{name:<13}" + "".join(f"{value:>10.2f}" for value in row))
    if not options.short:
        plot(table, bits, options.plot)
    return table


def plot(table: dict[str, list[float]], bits: tuple[int, ...], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name, row in table.items():
        axes.plot(range(len(bits)), row, "--" if name == "float" else "o-", label=name)
    axes.set_xticks(range(len(bits)), [f"{b}" for b in bits])
    axes.set(xlabel="bits of weights and activations", ylabel="accuracy, %", title="ResNet on digits")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    main()
