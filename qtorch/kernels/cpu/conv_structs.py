"""The structs of compiled convolutions, field for field as src/conv*.h declare them; see `structs`."""

from typing import NamedTuple

from .structs import Quantizer


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


class ConvCodesCall(NamedTuple):
    """src/conv_codes.h"""

    x: int
    type: int
    image: int
    channels_last: int
    images: int
    groups: int
    channels: int
    height: int
    width: int
    codes: int
    code_image: int
    code_row: int
    code_pixel: int
    padded: int
    top: int
    bottom: int
    left: int
    right: int
    quantizer: Quantizer
    shift: int
    scale: int
    zero: int
    threads: int


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


class ConvPoolCall(NamedTuple):
    """src/conv_pool.h"""

    x: int
    out: int
    images: int
    channels: int
    height: int
    width: int
    out_h: int
    out_w: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    threads: int


class ConvFloatCall(NamedTuple):
    """src/conv_float.h"""

    shape: ConvShape
    x: int
    image: int
    channels_last: int
    height: int
    width: int
    padding_h: int
    padding_w: int
    packed: int
    scale: int
    bias: int
    out: int
    threads: int
