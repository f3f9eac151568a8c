"""Operands of training products, compiled: floats to codes in whichever order a product wants them, and back; and
integer products with scales for blocks of both operands, or one scale a row.

Torch's own operators pass over an operand a dozen times, and write a tensor of its size each time.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives import MappingType, MinMaxRule, QDType, QuantSpec, Rounding, ZeroPointDomain, granularity, tracing
from ..custom_ops import TENSORS, implement, note, portable
from ..ops.block_mm import int8_block_mm
from ..ops.int8_grouped_mm import int8_rows_product, large_scale
from ..ops.int_matmul import EXACT_SLICE, int32_terms, int_matmul_into
from ..ops.quantize import Quantized, is_int8_rowwise, quantize_dynamic, quantize_rows, shares_scales
from ..ops.weight_only_mm import dequantize_codes
from ..registry import FLOATS
from . import variants
from .compiled_library import TYPES, Library, library, threads
from .memory import address, empty, empty_at
from .structs import BlockProduct, DequantizeMatrix, IntCall, QuantizeMatrix, ScaleSums, Weight, struct_of

_quantize = struct_of(QuantizeMatrix).pack
_dequantize = struct_of(DequantizeMatrix).pack

_block_product = struct_of(BlockProduct).pack
_scale_sums = struct_of(ScaleSums).pack
_weight, _int_call = struct_of(Weight).pack, struct_of(IntCall).pack
_REST = tuple(Weight._field_defaults.get(name, 0.0) for name in Weight._fields[14:])

INTEGER = 0
FORMATS = {"float8_e4m3fn": 1, "float8_e5m2": 2}  # as in src/quantize_matrix.h; other codes are INTEGER
VECTOR = 16  # blocks of so many columns, or a multiple, are whole vectors on every machine
MOST_ROWS = 256  # of a block: its stripe of the operand should fit in the cache
MOST_TERMS = int32_terms()
LEAST_TERMS = 32  # of a product by what layers run; shorter ones are faster in blocks (measured)
FEW_ROWS = 64  # of x; beyond, blocks are faster where both compute in fp32 (measured)
IN_FLOATS = ("portable", "avx2", "avx512")  # sets that multiply blocks in fp32, exactly up to `EXACT_SLICE` terms
UNIT = 4  # codes that others multiply together: the size of a block along the contracted axis is a multiple


class Numbers(NamedTuple):
    """How a spec chooses scales and codes: fields of `QuantizeMatrix`, and what follows from the spec besides."""

    format: int
    least: float
    most: float
    bound: float
    smallest: float
    largest: float
    power: float
    is_stochastic: bool
    storage: torch.dtype
    block: tuple[int, ...]


@functools.cache
def numbers_of(spec: QuantSpec, dtype: torch.dtype) -> Numbers | None:
    """Those of a matrix of `dtype`, None for what the compiled code does not follow."""
    kind, scale_dtype = spec.dtype, spec.stored_scale_dtype(dtype)
    integer = not kind.is_floating_point and kind.storage is torch.int8
    if (
        type(spec) is not QuantSpec
        or dtype not in FLOATS
        or spec.has_zero_point
        or spec.mapping is not MappingType.SYMMETRIC
        or spec.zero_point_domain not in (ZeroPointDomain.INT, ZeroPointDomain.NONE)
        or type(spec.scale_rule) is not MinMaxRule
        or spec.scale_spec is not None
        or scale_dtype not in (torch.float32, torch.float8_e8m0fnu)
        or not (integer or kind.name in FORMATS)
        or (spec.rounding is Rounding.STOCHASTIC and not (integer and spec.noise is None))
    ):
        return None
    low, high = spec.code_range
    limits = torch.finfo(scale_dtype)
    # As in `choose_qparams_affine_with_min_max`; `quantize_int8_rowwise` has no largest scale.
    largest = min(limits.max, torch.finfo(torch.bfloat16).max / ((high - low + 1) / 2))
    return Numbers(
        format=FORMATS.get(kind.name, INTEGER), least=low, most=high,
        bound=(high - low + (not spec.preserve_max_val)) / 2, smallest=max(limits.tiny, spec.eps or 0.0),
        largest=math.inf if is_int8_rowwise(spec) else largest,
        power=2.0 ** (math.frexp(high)[1] - 1) if scale_dtype is torch.float8_e8m0fnu else 0.0,
        is_stochastic=spec.rounding is Rounding.STOCHASTIC, storage=kind.storage, block=spec.granularity.pattern(2),
    )  # fmt: skip


def readers(*matrices: Tensor) -> Library | None:
    """The library, if these matrices have memory and nothing records what is done with them: no graph, gradient or
    transform."""
    if tracing.see_operators():
        return None
    for x in matrices:
        if type(x) not in TENSORS or x.dim() != 2 or not x.numel() or (x.requires_grad and torch.is_grad_enabled()):
            return None
    return library()


@implement("quantize_dynamic", "cpu")
def cpu_quantize_dynamic(x: Tensor, spec: QuantSpec) -> Quantized:
    """See `quantize_dynamic`."""
    return _quantized(x, spec) or portable(quantize_dynamic)(x, spec)


@implement("quantize_rows", "cpu")
def cpu_quantize_rows(x: Tensor, spec: QuantSpec) -> Quantized:
    """See `quantize_rows`."""
    return _quantized(x, spec, tokens=shares_scales(spec)) or portable(quantize_rows)(x, spec)


def _quantized(x: Tensor, spec: QuantSpec, tokens: bool = False) -> Quantized | None:
    """Codes and scale; None where the compiled code does not do it. With `tokens`, rows that share scales are
    independent."""
    if (compiled := readers(x)) is None or (numbers := numbers_of(spec, x.dtype)) is None:
        return None
    (rows, columns), (block_rows, block_columns) = x.shape, numbers.block
    block_rows, block_columns = rows if block_rows < 0 else block_rows, columns if block_columns < 0 else block_columns
    if rows % block_rows or columns % block_columns:
        return None  # torch operators raise the error
    whole = block_rows == rows and block_columns == columns
    if not whole and (block_rows > MOST_ROWS or (block_columns != columns and block_columns % VECTOR)):
        return None
    return *codes_of(compiled, x, numbers, block_rows, block_columns, tokens), None


def codes_of(
    compiled: Library, x: Tensor, numbers: Numbers, block_rows: int, block_columns: int, tokens: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scale of a readable `x`, whose blocks the compiled code takes."""
    rows, columns = x.shape
    x = x if 1 in x.stride() else x.contiguous()
    # As `round_to_integer`, which draws random numbers in the order of the memory of `x`.
    noise = torch.rand_like(x, dtype=torch.float32) if numbers.is_stochastic else None
    note(f"quantize_matrix.{compiled.instruction_set}")
    scale_of_rows = tokens and not numbers.format
    shape = rows if scale_of_rows else rows // block_rows, columns // block_columns
    codes, to_codes = empty_at((rows, columns), numbers.storage)
    scale, to_scale = empty_at(shape, torch.float8_e8m0fnu if numbers.power else torch.float32)
    compiled.quantize_matrix(_quantize(
        address(x), TYPES[x.dtype], *x.stride(), rows, columns, block_rows, block_columns, *numbers[:7], tokens,
        scale_of_rows, *((0, 0, 0) if noise is None else (address(noise, torch.float32), *noise.stride())),
        to_codes, to_scale, threads(),
    ))  # fmt: skip
    return codes, scale


