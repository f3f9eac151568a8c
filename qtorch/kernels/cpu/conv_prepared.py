"""Compiled convolutions prepared for inputs of one shape: what a call needs besides addresses.

As for linear layers (`weight_only.py`), the second convolution with a weight calls `ConvCalls.conv` at once, which
runs what the first one has prepared.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conv import Size, Window, empty_result, is_channels_last
from ..registry import can_add
from .compiled_library import TYPES, threads
from .conv_codes import CodesForm, ConvCall, ConvFinish, ConvFloatCall, ConvPackCall, ConvShape, quantize_images
from .memory import address, empty, empty_strided
from .structs import Quantizer, pack, struct_of
from .weight import CompiledWeight
from .weight_only import PLAIN

ROOM = 64  # elements behind vectors of features: whole vectors are read
SHAPES = 64  # of inputs for which a weight keeps calls


class CompiledConv(CompiledWeight):
    """A packed weight, its scales in fp32, and the sums of its codes. It takes as much memory again as the codes.

    Attributes:
        packed, sums, scale: see src/conv.h.
        calls: those prepared, by how the input is quantized.
    """

    packed: Tensor
    sums: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are the shape of the weight (N, C / groups, *kernel) and groups."""
        super().__init__(codes, scale, zero_point, *about)
        n, shape, groups = about[0], about[-2], about[-1]
        self.calls: dict[Activation | None, ConvCalls] = {}
        if scale.shape[1] != 1 or zero_point is not None:
            self.compiled = None
        if self.compiled is None:
            return
        height, width = (1, *shape[2:])[-2:]
        of_shape = ConvShape(0, groups, shape[1], n // groups, height, width, 1, 1, 1, 1, 0, 0)
        call = ConvPackCall(of_shape, codes=address(codes), row_bytes=codes.stride(0), packed=0, sums=0)
        self.packed = empty((self.compiled.conv_pack(pack(call)) + ROOM,), torch.int8)
        self.sums = torch.zeros(n + ROOM, dtype=torch.int32, device="cpu")
        call = call._replace(packed=address(self.packed, torch.int8), sums=address(self.sums, torch.int32))
        self.compiled.conv_pack(pack(call))
        self.scale = torch.zeros(n + ROOM, dtype=torch.float32, device="cpu")
        self.scale[:n] = scale.float().expand(n, 1)[:, 0]


def two_axes(window: Window) -> Window:
    """The window of images with two axes; an image of one axis has a height of 1."""
    if len(window.kernel) == 2:
        return window
    (kernel,), (stride,), (padding,), (dilation,), groups = window
    return Window((1, kernel), (1, stride), (0, padding), (1, dilation), groups)


def shape_of(images: int, channels: int, features: int, window: Window, out: tuple[int, int]) -> Any:
    """The `ConvShape` for all channels of the input and features of the result, and positions of the result."""
    groups = window.groups
    (kh, kw), (sh, sw), (dh, dw) = window.kernel, window.stride, window.dilation
    return ConvShape(images, groups, channels // groups, features // groups, kh, kw, sh, sw, dh, dw, *out)


_pack_codes_call = struct_of(ConvCall).pack
_pack_float_call = struct_of(ConvFloatCall).pack


class Activation(NamedTuple):
    """How the input is quantized."""

    quantizer: tuple[float, ...]  # (low, high, asymmetric, given, smallest scale, largest scale)
    shift: int  # from codes to unsigned ones
    static: bool  # whether scale and zero point are given


class _PreparedConv:
    """What a convolution of images like x needs in each call."""

    def __init__(self, layer: CompiledConv, x: Tensor, window: Window, n: int) -> None:
        y = empty_result(x, n, window, x.dtype)
        self._sizes, self._strides, self._dtype = tuple(y.shape), y.stride(), x.dtype
        assert layer.compiled is not None
        self._library, self._axis, self._padding = layer.compiled, x.dim() == 3, two_axes(window).padding
        self._shape = shape_of(x.shape[0], x.shape[1], n, two_axes(window), (1, *y.shape[2:])[-2:])
        self._weight = address(layer.packed, torch.int8), address(layer.scale, torch.float32)

    @staticmethod
    def ordered(x: Tensor) -> Tensor:
        """x (B, C, *sizes) in one of the orders that are taken."""
        return x


class FloatConv(_PreparedConv):
    """Images in fp32, by src/conv_float.h. They are contiguous, or channels last."""

    def __init__(self, layer: CompiledConv, x: Tensor, window: Window, n: int) -> None:
        super().__init__(layer, x, window, n)
        self._images = x.stride(0), is_channels_last(x), *(1, *x.shape[2:])[-2:], *self._padding

    @staticmethod
    def ordered(x: Tensor) -> Tensor:
        if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
            return x
        return x.contiguous()

    def run(self, x: Tensor, bias: Tensor | None, xs: Tensor | None, xz: Tensor | None) -> Tensor:
        """y (B, N, *positions)."""
        y = empty_strided(self._sizes, self._strides, self._dtype)
        self._library.conv_float(_pack_float_call(
            *self._shape, address(x), *self._images, *self._weight, address(bias), address(y), threads(),
        ))  # fmt: skip
        return y


class CodesConv(_PreparedConv):
    """Images in floating point that become codes, by src/conv.h."""

    def __init__(self, layer: CompiledConv, x: Tensor, window: Window, n: int, activation: Activation) -> None:
        super().__init__(layer, x, window, n)
        self._quantizer, self._shift = Quantizer.of(activation.quantizer), activation.shift
        self._static, self._window = activation.static, window
        height, width = self._padding
        shape = (x.shape[0], x.shape[1], *(1, *x.shape[2:])[-2:])
        self._form = CodesForm.of(shape, n, window.groups, (height, width))
        self._scales = 1 if self._static else x.shape[0]
        self._first, *self._steps = self._form.images_at(0, (height, width))
        self._sums = address(layer.sums, torch.int32), self._shift
        # Fields of ConvFinish after `out`: y is the result, nothing is added or clamped.
        none = ConvFinish(*(0 for _ in ConvFinish._fields))._replace(low=-math.inf, high=math.inf)
        self._finish = TYPES[x.dtype], is_channels_last(x), *none[ConvFinish._fields.index("other") :]

    def run(self, x: Tensor, bias: Tensor | None, xs: Tensor | None, xz: Tensor | None) -> Tensor:
        """y (B, N, *positions); `xs` and `xz` are the static scale and zero point, (1, 1)."""
        scale = empty((self._scales,), torch.float32) if xs is None else xs.reshape(1).float()
        zero = empty((self._scales,), torch.int32).zero_() if xz is None else xz.reshape(1).to(torch.int32)
        images = x.unsqueeze(2) if self._axis else x
        codes, lost = quantize_images(self._library, images, self._form, self._quantizer, self._shift, scale, zero)
        y = empty_strided(self._sizes, self._strides, self._dtype)
        self._library.conv(_pack_codes_call(
            *self._shape, address(codes, torch.uint8) + self._first, *self._steps, *self._weight, *self._sums,
            address(scale, torch.float32), address(zero, torch.int32), xs is None, address(bias), address(y),
            *self._finish, threads(),
        ))  # fmt: skip
        return with_lost(y, x, self._window) if lost and self._static else y


class ConvCalls:
    """The convolutions with `n` features that were prepared for a weight, by the shape, dtype and order of the input
    and the window; without an `activation` the input is not quantized."""

    def __init__(self, layer: CompiledConv, n: int, activation: Activation | None) -> None:
        self._layer, self._n, self._activation = layer, n, activation
        self._calls: dict[Any, FloatConv | CodesConv] = {}

    def run(
        self, x: Tensor, bias: Tensor | None, window: Window, xs: Tensor | None = None, xz: Tensor | None = None
    ) -> Tensor:
        """y (B, N, *positions), prepared at the first call for such an input."""
        activation = self._activation
        x = (FloatConv if activation is None else CodesConv).ordered(x)
        key = (x.shape, x.stride(), x.dtype, *window[1:])
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= SHAPES:
                self._calls.clear()
            about = self._layer, x, window, self._n
            call = self._calls[key] = FloatConv(*about) if activation is None else CodesConv(*about, activation)
        return call.run(x, bias, xs, xz)

    def conv(
        self, x: Tensor, weight: Any, bias: Tensor | None,
        stride: Size, padding: Size | str, dilation: Size, groups: int,
    ) -> Tensor | None:  # fmt: skip
        """The convolution with the weight that this was made from; None if no such call was prepared."""
        try:
            call = self._calls.get((x.shape, x.stride(), x.dtype, stride, padding, dilation, groups))
        except TypeError:  # sizes in a list
            return None
        if (
            call is None
            or not x.is_cpu
            or x.dtype is not weight.scheme.dtype
            or not self._layer.is_of(weight.qdata, weight.scale, weight.zero_point)
            or not (bias is None or (type(bias) in PLAIN and can_add(bias, x.dtype, self._n)))
        ):
            return None
        if self._activation is not None and self._activation.static:
            return call.run(x, bias, weight.act_scale, weight.act_zero_point)
        return call.run(x, bias, None, None)


def calls_of(layer: CompiledConv, n: int, activation: Activation | None) -> ConvCalls:
    """The prepared convolutions of a weight."""
    if activation not in layer.calls:
        layer.calls[activation] = ConvCalls(layer, n, activation)
    return layer.calls[activation]


def prepare(weight: Any, activation: Activation | None) -> None:
    """Let the next convolution with this weight run what the last one prepared at once."""
    made = CompiledConv.made_of(weight.qdata)
    if made is None or not made.is_of(weight.qdata, weight.scale, weight.zero_point):
        return
    if (calls := made.calls.get(activation)) is not None:
        vars(weight)["fast_conv"] = calls.conv


def with_lost(y: Tensor, x: Tensor, window: Window) -> Tensor:
    """NaN in all results of windows, those of one group, that hold a NaN or an infinity."""
    groups, ndim = window.groups, len(window.kernel)
    lost = (~x.isfinite()).unflatten(1, (groups, -1)).any(2).flatten(0, 1).unsqueeze(1).float()
    conv = (torch.nn.functional.conv1d, torch.nn.functional.conv2d)[ndim - 1]
    windows = conv(lost, lost.new_ones(1, 1, *window.kernel), None, window.stride, window.padding, window.dilation) > 0
    windows = windows.reshape(y.shape[0], groups, *y.shape[2:]).repeat_interleave(y.shape[1] // groups, 1)
    return y.masked_fill_(windows, torch.nan)
