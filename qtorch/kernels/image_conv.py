"""Convolution of images that are quantized before their windows are gathered: with one scale for each image.

    y[b, n, p] = (sum_{c, t} (xq[b, c, stride p + dilation t] - xz[b]) (wq[n, t, c] - wz[n])) * ws[n] * xs[b] + bias[n]

In torch operators: the definition of the numbers. An image that holds a NaN or an infinity gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..primitives.granularity import PerAxis
from ..primitives.scheme import Scheme
from .custom_ops import opaque
from .im2col import Window, both_ends, is_channels_last, multiply_windows
from .linear.int8_scaled import INTEGERS
from .ops.int8_grouped_mm import int8_grouped_mm
from .ops.quantize_rowwise import quantize_dynamic
from .registry import Problem, register


def scales_images(scheme: Scheme) -> bool:
    """Whether a convolution's input has one scale for each image, chosen on each call: PerAxis(0)."""
    activation = scheme.activation
    return activation is not None and not scheme.spec.static and activation.granularity == PerAxis(0)


def result_shape(x: Tensor, features: int, window: Window) -> list[int]:
    """(B, N, *positions) of a convolution of x (B, C, *sizes)."""
    sizes = zip(x.shape[2:], *window[:4], strict=True)
    return [x.shape[0], features, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)]


def empty_result(x: Tensor, features: int, window: Window, dtype: torch.dtype) -> Tensor:
    """The result of a convolution, without values: channels last where x is."""
    y = x.new_empty(result_shape(x, features, window), dtype=dtype)
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last(x) else y


def padded_codes(codes: Tensor, zero_point: Tensor | None, window: Window) -> tuple[Tensor, Window]:
    """Codes (B, C, *sizes) in a border of the code of zero, and the window without padding."""
    if zero_point is None or not any(window.padding):
        return codes, window  # `multiply_windows` pads with zeros
    shift = zero_point.to(torch.int16).reshape(-1, *(1,) * (codes.dim() - 1))
    padded = functional.pad(codes.to(torch.int16) - shift, both_ends(window.padding)) + shift
    return padded.to(codes.dtype), window._replace(padding=(0,) * len(window.padding))


def by_images(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    window: Window,
    multiply: Callable[[Tensor, int, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """The convolution of codes (B, C, *sizes) with a scale for each image, (B, 1), or for all, (1, 1).

    Args:
        multiply: (rows, group, scale (1, 1), zero point (1, 1) or None) -> (M, N / groups).
    """
    codes, window = padded_codes(codes, zero_point, window)
    zeros: Sequence[Tensor | None] = [None] * scale.shape[0] if zero_point is None else zero_point.split(1)
    images = [codes] if scale.shape[0] == 1 else codes.split(1)
    parts = [
        multiply_windows(image, window, lambda rows, group, s=s, z=z: multiply(rows, group, s, z))  # type: ignore[misc]
        for image, s, z in zip(images, scale.split(1), zeros, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _empty(xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, *about: Any) -> Tensor:
    kernel, stride, padding, dilation, groups, dtype = about
    return empty_result(xq, wq.shape[0], Window(kernel, stride, padding, dilation, groups), dtype)


@opaque(_empty)
def image_codes_conv(
    xq: Tensor,
    xs: Tensor,
    xz: Tensor | None,
    wq: Tensor,
    ws: Tensor,
    wz: Tensor | None,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """The equation above without bias.

    Args:
        xq: (B, C, *sizes) int8 codes.  xs: (B, 1) or (1, 1) scale.  xz: like xs, or None.
        wq: (N, T * C / groups), the matrix of the weight.  ws, wz: as `int8_grouped_mm` takes them.
        dtype: of the result.
    """
    window = Window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    if not xq.shape[0]:
        return empty_result(xq, wq.shape[0], window, dtype)
    parts = [(q, ws if s is None else s, z) for q, s, z in zip(wq.chunk(groups), *_chunks(ws, wz, groups), strict=True)]

    def run(rows: Tensor, group: int, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        return int8_grouped_mm(rows, scale, zero_point, *parts[group], dtype)

    with torch.no_grad():
        return by_images(xq, xs, xz, window, run)


def _chunks(ws: Tensor, wz: Tensor | None, groups: int) -> list[Sequence[Tensor | None]]:
    whole = ws.shape[0] == 1
    return [[t] * groups if t is None or whole else t.chunk(groups) for t in (ws, wz)]


def _supports(problem: Problem) -> str | None:
    if not scales_images(problem.scheme):
        return "takes a dynamic scale for each image, PerAxis(0)"
    if problem.scheme.weight.block_size(problem.scheme.codes_shape)[0] != 1:
        return f"takes a scale of its own for each output channel, the weight has {problem.scheme.weight.granularity}"
    return None


@register(
    "conv",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=("int8",),
    priority=20,
    supports=_supports,
    note="on windows of the codes, gathered first",
)
def image_conv(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """(B, N, *positions) in the dtype of x (B, C, *sizes)."""
    xq, xs, xz = quantize_dynamic(x.flatten(1), weight.scheme.activation)
    codes = xq.reshape(x.shape)
    if is_channels_last(x):
        codes = codes.movedim(1, -1).contiguous().movedim(-1, 1)
    wq, ws, wz = weight.plain()
    kernel, stride, padding, dilation = map(list, window[:4])
    y = image_codes_conv(codes, xs, xz, wq, ws, wz, kernel, stride, padding, dilation, window.groups, x.dtype)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.dim() - 2))
