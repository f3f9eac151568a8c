"""Images as codes in memory, as the compiled convolutions read and write them: channels last, in a border of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiled_library import TYPES, Library, threads
from .memory import address, empty
from .structs import Quantizer, declare, struct_of

ConvShape = declare(
    "ConvShape",
    ("images groups channels features kernel_h kernel_w stride_h stride_w dilation_h dilation_w out_h out_w", int),
)
"""src/conv.h: `channels` and `features` of a group."""

ConvImages = declare("ConvImages", ("data image row pixel", int))
"""src/conv.h: codes channels last, distances in bytes."""

ConvPackCall = declare("ConvPackCall", ("shape", ConvShape), ("codes row_bytes packed sums", int))
"""src/conv.h"""

ConvCodesCall = declare(
    "ConvCodesCall", ("x type image channels_last images groups channels height width", int),
    ("codes code_image code_row code_pixel padded top bottom left right", int), ("quantizer", Quantizer),
    ("shift scale zero threads", int),
)  # fmt: skip
"""src/conv_codes.h"""

ConvFinish = declare(
    "ConvFinish", ("scale sums shift x_scale x_zero per_image bias out type channels_last other", int),
    ("low high", float), ("codes code_image code_row code_pixel", int), ("code_scale", float),
    ("code_zero code_low code_high", int),
)  # fmt: skip
"""src/conv_finish.h"""

ConvCall = declare(
    "ConvCall", ("shape", ConvShape), ("x", ConvImages), ("packed", int), ("finish", ConvFinish), ("threads", int)
)
"""src/conv_call.h"""

ConvPoolCall = declare(
    "ConvPoolCall",
    ("x out images channels height width out_h out_w", int),
    ("kernel_h kernel_w stride_h stride_w padding_h padding_w threads", int),
)
"""src/conv_pool.h"""

ConvFloatCall = declare(
    "ConvFloatCall",
    ("shape", ConvShape),
    ("x image channels_last height width padding_h padding_w packed scale bias out threads", int),
)
"""src/conv_float.h"""

BEHIND = 64  # bytes behind the last pixel: whole vectors are read

Border = tuple[int, int]
"""Pixels around an image, at both ends of its height and of its width."""


class CodesForm(NamedTuple):
    """The form of images of codes: sizes, a border, and channels in groups that are padded to a multiple of four; one
    group for a depthwise convolution, whose channels are not padded one by one."""

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

    def images_at(self, address: int, border: Border) -> Any:
        """The `ConvImages` for a convolution with this padding."""
        image, row, pixel, _ = self.strides
        return ConvImages(address + self.first(border), image, row, pixel)


_pack_codes = struct_of(ConvCodesCall).pack


def quantize_images(
    library: Library, x: Tensor, form: CodesForm, quantizer: Quantizer, shift: int,
    scale: Tensor, zero: Tensor, out: Tensor | None = None,
) -> tuple[Tensor, bool]:  # fmt: skip
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
