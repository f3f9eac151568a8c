"""The operations that several kernels share, on CUDA: by Triton, and some by torch where Triton is missing."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...primitives import MappingType, PerRow, QuantSpec, ZeroPointDomain, qdtype
from ...primitives.granularity import FlatBlocks
from .. import features, registry
from ..custom_ops import implement, note, opaque, portable
from ..ops import block_mm as operation
from ..ops import int_matmul
from ..ops.adam import LARGEST_SCALE, AdamStep, Moment, check_step
from ..ops.kv_attention import KVAttention, attend_by_heads, check_call
from ..ops.quantize import Quantized, has_default_rows, is_absmax_rowwise, quantize_dynamic, quantize_int8_rowwise

_HAS_TRITON = features.cuda_lacks("triton") is None

LONGEST_ROW = 16384
"""Of the asymmetric kernel, which holds a row in registers."""

LARGEST_TILE = 16384
"""Elements of a tile, which the kernel of tiles holds in registers."""


@opaque(lambda x, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)))
def cuda_quantize_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric codes (M, K), int8 or float8, and scale (M, 1); opaque to compilers, whose fp32 divisions round
    otherwise."""
    from .triton.quantize import quantize_columnwise, quantize_rowwise

    if x.stride(1) != 1 and x.stride(0) == 1:
        # A transposed view, from which gradients of weights are made: the same numbers, read in memory order.
        return quantize_columnwise(x.t(), dtype)
    codes, scale, _ = quantize_rowwise(x, dtype)
    return codes, scale


