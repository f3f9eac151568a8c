"""Convolutions with a quantized weight, in torch operators.

Without quantized activations the weight is dequantized, which costs little, since each weight is used once for every
output position. With them, a convolution is a product of matrices: the windows of the input are gathered into rows
(im2col), and multiplied by a kernel of ``linear``, or here where each image has one scale (`image_conv`).

    y[b, n, p] = sum_{c, t} x[b, c, stride p + dilation t - padding] w[n, c, t] + bias[n]

Each output position p of an image is one row, indexed by (kernel position t, input channel c): a scale per row is one
per window. The weight is a matrix (N, T * C): a scale per row is one per output channel, and groups run along the
channels. Channels come last because whole pixels are then copied, which is ten times as fast.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..primitives import PerAxis, Scheme, is_compiling
from .custom_ops import opaque
from .linear.scaled import INTEGERS
from .ops import portable, quantize
from .ops.int8_grouped_mm import int8_grouped_mm
from .registry import Problem, QuantizedWeight, register

Size = int | Sequence[int]

WINDOW_BYTES = 4 << 20  # of windows that are gathered at a time


class Window(NamedTuple):
    """What a convolution reads for one output position, one number per axis of an image. `padding` is added at both
    ends."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def prepare_conv(
    ndim: int, x: Tensor, weight: Sequence[int],
    stride: Size, padding: Size | str, dilation: Size, groups: int, name: str,
) -> tuple[Tensor, Window]:  # fmt: skip
    """Check the arguments of a convolution, called `name` in errors, of x (B, C, *sizes), `ndim` of them, with a weight
    of the shape (N, C / groups, *kernel). Returns x, padded where ``padding='same'`` needs more at one end than at the
    other, and the window; `ValueError` where the arguments do not fit each other."""
    if len(weight) != ndim + 2 or x.dim() != ndim + 2:
        raise ValueError(
            f"{name} takes an input of {ndim + 1} or {ndim + 2} axes and a weight of {ndim + 2}, got shapes "
            f"{tuple(x.shape)} and {tuple(weight)}"
        )
    n, channels, *kernel = weight
    if x.shape[1] != channels * groups or n % groups:
        raise ValueError(
            f"{name}: {x.shape[1]} input channels do not fit a weight of shape {tuple(weight)} in {groups} groups"
        )
    steps, spread = per_axis(stride, ndim), per_axis(dilation, ndim)
    reach = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    if padding == "same":
        if any(step != 1 for step in steps):
            raise ValueError("padding='same' takes a stride of 1")
        if any(r % 2 for r in reach):  # one more after than before
            x = functional.pad(x, list(itertools.chain(*((0, r % 2) for r in reversed(reach)))))
        ends = tuple(r // 2 for r in reach)
    elif isinstance(padding, str) and padding != "valid":
        raise ValueError(f"padding is 'same', 'valid' or sizes, got {padding!r}")
    else:
        ends = (0,) * ndim if isinstance(padding, str) else per_axis(padding, ndim)
    window = Window(tuple(kernel), steps, ends, spread, groups)
    if any(size + 2 * end <= r for size, end, r in zip(x.shape[2:], ends, reach, strict=True)):
        raise ValueError(f"the kernel {window.kernel}, dilated by {window.dilation}, exceeds the padded input")
    return x, window


def to_matrix(weight: Tensor) -> Tensor:
    """(N, C, *kernel) -> (N, T * C)."""
    return weight.movedim(1, -1).flatten(1)


def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """Inverse of `to_matrix`, for a weight of this shape: a view, channels last."""
    n, channels, *kernel = shape
    return matrix.reshape(n, *kernel, channels).movedim(-1, 1)


def multiply_windows(x: Tensor, window: Window, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A convolution of x (B, C, *sizes) without bias: (B, N, *positions); channels last where x is, else contiguous.

    In eager mode without gradients, `WINDOW_BYTES` of windows are gathered at a time. A compiler fuses gathering with
    what follows.

    Args:
        multiply: (rows (M, T * C / groups), index of the group) -> (M, N / groups).
    """
    windows = _windows(x, window)
    pieces = [windows] if is_compiling() or torch.is_grad_enabled() else _pieces(windows)
    results = []
    for piece in pieces:
        of_groups = enumerate(_rows_of_groups(piece, window))
        results.append(_joined([multiply(rows, group) for group, rows in of_groups], 1))
    y = _joined(results, 0)
    y = y.reshape(*windows.shape[: 1 + len(window.kernel)], y.shape[1]).movedim(-1, 1)
    return y if is_channels_last(x) else y.contiguous()


def input_rows(x: Tensor, window: Window) -> Iterator[Tensor]:
    """The windows of x (B, C, *sizes) as rows (M, T * C / groups), some at a time; those of all groups."""
    for piece in _pieces(_windows(x, window)):
        yield from _rows_of_groups(piece, window)


def _rows_of_groups(windows: Tensor, window: Window) -> list[Tensor]:
    """(M, T * C / groups) for each group, M the number of windows."""
    rows = math.prod(windows.shape[: 1 + len(window.kernel)])
    width = math.prod(window.kernel) * windows.shape[-1] // window.groups
    return [part.reshape(rows, width) for part in windows.chunk(window.groups, -1)]


def _windows(x: Tensor, window: Window) -> Tensor:
    """(B, *positions, *kernel, C): the window of each output position, a view of the padded input."""
    x = functional.pad(x.movedim(1, -1).contiguous(), [0, 0, *both_ends(window.padding)])
    for i, (k, step, d) in enumerate(zip(window.kernel, window.stride, window.dilation, strict=True)):
        x = x.unfold(1 + i, d * (k - 1) + 1, step)[..., ::d]
    return x.movedim(1 + len(window.kernel), -1)


def both_ends(padding: Sequence[int]) -> list[int]:
    """As `F.pad` takes it: (before, after) of the last axis first."""
    return list(itertools.chain(*((p, p) for p in reversed(padding))))


def _pieces(windows: Tensor) -> Iterator[Tensor]:
    """The windows in pieces of at most `WINDOW_BYTES`: whole images, or parts of one along its first axis; in order."""
    limit = WINDOW_BYTES // windows.element_size()
    images = max(1, limit // max(1, math.prod(windows.shape[1:])))
    rows = max(1, limit // max(1, math.prod(windows.shape[2:])))
    for part in windows.split(images):
        yield from part.split(rows, 1) if images == 1 else [part]


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """The result (B, N, *positions) of a convolution, plus its bias (N)."""
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.dim() - 2))


def is_channels_last(x: Tensor) -> bool:
    """Whether x (B, C, *sizes) is contiguous in channels-last order and in that order only."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def per_axis(value: Size, ndim: int) -> tuple[int, ...]:
    """One size for each axis of an image, from one for all or one for each."""
    if isinstance(value, int):
        return (value,) * ndim
    if len(value) not in (1, ndim):
        raise ValueError(f"stride, padding and dilation take 1 or {ndim} sizes, got {list(value)}")
    return tuple(value) * (ndim if len(value) == 1 else 1)


CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}  # by the axes of an image


def in_order(values: Tensor) -> Tensor:
    """Contiguous, with the strides of its shape: a kernel of one may have others, by which torch takes its order."""
    return values.contiguous().flatten().view(values.shape)


NOTE = "dequantizes the weight on each call: it saves memory, not time"


@register("conv", spec=None, activation=(), priority=10, note=NOTE, rotated=True)
def dequantized_conv(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, window: Window) -> Tensor:
    """(B, N, *positions) in the dtype of x (B, C, *sizes), for a weight (N, C / groups, *kernel) stored as a matrix."""
    values = from_matrix(weight.scheme.weight.dequantize(*weight.plain(), x.dtype), weight.scheme.shape)
    if not is_channels_last(x):  # else the result would be channels-last, which its readers may not support
        values = in_order(values)
    _, stride, padding, dilation, groups = window
    return CONVOLUTIONS[len(window.kernel)](x, values, bias, stride, padding, dilation, groups)


@register(
    "conv",
    spec=None,
    supports=lambda problem: "takes quantized activations" if problem.scheme.activation is None else None,
    rotated=True,
)
def windows(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """Stands for the product of the windows with a matrix, by a kernel of ``linear``; `dtypes.conv` looks that up."""
    raise NotImplementedError("windows are multiplied by a kernel of linear")


@register(
    "conv", layout="portable", spec=None, priority=100, note=portable.NOTE,
    supports=lambda problem: "takes codes of activations only where the layout has whole_convolutions"
    if problem.scheme.activation is not None and not problem.scheme.layout.whole_convolutions else None,
)  # fmt: skip
def portable_conv(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """`dequantized_conv` by operators of torch alone; a static activation is quantized and dequantized before it."""
    _, stride, padding, dilation, groups = window
    values = portable.dequantized_weight(weight, x.dtype)
    values = values if values.dim() > 2 else in_order(from_matrix(values, weight.scheme.shape))
    real = x if weight.scheme.activation is None else portable.fake_quantized(x, weight).to(x.dtype)
    return CONVOLUTIONS[len(window.kernel)](real, values, bias, stride, padding, dilation, groups)


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
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, window: Window,
    multiply: Callable[[Tensor, int, Tensor, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """The convolution of codes (B, C, *sizes) with a scale for each image, (B, 1), or for all, (1, 1), by
    ``multiply(rows, group, scale (1, 1), zero point (1, 1) or None)``, (M, N / groups)."""
    codes, window = padded_codes(codes, zero_point, window)
    zeros: Sequence[Tensor | None] = [None] * scale.shape[0] if zero_point is None else zero_point.split(1)
    images = [codes] if scale.shape[0] == 1 else codes.split(1)
    parts = [
        multiply_windows(image, window, lambda rows, group, s=s, z=z: multiply(rows, group, s, z))  # type: ignore[misc]
        for image, s, z in zip(images, scale.split(1), zeros, strict=True)
    ]
    return _joined(parts, 0)


def _empty(xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, *about: Any) -> Tensor:
    kernel, stride, padding, dilation, groups, dtype = about
    return empty_result(xq, wq.shape[0], Window(kernel, stride, padding, dilation, groups), dtype)


@opaque(_empty)
def image_codes_conv(
    xq: Tensor, xs: Tensor, xz: Tensor | None,
    wq: Tensor, ws: Tensor, wz: Tensor | None,
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int],
    groups: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The convolution of images that are quantized before their windows are gathered; it defines the numbers:

        y[b, n, p] = (sum_{c, t} (xq[b, c, stride p + dilation t] - xz[b]) (wq[n, t, c] - wz[n])) * ws[n] * xs[b]

    An image that holds a NaN or an infinity gives NaN.

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
    return [[t] * groups if t is None or ws.shape[0] == 1 else t.chunk(groups) for t in (ws, wz)]


def _supports(problem: Problem) -> str | None:
    if not scales_images(problem.scheme):
        return "takes a dynamic scale for each image, PerAxis(0)"
    if problem.scheme.weight.block_size(problem.scheme.codes_shape)[0] != 1:
        return f"takes a scale of its own for each output channel, the weight has {problem.scheme.weight.granularity}"
    return None


@register(
    "conv", layout=("plain", "packed"), weight=INTEGERS, activation=("int8",), priority=20, supports=_supports,
    note="on windows of the codes, gathered first",
)  # fmt: skip
def image_conv(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """(B, N, *positions) in the dtype of x (B, C, *sizes)."""
    xq, xs, xz = quantize.quantize_dynamic(x.flatten(1), weight.scheme.activation)
    codes = xq.reshape(x.shape)
    if is_channels_last(x):
        codes = codes.movedim(1, -1).contiguous().movedim(-1, 1)
    wq, ws, wz = weight.plain()
    kernel, stride, padding, dilation = map(list, window[:4])
    y = image_codes_conv(codes, xs, xz, wq, ws, wz, kernel, stride, padding, dilation, window.groups, x.dtype)
    return with_bias(y, bias)
