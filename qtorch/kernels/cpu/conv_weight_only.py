"""Convolution with an integer weight and a floating-point activation.

    y = conv(x, dequantize(w)) + bias

For fp32 images and int8 weights with a scale per output channel it is compiled: the weight is converted a block at a
time, into the cache. Otherwise it is torch's, of the weight in floating point: dequantized on each call, into memory
that calls share, or once, where `qtorch.config.float_copy_bytes` has room for a copy.
"""

import math
import threading
from typing import Any

import torch
from torch import Tensor

from ...primitives import is_compiling, qdtype
from ..conv import CONVOLUTIONS, Window, empty_result, from_matrix, in_order, is_channels_last, with_bias
from ..custom_ops import Name, note, opaque, recording
from ..registry import Problem, needs_floats, split_bias
from . import weight, weight_only
from .conv_prepared import CompiledConv, calls_of, prepare
from .float_copies import float_copy, wanted
from .memory import empty

SHARED_BYTES = 64 << 20  # largest weight whose floating-point form is in memory that the calls of a thread share

_memory = threading.local()


@opaque(
    lambda x, codes, scale, zero_point, packed, dtype, low, high, domain, shape, *about: empty_result(
        x, shape[0], Window(tuple(shape[2:]), *about[:4]), x.dtype
    )
)
def cpu_weight_only_conv(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None,
    packed: bool, dtype: Name, low: float, high: float, domain: Name,
    shape: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation, y (B, N, *positions) in the dtype of x, channels last where x is.

    Args:
        x: (B, C, *sizes) fp32, bf16 or fp16.
        codes, scale, zero_point, packed, dtype, low, high, domain: the matrix of the weight, as `cpu_weight_only_mm`
            takes it.
        shape: (N, C / groups, *kernel).
        bias: (N) in the dtype of x, or None.
    """
    n, k = shape[0], math.prod(shape[1:])
    about = codes, scale, zero_point, n, k, dtype, packed, domain, (low + high + 1) / 2
    plain = zero_point is None and not packed and qdtype(dtype).is_signed and (groups == 1 or shape[1] % 4 == 0)
    if plain and x.dtype is torch.float32 and len(shape) < 5:
        layer = CompiledConv.of(codes, scale, None, n, k, dtype, False, "INT", 0.0, tuple(shape), groups)
        if layer.compiled is not None:
            window = Window(tuple(shape[2:]), tuple(stride), tuple(padding), tuple(dilation), groups)
            return _direct(x, layer, window, n, bias)
    if shape[1] == 1 and x.numel():
        kept = ChannelwiseConv.of(*about, tuple(shape), x.dtype)
        if kept.values is not None:
            note("cpu_weight_only_conv.kept")
            return kept.run(x, bias, stride, padding, dilation, groups)
    stored = weight.CompiledWeight.of(*about)
    if stored.compiled is None:
        raise RuntimeError("cpu_weight_only_conv: the compiled kernels do not read these tensors")
    made = weight_only.Dequantized(stored.compiled, stored.fields, n, k, x.dtype)
    size, last = n * k * x.element_size(), is_channels_last(x)

    # In the order of x, in which torch's result is too.
    ordered = lambda values: values if last else in_order(values)  # noqa: E731
    make = lambda: ordered(from_matrix(made.rows(), shape))  # noqa: E731
    values = float_copy((codes, scale, zero_point), x.dtype, make, size) if wanted() else None
    note(f"cpu_weight_only_conv.{'float_copy' if values is not None else 'torch'}")
    if values is None:
        rows = made.rows(out=_shared(size).view(x.dtype).view(n, k)) if size <= SHARED_BYTES else made.rows()
        values = from_matrix(rows, shape)
    return _convolve(x, ordered(values), bias, stride, padding, dilation, groups)  # a copy may be in the other order


def _convolve(x: Tensor, values: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """By torch, in the order that `empty_result` says, whatever torch sees in the strides of x."""
    y = CONVOLUTIONS[x.dim() - 2](x, values, bias, *options)
    return y if is_channels_last(x) else y.contiguous()


class ChannelwiseConv(weight.CompiledWeight):
    """The weight of a convolution with one input channel in each group, in floating point: it is so small a part of a
    model that it is kept, and torch's convolution called. `values` (N, 1, *kernel) are None if the compiled kernels do
    not read the codes."""

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are the shape of the weight and the dtype of x."""
        super().__init__(codes, scale, zero_point, *about)
        n, k, shape, self._dtype = *about[:2], *about[-2:]
        self.values = self._last = None
        if self.compiled is not None:
            rows = weight_only.Dequantized(self.compiled, self.fields, n, k, self._dtype).rows()
            # One channel lies in either order: its strides tell torch in which the result shall be.
            self.values, self._last = rows.view(shape), from_matrix(rows, shape)

    def run(self, x: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
        """y (B, N, *positions)."""
        values = self._last if is_channels_last(x) else self.values
        assert values is not None
        return _convolve(x, values, bias, stride, padding, dilation, groups)

    def conv(
        self, x: Tensor, weight: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor | None:
        """The convolution with the weight that this was made from; None if torch's would not be the same."""
        if (
            x.dtype is not self._dtype
            or x.dtype is not weight.scheme.dtype
            or not (x.is_cpu and x.numel() and x.shape[1] == groups and isinstance(padding, tuple))
            or not (bias is None or bias.dtype is x.dtype)
            or not self.is_of(weight.qdata, weight.scale, weight.zero_point)
        ):
            return None
        return self.run(x, bias, stride, padding, dilation, groups)

    @classmethod
    def prepare(cls, weight: Any) -> None:
        """Let the next convolution with this weight call `conv` at once."""
        made = cls.made_of(weight.qdata)
        if made is not None and made.values is not None and made.is_of(weight.qdata, weight.scale, weight.zero_point):
            vars(weight)["fast_conv"] = made.conv


def _direct(x: Tensor, layer: CompiledConv, window: Window, n: int, bias: Tensor | None) -> Tensor:
    """By src/conv_float.h."""
    y = empty_result(x, n, window, x.dtype)
    if not x.numel() or not y.numel():
        return with_bias(y.zero_(), bias)
    if recording():
        assert layer.compiled is not None
        note(f"cpu_weight_only_conv.{layer.compiled.instruction_set}")
    return calls_of(layer, n, None).run(x, bias, window)


def _shared(size: int) -> Tensor:
    """`size` bytes of this thread."""
    memory: Tensor | None = getattr(_memory, "bytes", None)
    if memory is None or memory.numel() < size:
        memory = _memory.bytes = empty((size,), torch.uint8)
    return memory[:size]


def _supports(problem: Problem) -> str | None:
    if reason := needs_floats(problem):
        return reason
    scheme: Any = problem.scheme
    try:
        scheme.weight.block_size(scheme.codes_shape)
    except ValueError:
        return f"takes the scales of a matrix, the weight has {scheme.weight.granularity}"
    return weight.supports(problem._replace(scheme=scheme.matrix))


@weight.register_compiled(
    "conv", activation=(), supports=_supports,
    note="other than int8 per channel in fp32: by torch on the dequantized weight, made on each call, or kept within "
    "qtorch.config.float_copy_bytes", name="cpu_weight_only_conv",
)  # fmt: skip
def _conv(x: Tensor, quantized: Any, bias: Tensor | None, window: Window) -> Tensor:
    scheme, matrix = quantized.scheme, quantized.matrix
    added, bias = split_bias(bias, x, scheme.shape[0])
    _, stride, padding, dilation = map(list, window[:4])
    of_weight = (quantized.qdata, matrix.dense_scale(), matrix.dense_zero_point(), *weight.form(scheme.matrix))
    about = (list(scheme.shape), stride, padding, dilation, window.groups, added)
    y = cpu_weight_only_conv(x, *of_weight, *about)
    if not is_compiling():
        prepare(quantized, None)
        ChannelwiseConv.prepare(quantized)
    return with_bias(y, bias)
