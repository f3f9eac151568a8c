"""Convolutions in training with the state of quantization in them; see `layers.linear`.

An input with one scale is quantized first, and its codes are gathered. Where scales are dynamic, each window has one of
its own, and is quantized after it is gathered, as in inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....dtypes import ConvWeight, QuantizedTensor
from ....dtypes.conv import convolution
from ....kernels.im2col import Window, from_matrix, to_matrix
from ..fake_quantize import fake_quantized_conv
from .linear import LAYERS, FakeQuantizedLayer


class FakeQuantizedConv(FakeQuantizedLayer):
    """Base of the three."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any

    @classmethod
    def to_matrix(cls, module: nn.Module, weight: Tensor) -> Tensor:
        return to_matrix(weight)

    @classmethod
    def from_matrix(cls, module: nn.Module, matrix: Tensor, shape: torch.Size) -> Tensor:
        return from_matrix(matrix, shape).contiguous()

    def convert(self) -> Tensor:
        matrix = super().convert()
        assert isinstance(matrix, QuantizedTensor)
        return ConvWeight.of(matrix, self.weight.shape)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            ends: Any = self._reversed_padding_repeated_twice
            input, padding = functional.pad(input, ends, mode=self.padding_mode), 0
        ndim = weight.dim() - 2
        conv = convolution(ndim, f"conv{ndim}d", self._convolve)
        y = conv(input, weight, bias, self.stride, padding, self.dilation, self.groups)
        self.advance()
        return y

    def _convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        return self.convolve(input, window, bias)

    def convolve(self, input: Tensor, window: Window, bias: Tensor | None) -> Tensor:
        """The convolution of the fake-quantized operands."""
        return fake_quantized_conv(input, self.matrix, bias, self, window)


class FakeQuantizedConv1d(FakeQuantizedConv, nn.Conv1d):
    """`nn.Conv1d` in training."""

    float_class = nn.Conv1d


class FakeQuantizedConv2d(FakeQuantizedConv, nn.Conv2d):
    """`nn.Conv2d` in training."""

    float_class = nn.Conv2d


class FakeQuantizedConv3d(FakeQuantizedConv, nn.Conv3d):
    """`nn.Conv3d` in training."""

    float_class = nn.Conv3d


LAYERS.update({cls.float_class: cls for cls in (FakeQuantizedConv1d, FakeQuantizedConv2d, FakeQuantizedConv3d)})
