"""Convolution with an integer weight and a floating-point activation: torch's, of the weight in floating point.

    y = conv(x, dequantize(w)) + bias

The weight is dequantized on each call, into memory that calls share, or once, where `qtorch.config.float_copy_bytes`
has room for a copy. Its matrix is the weight in channels-last order.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from ..conv import CONVOLUTIONS
from ..custom_ops import note, opaque, recording
from ..im2col import Window, from_matrix, is_channels_last
from ..image_conv import empty_result
from ..linear.int8_scaled import INTEGERS
from ..registry import Problem, register
from . import weight
from .compiled_library import library
from .float_copies import float_copy, wanted
from .weight_only import Dequantized

SHARED_BYTES = 64 << 20
"""Largest weight whose floating-point form is in memory that the calls of a thread share."""

_memory = threading.local()


@opaque(
    lambda x, codes, scale, zero_point, packed, dtype, low, high, domain, shape, *about: empty_result(
        x, shape[0], Window(tuple(shape[2:]), *about[:4]), x.dtype
    )
)
def cpu_weight_only_conv(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    packed: bool,
    dtype: str,
    low: float,
    high: float,
    domain: str,
    shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: Tensor | None,
) -> Tensor:
    """The equation, y (B, N, *positions) in the dtype of x, channels last where x is.

    Args:
        x: (B, C, *sizes) fp32, bf16 or fp16.
        codes, scale, zero_point, packed, dtype, low, high, domain: the matrix of the weight, as `cpu_weight_only_mm`
            takes it.
        shape: (N, C / groups, *kernel).
        bias: (N) in the dtype of x, or None.

    Raises:
        RuntimeError: the compiled kernels do not read the tensors.
    """
    n, k = shape[0], math.prod(shape[1:])
    about = codes, scale, zero_point, n, k, dtype, packed, domain, (low + high + 1) / 2
    fields, compiled = weight.CompiledWeight.of(*about).fields, library()
    if fields is None or compiled is None:
        raise RuntimeError("cpu_weight_only_conv: the compiled kernels do not read these tensors")
    made = Dequantized(compiled, fields, n, k, x.dtype)
    size, last = n * k * x.element_size(), is_channels_last(x)

    def ordered(values: Tensor) -> Tensor:
        """The weight in the order of x, in which torch's result is too."""
        if shape[1] == 1 and not last:
            return values.view(shape)  # one channel lies in either order: its strides tell torch which
        return from_matrix(values, shape) if last else from_matrix(values, shape).contiguous()

    values = None
    if wanted():
        values = float_copy(codes, scale, zero_point, x.dtype, lambda: ordered(made.rows()), size)
    if recording():
        note(f"cpu_weight_only_conv.{'float_copy' if values is not None else compiled.instruction_set}")
    if values is None:
        values = ordered(made.rows(out=_shared(size).view(x.dtype).view(n, k)) if size <= SHARED_BYTES else made.rows())
    elif not last:  # a copy may have been made for an input in the other order
        values = values.reshape(shape) if shape[1] == 1 else values.contiguous()
    return CONVOLUTIONS[len(stride)](x, values, bias, stride, padding, dilation, groups)


def _shared(size: int) -> Tensor:
    """`size` bytes of this thread."""
    memory: Tensor | None = getattr(_memory, "bytes", None)
    if memory is None or memory.numel() < size:
        memory = _memory.bytes = torch.empty(size, dtype=torch.uint8)
    return memory[:size]


def _supports(problem: Problem) -> str | None:
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes fp32, bf16 or fp16 activations, got {str(problem.dtype).removeprefix('torch.')}"
    scheme: Any = problem.scheme
    return weight.supports(problem._replace(scheme=scheme.matrix))


@register(
    "conv",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=(),
    device="cpu",
    priority=30,
    supports=_supports,
    note="by torch on the dequantized weight: made on each call, or kept within qtorch.config.float_copy_bytes",
    name="cpu_weight_only_conv",
)
def _conv(x: Tensor, quantized: Any, bias: Tensor | None, window: Window) -> Tensor:
    scheme = quantized.scheme
    added, bias = weight.split_bias(bias, x, scheme.shape[0])
    matrix = quantized.matrix
    _, stride, padding, dilation = map(list, window[:4])
    scale, zero_point = matrix.dense_scale(), matrix.dense_zero_point()
    form = weight.form(scheme.matrix)
    y = cpu_weight_only_conv(
        x,
        quantized.qdata,
        scale,
        zero_point,
        *form,
        list(scheme.shape),
        stride,
        padding,
        dilation,
        window.groups,
        added,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.dim() - 2))
