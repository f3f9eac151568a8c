"""What a decoder does around its products, compiled (src/decoder.h): norms and rotary embeddings of a token.

Each function gives None for what it does not take: tensors elsewhere than on the CPU, of other dtypes, or with steps
along the last axis.
"""

from torch import Tensor

from ..custom_ops import note, recording
from ..registry import FLOATS
from .compiled_library import TYPES, Library, library, threads
from .memory import address, empty, empty_at
from .structs import RmsNorm, Rotation, struct_of

_pack_norm, _pack_rotation = struct_of(RmsNorm).pack, struct_of(Rotation).pack


def _library(name: str, *tensors: Tensor) -> Library | None:
    """The compiled kernels, if they take these tensors."""
    kind = tensors[0].dtype
    compiled = library() if kind in FLOATS else None
    if compiled is None:
        return None
    for x in tensors:
        if not x.is_cpu or x.dtype is not kind or x.stride(-1) != 1 or x.is_neg():
            return None
    if recording():
        note(f"{name}.{compiled.instruction_set}")
    return compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool) -> Tensor | None:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), in fp32, over the last axis of x.

    Args:
        x: (..., K) fp32, bf16 or fp16.
        weight: (K), like x.
        rounds: whether x / sqrt(...) is rounded to the dtype before it is multiplied.
    """
    k = x.shape[-1]
    compiled = _library("rms_norm", x, weight) if x.numel() and weight.shape == (k,) else None
    if compiled is None:
        return None
    y, step = empty((*x.shape,), x.dtype), k
    if not x.is_contiguous():
        x = x.reshape(-1, k)
        step = x.stride(0)
    of_x = address(x), TYPES[x.dtype], step, x.numel() // k
    compiled.rms_norm(_pack_norm(*of_x, address(weight), address(y), k, rounds, eps, offset, threads()))
    return y


def rotate_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """x cos + cat(-x[..., D / 2:], x[..., : D / 2]) sin of queries and keys: each product is rounded to the dtype, as
    torch's operators do, and the results have their bits.

    Args:
        query, key: (B, H, M, D) and (B, H', M, D), fp32, bf16 or fp16.
        cos, sin: (B or 1, M, D), like them.
    """
    if query.dim() != 4 or key.dim() != 4 or not query.numel():
        return None
    (batch, heads, rows, width), key_heads = query.shape, key.shape[1]
    angles = cos.shape
    if (
        key.shape != (batch, key_heads, rows, width)
        or angles not in ((batch, rows, width), (1, rows, width))
        or sin.shape != angles
        or width % 2
        or (compiled := _library("rotate_halves", query, key, cos, sin)) is None
    ):
        return None
    kind, some = query.dtype, angles[0] > 1
    turned, at = empty_at((batch, rows, heads, width), kind)
    turned_key, key_at = empty_at((batch, rows, key_heads, width), kind)
    compiled.rotate_halves(_pack_rotation(
        address(query), *query.stride()[:3], heads, at, address(key), *key.stride()[:3], key_heads, key_at,
        address(cos), address(sin), some * cos.stride(0), cos.stride(1), some * sin.stride(0), sin.stride(1),
        TYPES[kind], batch, rows, width, threads(),
    ))  # fmt: skip
    return turned.transpose(1, 2), turned_key.transpose(1, 2)
