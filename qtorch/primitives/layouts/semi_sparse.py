"""SemiSparseLayout: 8-bit codes that are 2:4 sparse along one axis, stored at 5 bits per element.

`pack_2_4` works on any device. The axis is padded to 16 G codes, 4 G runs of four. A run stores two codes a, b and
their positions i < j; if fewer than two are not zero, the first zeros are stored too. Along the axis come

    a of every run (4 G bytes), b of every run (4 G), `pack_bits` of i of every run and j of every run (2 G)

and a run is the little-endian word a << 8 i | b << 8 j, so unpacking is shifts of contiguous runs, which vectorize.

`compress_cusparselt` packs for the sparse tensor cores of CUDA devices, in the undocumented order of cuSPARSELt, to the
same size, a matrix padded to multiples of 64.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pruning import runs_of_four
from ..spec import QuantSpec, Scheme
from .base import Form, register_layout
from .packed import LayoutAlongAxis, pack_bits, unpack_bits


@register_layout
@dataclass(frozen=True, repr=False)
class SemiSparseLayout(LayoutAlongAxis):
    """int8 or float8_e4m3fn codes with at most two that are not zero in each run of four, packed; scale separate.

    Packed codes are uint8, or, for a matrix that is sparse along its rows on a CUDA device with sparse tensor cores, in
    the order of cuSPARSELt and the dtype of the codes. They are sparse along `axis`.
    """

    name = "semi_sparse"
    any_codes = False

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.dtype.name not in ("int8", "float8_e4m3fn"):
            raise ValueError(f"SemiSparseLayout packs int8 and float8_e4m3fn codes, the weight has {weight.dtype}")
        if weight.has_zero_point:
            raise ValueError(f"SemiSparseLayout takes no zero point, as zeros have the code zero, got {weight}")

    def packing(self, device: torch.device) -> Hashable:
        return "cusparselt" if device.type == "cuda" and self.axis == -1 else None

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        shape = list(scheme.codes_shape)
        shape[self.axis] = packed_length_2_4(shape[self.axis])
        forms = (Form(tuple(shape), {torch.uint8}),)
        if len(shape) != 2 or self.axis != -1:
            return forms
        return (*forms, Form(compressed_shape(*scheme.codes_shape), {scheme.weight.dtype.storage}))

    def pack_qdata(self, codes: Tensor, scheme: Scheme) -> Tensor:
        packed = pack_2_4(codes, self.axis)  # which checks that they are sparse
        return compress_cusparselt(codes) if self.axis == -1 and has_cusparselt(codes) else packed

    def unpack_qdata(self, qdata: Tensor, scheme: Scheme) -> Tensor:
        if self.can_view(qdata):
            return unpack_2_4(qdata, scheme.shape[self.axis], scheme.weight.dtype.storage, self.axis)
        return decompress_cusparselt(qdata, *scheme.shape)

    def can_view(self, qdata: Tensor) -> bool:
        return qdata.dtype == torch.uint8


_GROUP = 16
_TILE = 64  # cuSPARSELt takes multiples of 32; the positions of 4096 codes take 512 bytes, to which it rounds them up


def packed_length_2_4(length: int) -> int:
    """Number of bytes into which `pack_2_4` packs `length` codes."""
    return -(-length // _GROUP) * 10


def pack_2_4(codes: Tensor, axis: int = -1) -> Tensor:
    """Pack 2:4 sparse codes in any one-byte dtype along `axis` into uint8; format at the top of the file. A code is
    zero if its byte is zero, so the negative zero of float8 is not. `ValueError` if a run of four has more than two
    codes that are not zero."""
    fours = runs_of_four(codes.view(torch.uint8).movedim(axis, -1), _GROUP)
    nonzero = fours != 0
    if not codes.is_meta and (broken := int((nonzero.sum(-1) > 2).sum())):
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} are not 2:4 sparse along axis {axis}: {broken} of "
            f"{fours.numel() // 4} runs of four have more than two that are not zero; prune the weight with prune_2_4"
        )
    which = (nonzero * nonzero.new_tensor([1, 2, 4, 8], dtype=torch.uint8)).sum(-1)
    positions = torch.tensor(_POSITIONS, device=codes.device, dtype=torch.int64)[which]
    values = fours.gather(-1, positions)
    first_then_second = [t.transpose(-2, -1).flatten(-2) for t in (values, positions)]
    return torch.cat([first_then_second[0], pack_bits(first_then_second[1], 2)], -1).movedim(-1, axis)


def unpack_2_4(packed: Tensor, length: int, dtype: torch.dtype, axis: int = -1) -> Tensor:
    """Inverse of `pack_2_4`: the first `length` codes along `axis`, in a dtype of one byte; `ValueError` if `packed`
    has another size."""
    if packed.shape[axis] != packed_length_2_4(length):
        found = f"axis {axis} of {tuple(packed.shape)} has {packed.shape[axis]}"
        raise ValueError(f"{length} codes, 2:4 sparse, take {packed_length_2_4(length)} bytes, {found}")
    rows = packed.movedim(axis, -1)
    kept = rows.shape[-1] // 10 * 8
    shifts = unpack_bits(rows[..., kept:], 2, kept, dtype=torch.int32).mul_(8)
    first, second = rows[..., :kept].to(torch.int32).bitwise_left_shift_(shifts).chunk(2, -1)
    return (first | second).view(torch.uint8)[..., :length].contiguous().view(dtype).movedim(-1, axis)


def has_cusparselt(codes: Tensor) -> bool:
    """Whether cuSPARSELt supports the device of these codes (int8 or float8_e4m3fn) and restores them exactly."""
    if codes.device.type != "cuda" or codes.dim() != 2 or torch.version.hip or not codes.numel():
        return False
    oldest = (8, 9) if codes.is_floating_point() else (8, 0)
    if torch.cuda.get_device_capability(codes.device) < oldest or not torch.backends.cusparselt.is_available():
        return False
    # Decompression is a product, which turns a negative zero into a positive one.
    return not (codes.is_floating_point() and bool((codes.view(torch.uint8) == 0x80).any()))


def compressed_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of the result of `compress_cusparselt` for codes (N, K)."""
    return n + -n % _TILE, (k + -k % _TILE) // 8 * 5


def compress_cusparselt(codes: Tensor) -> Tensor:
    """Pack 2:4 codes (N, K) in the order of cuSPARSELt: (N', 5/8 K') in their dtype, N' and K' multiples of 64."""
    n, k = codes.shape
    padded = torch.zeros(n + -n % _TILE, k + -k % _TILE, dtype=codes.dtype, device=codes.device)
    padded[:n, :k] = codes
    return torch._cslt_compress(padded).view(padded.shape[0], -1)


def decompress_cusparselt(compressed: Tensor, n: int, k: int) -> Tensor:
    """Inverse of `compress_cusparselt`, computed as an exact product with the identity: codes (N, K)."""
    identity = torch.eye(k + -k % _TILE, device=compressed.device, dtype=torch.float32).to(compressed.dtype)
    wide = torch.float16 if compressed.is_floating_point() else torch.int32
    codes = torch._cslt_sparse_mm(compressed, identity.t(), out_dtype=wide)
    return codes[:n, :k].to(compressed.dtype).contiguous()


_POSITIONS = [sorted(sorted(range(4), key=lambda i: not which >> i & 1)[:2]) for which in range(16)]
"""The two positions stored for a run, by the bit mask `which` of its elements that are not zero."""
