"""Calibrate a model in a process of its own, with a folder to continue from; prints a line when it starts."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import auto

WIDTH = 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main(folder: str, result: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, 16))
    blocks = model[1]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model[0](x)
        for block in blocks:
            x = block(x)
        return model[2](x)

    recipe = auto(qtorch.intx_weight_only("int3", group_size=16), list(torch.randn(8, 64, 16)), forward=forward)
    print("started", flush=True)
    qtorch.quantize_(model, recipe, resume=folder)
    qtorch.save_quantized(model, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
