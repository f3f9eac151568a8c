"""Integer products of operands of training, compiled: scales for blocks of both operands, and what follows a product
that has one scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_ops import implement, note, portable
from ..ops.int8_block_mm import int8_block_mm
from ..ops.int_matmul import EXACT_SLICE, int32_terms, int_matmul_into
from .compiled_library import TYPES, library, threads
from .memory import address, empty
from .operand_structs import BlockProduct, ScaleSums
from .structs import struct_of

_block_product = struct_of(BlockProduct).pack
_scale_sums = struct_of(ScaleSums).pack

UNIT = 4
"""Codes that are multiplied together: the size of a block along the contracted axis is a multiple."""


@implement("int8_block_mm", "cpu")
def cpu_int8_block_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """See `int8_block_mm`."""
    (m, k), n, groups = xq.shape, wq.shape[0], max(xs.shape[1], ws.shape[1])
    compiled, group = library(), k // groups if groups else 0
    if compiled is None or not (xq.numel() and wq.numel()) or group % UNIT or group > EXACT_SLICE:
        note("int8_block_mm.torch")
        return portable(int8_block_mm)(xq, xs, wq, ws, dtype)
    note(f"int8_block_mm.{compiled.instruction_set}")
    xq, wq = xq.contiguous(), wq if 1 in wq.stride() else wq.contiguous()
    xs, ws = xs.float(), ws.float()
    y = empty((m, n), dtype)
    compiled.block_product(
        _block_product(
            address(xq, torch.int8),
            address(wq, torch.int8),
            *wq.stride(),
            m,
            n,
            k,
            group,
            *_scale_fields(xs, m, groups),
            *_scale_fields(ws, n, groups),
            address(y),
            TYPES[dtype],
            threads(),
        )
    )
    return y


def _scale_fields(scale: Tensor, rows: int, groups: int) -> tuple[int, ...]:
    return address(scale, torch.float32), *scale.stride(), rows // scale.shape[0], groups // scale.shape[1]


def scaled_int_matmul(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`int8_grouped_mm` of one group and signed codes without zero points, (M, N); None if nothing is compiled, or
    an int32 might not hold the sums.

    In fp32, sums are scaled where they lie: a result of some megabytes is memory that the system has to give anew.
    """
    compiled = library()
    if compiled is None or not (xq.numel() and wq.numel()) or xq.shape[1] > int32_terms():
        return None
    note(f"scale_sums.{compiled.instruction_set}")
    (m, _), n = xq.shape, wq.shape[0]
    y = empty((m, n), dtype)
    sums = y.view(torch.int32) if dtype is torch.float32 else empty((m, n), torch.int32)
    int_matmul_into(sums, xq, wq.t())
    xs, ws = xs.float(), ws.float()
    compiled.scale_sums(
        _scale_sums(
            address(sums, torch.int32),
            m,
            n,
            address(xs, torch.float32),
            xs.stride(0) if xs.shape[0] > 1 else 0,
            address(ws, torch.float32),
            ws.stride(0) if ws.shape[0] > 1 else 0,
            address(y),
            TYPES[dtype],
            threads(),
        )
    )
    return y
