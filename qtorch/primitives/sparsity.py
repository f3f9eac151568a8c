"""2:4 semi-structured sparsity: of each run of four along an axis, at most two elements are not zero.

Pruning a weight to it, and two packings of codes of 8 bits that are:

`pack_2_4`, on any device, at 5 bits a code. The axis is padded to 16 G codes, 4 G runs of four. A run keeps two codes
a, b and their positions i < j in it; where fewer are not zero, the first zeros fill up. Along the axis come

    a of every run (4 G bytes), b of every run (4 G), `pack_bits` of i of every run and j of every run (2 G)

and a run is the little-endian word a << 8 i | b << 8 j: unpacking is shifts of whole contiguous runs, which vectorize.

`compress_cusparselt`, for the sparse tensor cores of CUDA devices: the order of cuSPARSELt, which it does not document,
of the same size, for a matrix padded to multiples of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .packing import pack_bits, unpack_bits

_GROUP = 16
_TILE = 32


def prune_2_4(weight: Tensor) -> Tensor:
    """Keep the two largest magnitudes of each four along the last axis, the first ones of equals; the rest is zero.

    A last run of less than four is one of four that ends in zeros.
    """
    fours = _fours(weight)
    magnitudes = fours.abs().unbind(-1)
    # Kept is what fewer than two beat: larger ones, and equal ones before it.
    kept = []
    for i, x in enumerate(magnitudes):
        beats = [y >= x if j < i else y > x for j, y in enumerate(magnitudes) if j != i]
        kept.append(torch.stack(beats).sum(0, dtype=torch.uint8) < 2)
    return torch.where(torch.stack(kept, -1), fours, 0).flatten(-2)[..., : weight.shape[-1]].contiguous()


def is_2_4(tensor: Tensor) -> bool:
    """Whether at most two elements of each four along the last axis are not zero."""
    return not bool((_fours(tensor) != 0).sum(-1).gt(2).any())


def packed_length_2_4(length: int) -> int:
    """Bytes that `pack_2_4` makes of `length` codes."""
    return -(-length // _GROUP) * 10


def pack_2_4(codes: Tensor, axis: int = -1) -> Tensor:
    """Pack 2:4 codes of 8 bits, in any dtype of one byte, along `axis` into uint8; format at the top of the file.

    What counts as zero is a byte of zero bits; the negative zero of float8 is none.

    Raises:
        ValueError: a run of four has more than two codes that are not zero.
    """
    fours = _fours(codes.view(torch.uint8).movedim(axis, -1), _GROUP)
    nonzero = fours != 0
    if not codes.is_meta and (broken := int((nonzero.sum(-1) > 2).sum())):
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} are not 2:4 sparse along axis {axis}: {broken} of "
            f"{fours.numel() // 4} runs of four have more than two that are not zero; prune_2_4 makes them so"
        )
    which = (nonzero * nonzero.new_tensor([1, 2, 4, 8], dtype=torch.uint8)).sum(-1)
    positions = torch.tensor(_POSITIONS, device=codes.device)[which]
    values = fours.gather(-1, positions)
    first_then_second = [t.transpose(-2, -1).flatten(-2) for t in (values, positions)]
    return torch.cat([first_then_second[0], pack_bits(first_then_second[1], 2)], -1).movedim(-1, axis)


def unpack_2_4(packed: Tensor, length: int, dtype: torch.dtype, axis: int = -1) -> Tensor:
    """Inverse of `pack_2_4`: the first `length` codes along `axis`, in a dtype of one byte.

    Raises:
        ValueError: `packed` is not of the size that `length` codes take.
    """
    if packed.shape[axis] != packed_length_2_4(length):
        raise ValueError(
            f"{length} codes, 2:4 sparse, take {packed_length_2_4(length)} bytes, axis {axis} of "
            f"{tuple(packed.shape)} has {packed.shape[axis]}"
        )
    rows = packed.movedim(axis, -1)
    kept = rows.shape[-1] // 10 * 8
    shifts = unpack_bits(rows[..., kept:], 2, kept, dtype=torch.int32).mul_(8)
    first, second = rows[..., :kept].to(torch.int32).bitwise_left_shift_(shifts).chunk(2, -1)
    codes = (first | second).view(torch.uint8)
    return codes[..., :length].contiguous().view(dtype).movedim(-1, axis)


def has_cusparselt(codes: Tensor) -> bool:
    """Whether cuSPARSELt can hold these codes, int8 or float8_e4m3fn, on their device, and give them back."""
    if codes.device.type != "cuda" or codes.dim() != 2 or torch.version.hip or not codes.numel():
        return False
    oldest = (8, 9) if codes.is_floating_point() else (8, 0)
    if torch.cuda.get_device_capability(codes.device) < oldest or not torch.backends.cusparselt.is_available():
        return False
    # Decompressing multiplies, which turns a negative zero into a positive one.
    return not (codes.is_floating_point() and bool((codes.view(torch.uint8) == 0x80).any()))


def compressed_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of what `compress_cusparselt` makes of codes (N, K)."""
    return n + -n % _TILE, (k + -k % _TILE) // 8 * 5


def compress_cusparselt(codes: Tensor) -> Tensor:
    """2:4 codes (N, K) in the order of cuSPARSELt: (N', 5/8 K') in their dtype, N' and K' multiples of 32."""
    n, k = codes.shape
    padded = torch.zeros(n + -n % _TILE, k + -k % _TILE, dtype=codes.dtype, device=codes.device)
    padded[:n, :k] = codes
    return torch._cslt_compress(padded).view(padded.shape[0], -1)


def decompress_cusparselt(compressed: Tensor, n: int, k: int) -> Tensor:
    """Inverse of `compress_cusparselt`, by the product with the identity, which is exact: codes (N, K)."""
    identity = torch.eye(k + -k % _TILE, device=compressed.device).to(compressed.dtype)
    wide = torch.float16 if compressed.is_floating_point() else torch.int32
    codes = torch._cslt_sparse_mm(compressed, identity.t(), out_dtype=wide)
    return codes[:n, :k].to(compressed.dtype).contiguous()


def _fours(tensor: Tensor, multiple: int = 4) -> Tensor:
    """(..., K) -> (..., runs, 4), K padded with zeros to a multiple."""
    return pad(tensor, (0, -tensor.shape[-1] % multiple)).unflatten(-1, (-1, 4))


def _positions(which: int) -> list[int]:
    """The two positions that are kept of a run whose elements that are not zero are the bits of `which`."""
    return sorted(sorted(range(4), key=lambda i: not which >> i & 1)[:2])


_POSITIONS = [_positions(which) for which in range(16)]
