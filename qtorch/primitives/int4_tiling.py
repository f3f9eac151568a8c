"""Packings of 4-bit codes for torch's tinygemm kernels, in plain torch, with inverses.

Equal to what `aten._convert_weight_to_int4pack` (CUDA) and `aten._convert_weight_to_int4pack_for_cpu` give (sources:
pytorch, aten/src/ATen/native/cuda/int4mm.cu and cpu/int4mm_kernel.cpp), but any device can make either.

CUDA: tiles of 8 rows and 32 columns are int32 words of eight codes, one for each lane t of a warp; `inner_k_tiles` / 2
words of a lane lie together: (N / 8, K / (16 inner_k_tiles), 32, inner_k_tiles / 2). Of row n of a tile and its column
k = 16 a + 8 b + 2 c + d, the code is in nibble 4 d + 2 a + b of lane 4 n + c.

CPU: blocks of B rows, each a (K, B / 2) matrix of bytes of two codes, seen as (N, K / 2). The rows that share a byte
are B / 2 apart where the processor has vectors for it, and neighbours elsewhere; B is 64 with AVX-512, 32 with AVX2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class CpuPacking(NamedTuple):
    """Rows in a block, and whether its halves share bytes (else its neighbours do)."""

    block: int
    halves: bool


@functools.cache
def cpu_packing() -> CpuPacking:
    """The packing of this processor, from an example.

    Raises:
        NotImplementedError: it is none of those known.
    """
    with _disable_current_modes(), torch.inference_mode():
        codes = torch.arange(64 * 32, dtype=torch.int32).mul_(2654435761 % 2**31).bitwise_right_shift_(20) & 15
        codes = codes.reshape(64, 32)
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
    """Inverse of `pack_cpu`; also of a run of whole blocks."""
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
    shifts = torch.arange(0, 32, 4, device=codes.device)
    # Words of 2^31 and above wrap around to negative int32.
    return (nibbles.to(torch.int64) << shifts).sum(-1).to(torch.int32)


def unpack_cuda(packed: Tensor) -> Tensor:
    """Inverse of `pack_cuda`."""
    row_tiles, column_tiles, _, words = packed.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = ((packed.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
    tiles = nibbles.reshape(row_tiles, column_tiles, 8, 4, words, 2, 2, 2).permute(0, 2, 1, 4, 6, 7, 3, 5)
    return tiles.reshape(row_tiles * 8, column_tiles * words * 32)
