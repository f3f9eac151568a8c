"""The weight of a convolution in the order in which the compiled kernels multiply it, made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..im2col import Window
from .compiled_library import Library, library
from .conv_structs import ConvPackCall, ConvShape
from .memory import address, empty
from .structs import pack
from .weight import CompiledWeight

ROOM = 64
"""Elements behind vectors of features: whole vectors are read."""


class CompiledConv(CompiledWeight):
    """A packed weight, its scales in fp32, and the sums of its codes. It takes as much memory again as the codes.

    Attributes:
        compiled: the library; None if it is missing or does not accept the weight.
        packed, sums, scale: see src/conv.h.
        calls: see `conv_prepared`, by how the input is quantized.
    """

    __slots__ = ("calls", "compiled", "packed", "scale", "sums")

    compiled: Library | None
    packed: Tensor
    sums: Tensor
    scale: Tensor
    calls: dict[Any, Any]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are the shape of the weight (N, C / groups, *kernel) and groups."""
        super().__init__(codes, scale, zero_point, *about)
        n, shape, groups = about[0], about[-2], about[-1]
        self.calls = {}
        self.compiled = library() if self.fields and scale.shape[1] == 1 and zero_point is None else None
        if self.compiled is None:
            return
        height, width = (1, *shape[2:])[-2:]
        call = ConvPackCall(
            shape=ConvShape(0, groups, shape[1], n // groups, height, width, 1, 1, 1, 1, 0, 0),
            codes=address(codes),
            row_bytes=codes.stride(0),
            packed=0,
            sums=0,
        )
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


def shape_of(images: int, channels: int, features: int, window: Window, out: tuple[int, int]) -> ConvShape:
    """The struct for all channels of the input and features of the result, and positions of the result."""
    groups = window.groups
    (kh, kw), (sh, sw), (dh, dw) = window.kernel, window.stride, window.dilation
    return ConvShape(images, groups, channels // groups, features // groups, kh, kw, sh, sw, dh, dw, *out)
