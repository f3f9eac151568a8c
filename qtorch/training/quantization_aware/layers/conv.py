"""Convolutions in training with the state of quantization in them; see `fake_quantized_layers`.

An input with one scale is quantized first, and the codes are gathered (`served_conv`). Where scales are dynamic, each
window has one of its own, and is quantized after it is gathered, as it is when the weight serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....dtypes import ConvWeight, QuantizedTensor
from ....kernels.im2col import Window, from_matrix, multiply_windows, prepare_conv, to_matrix
from ....primitives.non_finite import with_non_finite
from ..served_conv import rows_of, served_conv
from ..served_linear import served_linear
from .linear import LAYERS, FakeQuantizedLayer


class FakeQuantizedConv(FakeQuantizedLayer):
    """Base of the three."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any
    bias: Tensor | None

    @classmethod
    def to_matrix(cls, module: nn.Module, weight: Tensor) -> Tensor:
        return to_matrix(weight)

    @classmethod
    def from_matrix(cls, module: nn.Module, matrix: Tensor, shape: torch.Size) -> Tensor:
        return from_matrix(matrix, shape).contiguous()

    def served_weight(self) -> Tensor:
        matrix = super().served_weight()
        assert isinstance(matrix, QuantizedTensor)
        return ConvWeight.of(matrix, self.weight.shape)

    def _forward(self, input: Tensor) -> Tensor:
        ndim = self.weight.dim() - 2
        if input.dim() == ndim + 1:
            return self._forward(input.unsqueeze(0)).squeeze(0)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            ends: Any = self._reversed_padding_repeated_twice
            input, padding = functional.pad(input, ends, mode=self.padding_mode), 0
        name, shape = f"conv{ndim}d", self.weight.shape
        input, window = prepare_conv(ndim, input, shape, self.stride, padding, self.dilation, self.groups, name)
        y = self.convolve(input, window, None if self.bias is None else self.bias.to(input.dtype))
        self.advance()
        return y

    def convolve(self, input: Tensor, window: Window, bias: Tensor | None) -> Tensor:
        """The convolution of the fake-quantized operands."""
        if self.input_quantizer is not None and not self.input_quantizer.is_static:
            return self._by_windows(input, window, bias)
        images = input.flatten(1)
        x, w = self.quantize_input(images), self.quantize_weight()
        of_x, of_w = self.operands(images, x, w)
        values = self.from_matrix(self, w.values, self.weight.shape).to(input.dtype)
        if of_x is None:
            return served_conv(x.values.reshape(input.shape), values, bias, window)
        assert x.scale is not None
        assert of_x.scale is not None
        of_images = of_x.scale.reshape(-1, *(1,) * (input.dim() - 1))
        # Windows have one scale; that of an image says whether it holds a NaN or an infinity.
        codes, scale = of_x.values.reshape(input.shape), x.scale.detach()
        of_x = of_x._replace(values=codes, scale=scale, zero_point=x.zero_point)
        y = served_conv(x.values.reshape(input.shape), values, bias, window, of_x, of_w)
        return with_non_finite(y, of_images.to(y.dtype))

    def _by_windows(self, input: Tensor, window: Window, bias: Tensor | None) -> Tensor:
        w = self.quantize_weight()
        parts = w.values.chunk(window.groups)

        def run(rows: Tensor, group: int) -> Tensor:
            x = self.quantize_input(rows)
            of_x, of_w = self.operands(rows, x, w)
            of_w = None if of_w is None else rows_of(of_w, group, window.groups)
            return served_linear(x.values, parts[group], None, of_x, of_w)

        y = multiply_windows(input, window, run)
        return y if bias is None else y + bias.reshape(-1, *(1,) * len(window.kernel))


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