@implement("dequantize_codes", "cpu")
def cpu_dequantize_codes(codes: Tensor, scale: Tensor | None, zero: Tensor | None, kind: QDType, *about: Any) -> Tensor:
    """See `dequantize_codes`; the last of `about` is the dtype of the result."""
    real = _reals(codes, scale, kind) if zero is None and about[-1] is torch.float32 else None
    return portable(dequantize_codes)(codes, scale, zero, kind, *about) if real is None else real


def _reals(codes: Tensor, scale: Tensor | None, kind: QDType) -> Tensor | None:
    """Those of codes without zero points, in fp32; None where the compiled code does not do it."""
    integer = not kind.is_floating_point and kind.storage is torch.int8
    if not (integer or kind.name in FORMATS) or (compiled := readers(codes)) is None:
        return None
    if codes.stride(1) != 1:
        if codes.stride(0) != 1:
            return None
        real = _reals(codes.t(), None if scale is None else scale.t(), kind)
        return None if real is None else real.t()
    block = tuple(codes.shape) if scale is None else granularity.block_of(codes.shape, scale.shape)
    if scale is not None and scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        return None
    note(f"dequantize_matrix.{compiled.instruction_set}")
    real = empty(tuple(codes.shape), torch.float32)
    compiled.dequantize_matrix(_dequantize(
        address(codes, kind.storage), codes.stride(0), *codes.shape, FORMATS.get(kind.name, INTEGER), address(scale),
        scale is not None and scale.dtype is torch.float8_e8m0fnu, *((0, 0) if scale is None else scale.stride()),
        *block, address(real, torch.float32), threads(),
    ))  # fmt: skip
    return real


