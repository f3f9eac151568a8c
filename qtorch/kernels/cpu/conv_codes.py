"""Images as codes in memory, as the compiled convolutions read and write them: channels last, in a border of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .compiled_library import TYPES, Library, threads
from .memory import address, empty
from .structs import Quantizer, declare, struct_of


class ConvShape(NamedTuple):
    """src/conv.h: `channels` and `features` of a group."""

    images: int
    groups: int
    channels: int
    features: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    dilation_h: int
    dilation_w: int
    out_h: int
    out_w: int


class ConvImages(NamedTuple):
    """src/conv.h: codes channels last, distances in bytes."""

    data: int
    image: int
    row: int
    pixel: int


class ConvPackCall(NamedTuple):
    """src/conv.h"""

    shape: ConvShape
    codes: int
    row_bytes: int
    packed: int
    sums: int


ConvCodesCall = declare(
    "ConvCodesCall",
    (
        "x type image channels_last images groups channels height width codes code_image code_row "
        "code_pixel padded top bottom left right",
        int,
    ),
    ("quantizer", Quantizer),
    ("shift scale zero threads", int),
)
"""src/conv_codes.h"""


class ConvFinish(NamedTuple):
    """src/conv_finish.h"""

    scale: int
    sums: int
    shift: int
    x_scale: int
    x_zero: int
    per_image: int
    bias: int
    out: int
    type: int
    channels_last: int
    other: int
    low: float
    high: float
    codes: int
    code_image: int
    code_row: int
    code_pixel: int
    code_scale: float
    code_zero: int
    code_low: int
    code_high: int


class ConvCall(NamedTuple):
    """src/conv_call.h"""

    shape: ConvShape
    x: ConvImages
    packed: int
    finish: ConvFinish
    threads: int


ConvPoolCall = declare(
    "ConvPoolCall",
    (
        "x out images channels height width out_h out_w kernel_h kernel_w stride_h stride_w "
        "padding_h padding_w threads",
        int,
    ),
)
"""src/conv_pool.h"""


ConvFloatCall = declare(
    "ConvFloatCall",
    ("shape", ConvShape),
    ("x image channels_last height width padding_h padding_w packed scale bias out threads", int),
)
"""src/conv_float.h"""


BEHIND = 64
"""Bytes behind the last pixel: whole vectors are read."""

Border = tuple[int, int]
"""Pixels around an image, at both ends of its height and of its width."""


class CodesForm(NamedTuple):
    """The form of images of codes: sizes, a border, and channels in groups that are padded to a multiple of four.

    Attributes:
        groups: 1 for a depthwise convolution, whose channels are not padded one by one.
    """

    images: int
    channels: int
    height: int
    width: int
    groups: int
    border: Border

    @classmethod
    def of(cls, shape: Sequence[int], features: int, groups: int, border: Border) -> CodesForm:
        """For an input (B, C, H, W) and so many features of the result."""
        depthwise = groups == shape[1] == features
        images, channels, height, width = shape
        return cls(images, channels, height, width, 1 if depthwise else groups, border)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Bytes of an image, a row, a pixel, and of the channels of a group."""
        padded = (self.channels // self.groups + 3) // 4 * 4
        pixel = padded * self.groups
        row = (self.width + 2 * self.border[1]) * pixel
        return (self.height + 2 * self.border[0]) * row, row, pixel, padded

    @property
    def nbytes(self) -> int:
        """Bytes of all images, and of those behind them."""
        return self.images * self.strides[0] + BEHIND

    def first(self, border: Border = (0, 0)) -> int:
        """Bytes before the first pixel, or before a border around it that is not wider than that of the images."""
        _, row, pixel, _ = self.strides
        return (self.border[0] - border[0]) * row + (self.border[1] - border[1]) * pixel

    def images_at(self, address: int, border: Border) -> ConvImages:
        """The struct for a convolution with this padding."""
        image, row, pixel, _ = self.strides
        return ConvImages(address + self.first(border), image, row, pixel)


_pack_codes = struct_of(ConvCodesCall).pack


def quantize_images(
    library: Library,
    x: Tensor,
    form: CodesForm,
    quantizer: Quantizer,
    shift: int,
    scale: Tensor,
    zero: Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """(codes, whether there is a NaN or an infinity).

    Args:
        x: (B, C, H, W) fp32, bf16 or fp16.
        shift: from codes to bytes: 128 for signed ones.
        scale, zero: fp32 and int32, one element each if the quantizer is given them; else (B), written to.
        out: `form.nbytes` bytes, or None for new ones.
    """
    x, channels_last = dense_images(x)
    codes = empty((form.nbytes,), torch.uint8) if out is None else out
    height, width = form.border
    image, row, pixel, padded = form.strides
    # By position, in the order of the struct's fields, which is several times as fast.
    call = _pack_codes(
        address(x), TYPES[x.dtype], x.stride(0), channels_last, form.images, form.groups,
        form.channels // form.groups, form.height, form.width, address(codes, torch.uint8) + form.first(), image, row,
        pixel, padded, height, height, width, width, *quantizer, shift, address(scale, torch.float32),
        address(zero, torch.int32), threads(),
    )  # fmt: skip
    return codes, bool(library.conv_codes(call))


def dense_images(x: Tensor) -> tuple[Tensor, bool]:
    """x (B, C, H, W), each image contiguous, and whether channels come last."""
    _, c, h, w = x.shape
    strides = x.stride()[1:]
    if strides == (h * w, w, 1):
        return x, False
    if strides == (1, w * c, c):
        return x, True
    return x.contiguous(), False
