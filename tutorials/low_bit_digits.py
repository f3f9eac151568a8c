"""Training in 1 and 4 bits on handwritten digits, with the presets of research papers.

    python -m tutorials.low_bit_digits              the table; three minutes
    python -m tutorials.low_bit_digits --short      a few batches of each, to see that it runs

    float     full precision
    int4      weights and activations of 4 bits (arXiv 2105.03536), 8 in the first and the last layer
    binary    weights and activations of 1 bit, as in PokeBNN (arXiv 2112.00133), 8 in the first and the last layer

Each is trained from the start, without a float model before it. A binary network has no ReLU before a convolution,
whose sign would tell nothing: a block is convolution, batch norm, PReLU, plus its input, and batch norm again. What is
evaluated is the converted model. Images and the training loop are those of `qat_digits`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import quantize_
from qtorch.recipes.base import Recipe
from qtorch.training import binary_training, convert, int4_training

from .qat_digits import Digits, accuracy, train

CONVOLUTIONS = r"stem|head|blocks\.\d"
"""Convolutions are quantized where a key names them."""


class Block(nn.Conv2d):
    """A 3 x 3 convolution whose output is added to its input, averaged and repeated where the sizes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1, self.activation = nn.BatchNorm2d(outputs), nn.PReLU(outputs)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm1(super().forward(x)))
        if self.stride[0] > 1:
            x = functional.avg_pool2d(x, 2)
        return self.norm2(y + x.repeat(1, y.shape[1] // x.shape[1], 1, 1))


class PokeNet(nn.Module):
    """A small network in the manner of PokeBNN."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x))).mean((2, 3)))


PRESETS: dict[str, Recipe | None] = {"float": None, "int4": int4_training(), "binary": binary_training(bound=1.5)}


def trained(name: str, data: Digits, epochs: int, width: int = 16, limit: int | None = None) -> nn.Module:
    """A network trained by a preset, and converted."""
    model, recipe = PokeNet(width), PRESETS[name]
    if recipe is not None:
        quantize_(model, {CONVOLUTIONS: recipe})
    train(model, data, epochs, 1e-2, limit)
    if recipe is not None:
        quantize_(model, convert())
    return model


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few batches of each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args(arguments)
    data = Digits.load()
    table: dict[str, list[float]] = {name: [] for name in PRESETS}
    for seed in range(1 if options.short else options.seeds):
        for name, row in table.items():
            torch.manual_seed(seed)
            model = trained(name, data, options.epochs, 8 if options.short else 16, 8 if options.short else None)
            row.append(accuracy(model, data))
        print(f"seed {seed}: " + ", ".join(f"{name} {row[-1]:.2f}" for name, row in table.items()))
    for name, row in table.items():
        print(f"{name:<8} {sum(row) / len(row):.2f} % ({min(row):.2f} to {max(row):.2f})")
    return table


if __name__ == "__main__":
    main()