@implement("int8_block_mm", "cpu")
def cpu_int8_block_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """See `int8_block_mm`."""
    (m, k), n, groups = xq.shape, wq.shape[0], max(xs.shape[1], ws.shape[1])
    compiled, group = library(), k // groups if groups else 0
    fits = compiled is not None and dtype in FLOATS and (compiled.instruction_set in IN_FLOATS or not group % UNIT)
    if compiled is None or not fits or not (xq.numel() and wq.numel()) or group > EXACT_SLICE:
        note("int8_block_mm.torch")
        return portable(int8_block_mm)(xq, xs, wq, ws, dtype)
    note(f"int8_block_mm.{compiled.instruction_set}")
    xq, wq = xq.contiguous(), wq if 1 in wq.stride() else wq.contiguous()
    xs, ws = xs.float(), ws.float()
    y = empty((m, n), dtype)
    compiled.block_product(_block_product(
        address(xq, torch.int8), address(wq, torch.int8), *wq.stride(), m, n, k, group, *_scale_fields(xs, m, groups),
        *_scale_fields(ws, n, groups), address(y), TYPES[dtype], threads(),
    ))  # fmt: skip
    return y


def _scale_fields(scale: Tensor, rows: int, groups: int) -> tuple[int, ...]:
    return address(scale, torch.float32), *scale.stride(), rows // scale.shape[0], groups // scale.shape[1]


def product_of_rows(compiled: Library, xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """`int8_grouped_mm` of one group of at most `MOST_TERMS` signed codes without zero points, (M, N), by what
    `variants` has for layers."""
    (m, k), n = xq.shape, wq.shape[0]
    xs, ws, count = xs.float(), ws.float(), threads()
    of_rows = xs.numel() == m and ws.numel() == n and xs.is_contiguous() and ws.is_contiguous()
    in_block = k <= EXACT_SLICE and compiled.instruction_set in IN_FLOATS
    many = k < LEAST_TERMS or (in_block and m > FEW_ROWS)
    if of_rows and not many and xq.is_contiguous() and wq.is_contiguous():
        variant = variants.choose(compiled.instruction_set, variants.key_of("int8", False, False, n * k), m)
        if variant in ("dot", "tile"):
            note("int_matmul")
            note(f"int_matmul.{compiled.instruction_set}.{variant}")
            y, to_y = empty_at((m, n), dtype)
            of_weight = _weight(address(wq, torch.int8), k, 0, 0, n, k, k, 1, address(ws), 0, 1, 0, 0, 1, *_REST)
            of_x = address(xq, torch.int8), TYPES[torch.int8], k, m
            of_y = to_y, TYPES[dtype], n, 0, 0, 0, 0, 0, 0.0, 0.0
            of_call = _int_call(*of_x, *of_y, address(xs), 0, variants.VARIANTS[variant], count)
            if not compiled.int8_mm(of_weight + of_call):
                return y
            # What is not finite may be so on the way only.
    if in_block and bool(ws.amax() <= large_scale()):
        note("int_matmul")
        return cpu_int8_block_mm(xq, xs, wq, ws, dtype)
    note(f"scale_sums.{compiled.instruction_set}")
    y, to_y = empty_at((m, n), dtype)
    # In fp32, sums are scaled where they lie: a result of some megabytes is memory that the system has to give anew.
    sums = y.view(torch.int32) if dtype is torch.float32 else empty((m, n), torch.int32)
    int_matmul_into(sums, xq, wq.t())
    compiled.scale_sums(_scale_sums(
        address(sums, torch.int32), m, n, address(xs), xs.stride(0) if xs.shape[0] > 1 else 0, address(ws),
        ws.stride(0) if ws.shape[0] > 1 else 0, to_y, TYPES[dtype], count,
    ))  # fmt: skip
    return y


@implement("int8_rows_product", "cpu")
def cpu_int8_rows_product(x: Tensor, x_spec: QuantSpec, w: Tensor, w_spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """See `int8_rows_product`."""
    if dtype in FLOATS and (compiled := readers(x, w)) is not None and x.shape[1] <= MOST_TERMS:
        of_x, of_w = numbers_of(x_spec, x.dtype), numbers_of(w_spec, w.dtype)
        if of_x is not None and of_w is not None:
            wq, ws = codes_of(compiled, w, of_w, 1, w.shape[1])
            xq, xs = codes_of(compiled, x, of_x, 1, x.shape[1])
            return product_of_rows(compiled, xq, xs, wq, ws, dtype)
    return portable(int8_rows_product)(x, x_spec, w, w_spec, dtype)
