"""RotatedSpec: blocks are multiplied by a Hadamard matrix before they are quantized.

    codes = Q(x_b H),    x_b ~ dequantize(codes) H,    H = Sylvester's matrix / sqrt(size), H = H^T, H H = I

An outlier is spread over its block, so that the other elements keep more of their bits; MXFP4, with a scale for 32
elements, gains most. If weights and activations are both rotated, the H between them cancel: a kernel that multiplies
the values of the codes needs no rotation but that of the activation.

Source: QuaRot, arXiv 2404.00456 (online Hadamard transforms); of blocks for MXFP4, arXiv 2509.23202.
"""

import math
from dataclasses import fields

import torch
from torch import Tensor

from . import granularity, spec
from .jsonable import jsonable


@jsonable
class RotatedSpec(spec.QuantSpec):
    """A `QuantSpec` whose blocks are rotated; see the top of the file. Arguments are those of `QuantSpec`.

    Raises:
        ValueError: a block of a matrix is not a vector whose length is a power of two.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [size for size in self._pattern() if size != 1]
        if len(sizes) != 1 or sizes[0] < 2 or sizes[0] & (sizes[0] - 1):
            rule = "blocks are vectors whose length is a power of two, such as PerGroup(32)"
            raise ValueError(f"RotatedSpec: {rule}, got {self.granularity}")

    def _pattern(self) -> tuple[int, ...]:
        sizes = self.granularity.sizes if isinstance(self.granularity, granularity.PerBlock) else ()
        return self.granularity.pattern(max(len(sizes), 2))

    @property
    def rotation(self) -> int:
        return max(self._pattern())

    @property
    def unrotated(self) -> spec.QuantSpec:
        return spec.QuantSpec(**{f.name: getattr(self, f.name) for f in fields(self)})

    def rotated(self, values: Tensor) -> Tensor:
        """Each block times H, in fp32 (fp64 if `values` are); twice, it is the identity."""
        block = self.block_size(values.shape)
        axis = next(index for index, size in enumerate(block) if size != 1)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        matrix = sylvester(self.rotation, values.device, dtype)
        return rotate_blocks(values.movedim(axis, -1), matrix).movedim(-1, axis)

    def choose_range(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return self.unrotated.choose_range(self.rotated(input))

    def quantize(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.unrotated.quantize(self.rotated(input), scale, zero_point, generator)

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, output_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        wide = torch.float64 if output_dtype == torch.float64 else torch.float32
        return self.rotated(self.unrotated.dequantize(codes, scale, zero_point, wide)).to(output_dtype)

    def fake_quantize(self, input: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.rotated(self.unrotated.fake_quantize(self.rotated(input), generator)).to(input.dtype)

    def __str__(self) -> str:
        return f"{super().__str__()} rotated"


def rotate_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., C) in blocks of the last axis, each times `matrix` (size, size), in whose dtype the result is."""
    return (x.to(matrix.dtype).unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


def sylvester(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The symmetric Hadamard matrix of a size that is a power of two, divided by sqrt(size): (size, size)."""
    index = torch.arange(size, device=device)
    both, parity = index.unsqueeze(1) & index, torch.zeros_like(index)
    for bit in range(size.bit_length()):
        parity = parity ^ (both >> bit & 1)
    return (1 - 2 * parity).to(dtype) / math.sqrt(size)
