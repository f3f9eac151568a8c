"""TensorCoreTiledLayout: 4-bit codes in the order of torch's tinygemm kernels.

    w[n, k] = (q[n, k] - 8) * scale[n, k / group] + zero_point[n, k / group]

The packings equal those of `aten._convert_weight_to_int4pack` (CUDA) and `aten._convert_weight_to_int4pack_for_cpu`
(sources: pytorch, aten/src/ATen/native/cuda/int4mm.cu and cpu/int4mm_kernel.cpp), but any device can compute either.

CUDA: tiles of 8 rows and 32 columns are int32 words of eight codes, one for each lane t of a warp; `inner_k_tiles` / 2
words of a lane lie together: (N / 8, K / (16 inner_k_tiles), 32, inner_k_tiles / 2). Of row n of a tile and its column
k = 16 a + 8 b + 2 c + d, the code is in nibble 4 d + 2 a + b of lane 4 n + c.

CPU: blocks of B rows, each a (K, B / 2) matrix of bytes of two codes, viewed as (N, K / 2). The rows that share a byte
are B / 2 apart on processors with vector instructions for it, else neighbours; B is 64 with AVX-512, 32 with AVX2.
"""

import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..affine import ZeroPointDomain
from ..spec import QuantSpec, Scheme
from .base import FLOATS, Form, Forms, Layout, Plain, register_layout
from .packed import pack_dense, unpack_dense

GROUP_SIZES = (32, 64, 128, 256)


@register_layout
class TensorCoreTiledLayout(Layout):
    """uint4 codes packed for tinygemm: groups of 32, 64, 128 or 256 along the rows of a matrix, FLOAT zero points.

    The packing is that of the device, CUDA or CPU, with N and K padded as it requires; `scale_and_zero` is
    (K / group, N, 2), in the dtype of the scale.

    Args:
        inner_k_tiles: parameter of the CUDA packing: 2, 4 or 8.

    Raises:
        ValueError: `inner_k_tiles` is not 2, 4 or 8.
    """

    name = "tensor_core_tiled"
    tensors = ("qdata", "scale_and_zero")

    inner_k_tiles: int = 8

    def __post_init__(self) -> None:
        if self.inner_k_tiles not in (2, 4, 8):
            raise ValueError(f"TensorCoreTiledLayout: inner_k_tiles is 2, 4 or 8, got {self.inner_k_tiles}")

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.dtype.name != "uint4" or weight.code_range != (0, 15):
            found = f"{weight.dtype} {weight.code_range}"
            raise ValueError(f"{self} takes uint4 codes from 0 to 15, the weight has {found}")
        if weight.zero_point_domain is not ZeroPointDomain.FLOAT:
            domain = weight.zero_point_domain.name
            raise ValueError(f"{self} takes zero points of the FLOAT domain, the weight has zero_point_domain {domain}")

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
        """(N, K) padded to the multiples that the packing of the device requires."""
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
            dtypes = f"{scale.dtype} and {zero_point.dtype}"
            raise ValueError(f"{self} keeps scale and zero point in one dtype, got {dtypes}")
        n, k = codes.shape
        group = scheme.weight.block_size(scheme.shape)[1]
        cuda = codes.device.type == "cuda"
        padded = self._padded(scheme, cuda)
        rows, columns = padded[0] - n, padded[1] - k
        codes = pad(codes, (0, columns, 0, rows))
        both = torch.stack([pad(t, (0, columns // group, 0, rows)).t() for t in (scale, zero_point)], -1)
        qdata = pack_cuda(codes, self.inner_k_tiles) if cuda else pack_cpu(codes, cpu_packing())
        return {"qdata": qdata, "scale_and_zero": both.contiguous()}

    def unpack(self, tensors: Mapping[str, Any], scheme: Scheme) -> Plain:
        qdata, both = tensors["qdata"], tensors["scale_and_zero"]
        n, k = scheme.shape
        # The dtype of a packed tensor tells its packing.
        codes = unpack_cuda(qdata) if qdata.dtype == torch.int32 else unpack_cpu(qdata, cpu_packing())
        groups = scheme.weight.scale_shape(scheme.shape)[1]
        scale, zero_point = both[:groups, :n].unbind(-1)
        return codes[:n, :k].contiguous(), scale.t().contiguous(), zero_point.t().contiguous()


class CpuPacking(NamedTuple):
    """Number of rows in a block, and whether rows of its two halves share bytes, instead of neighbouring rows."""

    block: int
    halves: bool


@functools.cache
def cpu_packing() -> CpuPacking:
    """The packing of this processor, found by packing an example."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
        codes = torch.arange(64 * 32, dtype=torch.int32, device="cpu").mul_(2654435761 % 2**31)
        codes = codes.bitwise_right_shift_(20).bitwise_and_(15).reshape(64, 32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        for candidate in (CpuPacking(b, halves) for b in (64, 32, 16) for halves in (True, False)):
            if torch.equal(pack_cpu(codes.to(torch.uint8), candidate), packed):
                return candidate
    raise NotImplementedError("TensorCoreTiledLayout: torch packs int4 in an unknown order on this processor")


def pack_cpu(codes: Tensor, packing: CpuPacking) -> Tensor:
    """uint8 (N, K / 2) from codes (N, K), N a multiple of 64."""
    block, halves = packing
    n, k = codes.shape
    pairs = codes.reshape(n // block, 2, block // 2, k) if halves else codes.reshape(n // block, block // 2, 2, k)
    low, high = pairs.unbind(1 if halves else 2)
    return (low | high << 4).transpose(1, 2).reshape(n, k // 2).contiguous()


def unpack_cpu(packed: Tensor, packing: CpuPacking) -> Tensor:
    """Inverse of `pack_cpu`, which also takes a slice of whole blocks."""
    block, halves = packing
    n, k = packed.shape[0], packed.shape[1] * 2
    pairs = packed.reshape(n // block, k, block // 2).transpose(1, 2)
    return torch.stack([pairs & 15, pairs >> 4], 1 if halves else 2).reshape(n, k)


def pack_cuda(codes: Tensor, inner_k_tiles: int) -> Tensor:
    """int32 (N / 8, K / (16 inner_k_tiles), 32, inner_k_tiles / 2) from codes (N, K)."""
    n, k = codes.shape
    tiles = codes.reshape(n // 8, 8, k // (16 * inner_k_tiles), inner_k_tiles // 2, 2, 2, 4, 2)
    # (tile, n, tiles, word, a, b, c, d) -> (tile, tiles, n, c, word, d, a, b): lanes, words, nibbles
    nibbles = tiles.permute(0, 2, 1, 6, 3, 7, 4, 5).flatten(5).flatten(2, 3)
    return pack_dense(nibbles, 4).squeeze(-1)


def unpack_cuda(packed: Tensor) -> Tensor:
    """Inverse of `pack_cuda`."""
    row_tiles, column_tiles, _, words = packed.shape
    tiles = unpack_dense(packed, 4, words * 8).reshape(row_tiles, column_tiles, 8, 4, words, 2, 2, 2)
    return tiles.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(row_tiles * 8, column_tiles * words * 32)
