"""Networks of convolutions in plain torch, with random weights: batch normalization is folded already."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, that of ResNet-18 (He et al., arXiv 1512.03385)."""

    def __init__(self, channels: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, features, 3, stride, 1)
        self.conv2 = nn.Conv2d(features, features, 3, 1, 1)
        self.relu = nn.ReLU()
        self.downsample = nn.Conv2d(channels, features, 1, stride) if stride != 1 or channels != features else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.conv2(self.relu(self.conv1(x))) + shortcut)


class ResNet18(nn.Module):
    """Input (B, 3, H, W), output (B, classes). `width` is 64 in the published network."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for i in range(4):
            blocks += [
                BasicBlock(sizes[i], sizes[i + 1], 1 if i == 0 else 2),
                BasicBlock(sizes[i + 1], sizes[i + 1], 1),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.relu(self.stem(x))))
        return self.head(torch.flatten(self.average(x), 1))


class InvertedResidual(nn.Module):
    """1x1, depthwise 3x3, 1x1: that of MobileNet-V2 (Sandler et al., arXiv 1801.04381)."""

    def __init__(self, channels: int, features: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = [nn.Conv2d(channels, hidden, 1), nn.ReLU6()] if expansion != 1 else []
        layers += [nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden), nn.ReLU6(), nn.Conv2d(hidden, features, 1)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and channels == features

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """Input (B, 3, H, W), output (B, classes). `blocks`: (expansion, features, count, stride), as published."""

    BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, blocks: tuple[tuple[int, int, int, int], ...] = BLOCKS, classes: int = 1000) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU6()]
        for expansion, features, count, stride in blocks:
            for i in range(count):
                layers.append(InvertedResidual(channels, features, stride if i == 0 else 1, expansion))
                channels = features
        layers += [nn.Conv2d(channels, 4 * channels, 1), nn.ReLU6()]
        self.layers = nn.Sequential(*layers)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.average(self.layers(x)), 1))