def _fake_tilewise(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(x.shape[0] // rows, x.shape[1] // columns, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


@opaque(_fake_tilewise)
def cuda_quantize_tilewise(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scale (M / rows, K / columns); see `triton/quantize.py`."""
    from .triton.quantize import quantize_tilewise

    return quantize_tilewise(x, (rows, columns), dtype)


def _fake_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_rows = [x.new_empty(x.shape[0], 1, dtype=dtype) for dtype in (torch.float32, torch.int8)]
    return x.new_empty(x.shape, dtype=torch.int8), of_rows[0], of_rows[1]


@opaque(_fake_asymmetric)
def cuda_quantize_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes (M, K), scale and zero point (M, 1); see `triton/quantize.py`."""
    from .triton.quantize import quantize_rowwise_asymmetric

    return quantize_rowwise_asymmetric(x)


@implement("quantize_int8_rowwise", "cuda", where=_HAS_TRITON)
def triton_int8_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quantize_int8_rowwise`."""
    if x.dim() != 2 or x.dtype not in registry.FLOATS:
        return portable(quantize_int8_rowwise)(x)
    return cuda_quantize_rowwise(x, torch.int8)


@implement("quantize_dynamic", "cuda", where=_HAS_TRITON)
def triton_quantize_dynamic(x: Tensor, spec: QuantSpec) -> Quantized:
    """See `quantize_dynamic`."""
    if x.dtype in registry.FLOATS and _is_float8_rowwise(spec):
        codes, scale = cuda_quantize_rowwise(x, spec.dtype.storage)
        return codes, scale, None
    if x.dtype in registry.FLOATS and spec.stored_scale_dtype(x.dtype) is torch.float32 and _has_float8_tiles(spec):
        rows, columns = spec.granularity.pattern(2)
        return *cuda_quantize_tilewise(x, rows, columns, spec.dtype.storage), None
    if x.dtype in registry.FLOATS and x.shape[1] <= LONGEST_ROW and _is_int8_asymmetric(spec):
        return cuda_quantize_asymmetric(x)
    return portable(quantize_dynamic)(x, spec)


def _is_float8_rowwise(spec: QuantSpec) -> bool:
    whole = (spec.dtype.quant_min, spec.dtype.quant_max)
    return spec.dtype.name in ("float8_e4m3fn", "float8_e5m2") and spec.code_range == whole and is_absmax_rowwise(spec)


@functools.lru_cache(maxsize=256)
def _has_float8_tiles(spec: QuantSpec) -> bool:
    rows, columns = spec.granularity.pattern(2)
    small = rows > 0 and columns > 1 and rows * columns <= LARGEST_TILE
    return small and _is_float8_rowwise(spec.with_granularity(PerRow()))


def _is_int8_asymmetric(spec: QuantSpec) -> bool:
    codes = spec.dtype is qdtype("int8") and spec.code_range == (-128, 127)
    integers = spec.mapping is MappingType.ASYMMETRIC and spec.zero_point_domain is ZeroPointDomain.INT
    return codes and integers and has_default_rows(spec)


@implement("int_matmul", "cuda", where=_HAS_TRITON)
def triton_int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """See `int_matmul`."""
    from .triton.int8_scaled_mm import int8_scaled_mm

    int_matmul.check_int8_matrices(a, b)
    note("int_matmul.triton")
    return int8_scaled_mm(a, b, None, None, torch.int32)


@implement("int_matmul", "cuda", where=not _HAS_TRITON)
def cublas_int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """See `int_matmul`. cuBLASLt takes more than 16 rows and multiples of 8 of the rest: pad with zeros."""
    int_matmul.check_int8_matrices(a, b)
    note("int_matmul.cublas")
    (m, k), n = a.shape, b.shape[1]
    rows, inner, columns = max(m, 17), -(-k // 8) * 8, -(-n // 8) * 8
    if (rows, inner, columns) == (m, k, n):
        return torch._int_mm(a, b)
    a, b = pad(a, (0, inner - k, 0, rows - m)), pad(b, (0, columns - n, 0, inner - k))
    return torch._int_mm(a, b)[:m, :n]


@implement("tile_scaled_mm", "cuda", where=_HAS_TRITON)
def triton_tile_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `tile_scaled_mm`."""
    from .triton.tile_scaled_mm import tile_scaled_mm

    lacks = a.dtype != torch.int8 and features.cuda_lacks("float8")
    if lacks or a.dtype != b.dtype or a.shape[1] // max(1, a_scale.shape[1]) > int_matmul.int32_terms():
        return portable(operation.tile_scaled_mm)(a, b, a_scale, b_scale, dtype)
    note("tile_scaled_mm.triton")
    return tile_scaled_mm(a, b, a_scale, b_scale, dtype)


@implement("int8_block_mm", "cuda", where=_HAS_TRITON)
def triton_int8_block_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """See `int8_block_mm`; blocks of two sizes by torch."""
    if xs.shape[1] != ws.shape[1] or xq.shape[1] // max(1, xs.shape[1]) > int_matmul.int32_terms():
        return portable(operation.int8_block_mm)(xq, xs, wq, ws, dtype)
    return triton_tile_scaled_mm(xq, wq, xs.float(), ws.float(), dtype)


@implement("adam_step", "cuda", where=_HAS_TRITON)
def triton_adam_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """See `adam_step`."""
    from .triton.adam import adam

    check_step(weight, grad, moments, blocks, step)
    note("adam_step.triton")
    adam(weight, grad, moments, blocks, step, LARGEST_SCALE[step.form])
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def random_seed(device: torch.device) -> Tensor:
    """A seed for Philox, drawn on the device: int64 (1,)."""
    return torch.randint(1 << 62, (1,), device=device)


@implement("update_bf16", "cuda", where=_HAS_TRITON)
def triton_update_bf16(weight: Tensor, update: Tensor, alpha: float) -> None:
    """See `stochastic_update_bf16_`."""
    from .triton.stochastic_update import update_bf16

    note("stochastic_update_bf16_.triton")
    update_bf16(weight, update, alpha, random_seed(weight.device))


@implement("update_int8", "cuda", where=_HAS_TRITON)
def triton_update_int8(codes: Tensor, scale: Tensor, update: Tensor, alpha: float) -> None:
    """See `stochastic_update_int8_`."""
    from .triton.stochastic_update import update_int8

    note("stochastic_update_int8_.triton")
    update_int8(codes, scale, update, alpha, random_seed(codes.device))


@registry.register(
    "kv_attention", layout=("plain", "packed"), weight=("int8", "uint4", "uint3", "uint2", "float8_e4m3fn"),
    activation=(), device="cuda", priority=20,
    supports=lambda problem: features.cuda_lacks("triton") or registry.needs_floats(problem),
)  # fmt: skip
def triton_kv_attention(call: KVAttention) -> Tensor:
    """See `kv_attention`. The number of tokens in use is read by the kernel, not on the host."""
    from .triton.kv_attention import kv_attention

    check_call(call)
    if not call.query.numel() or not call.length or not call.width:
        return attend_by_heads(call)
    return kv_attention(call)
