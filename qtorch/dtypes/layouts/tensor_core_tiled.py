"""TensorCoreTiledLayout: 4-bit codes in the order in which the tinygemm kernels of torch read them.

    w[n, k] = (q[n, k] - 8) * scale[n, k / group] + zero_point[n, k / group]

The packings of the two devices, and their inverses, are in `primitives.int4_tiling`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...primitives.affine import ZeroPointDomain
from ...primitives.int4_tiling import cpu_packing, pack_cpu, pack_cuda, unpack_cpu, unpack_cuda
from ...primitives.scheme import Scheme
from ...primitives.spec import QuantSpec
from .base import Layout, Plain, register_layout
from .inner_tensors import FLOATS, Form, Forms

GROUP_SIZES = (32, 64, 128, 256)


@register_layout
@dataclass(frozen=True)
class TensorCoreTiledLayout(Layout):
    """uint4 codes in groups of 32, 64, 128 or 256 along the rows of a matrix, zero points in the FLOAT domain; on CUDA
    and CPU. The packing is that of the device; `scale_and_zero` is (K / group, N, 2), in the dtype of the scale. N and
    K are padded as the device needs.

    Args:
        inner_k_tiles: of the CUDA packing: 2, 4 or 8.

    Raises:
        ValueError: another `inner_k_tiles`.
    """

    name = "tensor_core_tiled"
    tensors = ("qdata", "scale_and_zero")

    inner_k_tiles: int = 8

    def __post_init__(self) -> None:
        if self.inner_k_tiles not in (2, 4, 8):
            raise ValueError(f"TensorCoreTiledLayout: inner_k_tiles is 2, 4 or 8, got {self.inner_k_tiles}")

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.dtype.name != "uint4" or weight.code_range != (0, 15):
            raise ValueError(
                f"{self} takes uint4 codes from 0 to 15, the weight has {weight.dtype} {weight.code_range}"
            )
        if weight.zero_point_domain is not ZeroPointDomain.FLOAT:
            raise ValueError(
                f"{self} takes zero points of the FLOAT domain, the weight has zero_point_domain "
                f"{weight.zero_point_domain.name}"
            )

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        if len(scheme.shape) != 2:
            raise ValueError(f"{self} takes a matrix, the weight has shape {scheme.shape}")
        block = scheme.weight.block_size(scheme.shape)
        if block[0] != 1 or block[1] not in GROUP_SIZES:
            raise ValueError(f"{self} takes groups of 32, 64, 128 or 256 along a row, the weight has blocks of {block}")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        (n, k), tiles = self._padded(scheme, cuda=True), self.inner_k_tiles
        on_cuda = Form((n // 8, k // (16 * tiles), 32, tiles // 2), {torch.int32})
        n, k = self._padded(scheme, cuda=False)
        return Form((n, k // 2), {torch.uint8}), on_cuda

    def forms(self, scheme: Scheme) -> Forms:
        group = scheme.weight.block_size(scheme.shape)[1]
        sizes = (self._padded(scheme, cuda) for cuda in (False, True))
        both = tuple(Form((k // group, n, 2), FLOATS) for n, k in sizes)
        return {"qdata": self.codes_forms(scheme), "scale_and_zero": both}

    def _padded(self, scheme: Scheme, cuda: bool) -> tuple[int, int]:
        """(N, K) as the packing of the device needs them."""
        n, k = scheme.shape
        if not cuda:
            return n + -n % 64, k
        return n + -n % 8, k + -k % math.lcm(16 * self.inner_k_tiles, scheme.weight.block_size(scheme.shape)[1])

    def packing(self, device: torch.device) -> Hashable:
        return self.inner_k_tiles if device.type == "cuda" else cpu_packing()

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, zero_point = plain
        assert zero_point is not None
        if zero_point.dtype != scale.dtype:
            raise ValueError(
                f"{self} keeps scale and zero point in one dtype, got {scale.dtype} and {zero_point.dtype}"
            )
        n, k = codes.shape
        group = scheme.weight.block_size(scheme.shape)[1]
        cuda = codes.device.type == "cuda"
        padded = self._padded(scheme, cuda)
        rows, columns = padded[0] - n, padded[1] - k
        codes = pad(codes, (0, columns, 0, rows))
        both = torch.stack([pad(t, (0, columns // group, 0, rows)).t() for t in (scale, zero_point)], -1)
        qdata = pack_cuda(codes, self.inner_k_tiles) if cuda else pack_cpu(codes, cpu_packing())
        return {"qdata": qdata, "scale_and_zero": both.contiguous()}

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        qdata, both = tensors["qdata"], tensors["scale_and_zero"]
        assert qdata is not None
        assert both is not None
        n, k = scheme.shape
        # A packed tensor says itself which packing it has.
        codes = unpack_cuda(qdata) if qdata.dtype == torch.int32 else unpack_cpu(qdata, cpu_packing())
        groups = scheme.weight.scale_shape(scheme.shape)[1]
        scale, zero_point = both[:groups, :n].unbind(-1)
        return codes[:n, :k].contiguous(), scale.t().contiguous(), zero_point.t().contiguous()
