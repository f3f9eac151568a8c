"""UintxTensor: integers from 0 to 2^bits - 1, packed to their true size.

torchao has such a class for packed codes. Here packing is a layout, so the class is an affine quantized tensor with a
scale of 1 that dequantizes to its codes, in uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts import PackedLayout
from ..primitives.affine import ZeroPointDomain
from ..primitives.granularity import PerTensor
from ..primitives.qdtype import QDType, qdtype
from ..primitives.spec import LinearSpec, QuantSpec
from .affine import AffineQuantizedTensor


class UintxTensor(AffineQuantizedTensor):
    """Unsigned integers of 1 to 7 bits, packed to their true size. Make one with `to_uintx`."""

    @classmethod
    def from_uint8(cls, int_data: Tensor, dtype: torch.dtype | QDType | str, pack_dim: int = -1) -> UintxTensor:
        """Pack `int_data` (any shape, uint8) along `pack_dim`.

        Args:
            dtype: ``torch.uint1`` to ``torch.uint7``, or their names.

        Raises:
            TypeError: `int_data` is not uint8.
            ValueError: `dtype` is not one of these, cannot hold a number, or `pack_dim` does not exist.
        """
        kind = qdtype(dtype)
        if kind.name not in [f"uint{bits}" for bits in range(1, 8)]:
            raise ValueError(f"to_uintx takes uint1 to uint7, got {kind.name}")
        if int_data.dtype != torch.uint8:
            raise TypeError(f"to_uintx takes uint8 data, got {int_data.dtype}")
        ndim = int_data.dim()
        if not -ndim <= pack_dim < ndim:
            raise ValueError(f"to_uintx: data of shape {tuple(int_data.shape)} has no dimension {pack_dim}")
        if not int_data.is_meta and bool((int_data > kind.quant_max).any()):
            raise ValueError(f"to_uintx: {kind.name} holds 0 to {kind.quant_max}, the data has {int(int_data.max())}")
        spec = QuantSpec(kind, PerTensor(), zero_point_domain=ZeroPointDomain.NONE)
        scale = torch.ones((1,) * ndim, device=int_data.device, dtype=torch.float32)
        layout = PackedLayout(pack_dim % ndim - ndim)
        result = cls.from_plain(int_data, scale, None, LinearSpec(spec, layout=layout), torch.uint8)
        assert isinstance(result, cls)
        return result

    def get_plain(self) -> Tensor:
        """The numbers, unpacked: uint8, in the shape of the tensor."""
        return self.plain()[0]


def to_uintx(uint8_data: Tensor, dtype: torch.dtype | QDType | str, pack_dim: int = -1) -> UintxTensor:
    """Pack uint8 numbers to the true size of `dtype`, along `pack_dim`; see `UintxTensor.from_uint8`."""
    return UintxTensor.from_uint8(uint8_data, dtype, pack_dim)
