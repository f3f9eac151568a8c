"""Embedding, compiled: the equation and the exact results of `gather_rows`.

y[i] = dequantize(w)[ids[i]]
"""

from typing import Any

import torch
from torch import Tensor

from ...primitives import ZeroPointDomain, dequantize_affine, qdtype
from ...primitives.layouts.packed import unpack_codes
from ..custom_ops import Name, Size, note, opaque
from ..linear.scaled import INTEGERS
from ..registry import Problem, needs_floats
from . import code_values, weight
from .compiled_library import TYPES, threads
from .memory import address, empty
from .structs import EmbedCall, Weight, struct_of

_pack_weight, _pack_call = struct_of(Weight).pack, struct_of(EmbedCall).pack


@opaque(lambda ids, codes, n, k, *rest: ids.new_empty(ids.shape[0], k, dtype=rest[-1]))
def cpu_embedding(
    ids: Tensor, codes: Tensor, n: Size, k: Size, scale: Tensor, zero_point: Tensor | None,
    packed: bool, dtype: Name, low: float, high: float, domain: Name, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The equation above, (I, K) in `output_dtype`: fp32, bf16 or fp16.

    Args:
        ids: (I) int64 or int32; an `IndexError` if one is not in [0, N).
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (N, G), G groups of a row, or (1, 1).
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.
    """
    stored = weight.CompiledWeight.of(codes, scale, zero_point, n, k, dtype, packed, domain, (low + high + 1) / 2)
    compiled, fields = stored.compiled, stored.fields
    if compiled is None or fields is None or ids.dtype not in (torch.int64, torch.int32):
        note("cpu_embedding.torch")
        rows, kind = codes.index_select(0, ids), qdtype(dtype)
        rows = unpack_codes(rows, kind, k) if packed else rows
        block, factor = (1, k // scale.shape[1]), scale.expand(n, -1).index_select(0, ids)
        zeros = None if zero_point is None else zero_point.expand(n, -1).index_select(0, ids)
        return dequantize_affine(rows, block, factor, zeros, kind, low, high, ZeroPointDomain[domain], output_dtype)
    note(f"cpu_embedding.{compiled.instruction_set}")
    ids = ids.contiguous()
    count = ids.shape[0]
    y = empty((count, k), output_dtype)
    # By position, in the order of the struct's fields: making the named tuples takes a fifth of the call.
    indices, output = (address(ids), ids.dtype == torch.int64, count), (address(y), TYPES[output_dtype], k, 0)
    wrong = compiled.embed(_pack_weight(*fields) + _pack_call(*indices, *output, threads()))
    if wrong >= 0:
        raise IndexError(f"embedding: index out of range: {int(ids[wrong])}, the table has {n} rows")
    return y


def _supports(problem: Problem) -> str | None:
    if reason := needs_floats(problem):
        return reason
    if problem.scheme.weight.scale_spec is not None:
        return "takes scales in floating point, those of the table are quantized"
    return weight.supports(problem)


@weight.register_compiled(
    "embedding", weight=(*INTEGERS, *code_values.FLOATS), supports=_supports, checks_memory=True,
    note="saves memory; and time, only for many long rows in fp32", name="cpu_embedding",
)  # fmt: skip
def _embedding(ids: Tensor, table: Any) -> Tensor:
    (n, k), dtype = table.scheme.shape, table.scheme.dtype
    of_table = table.qdata, n, k, table.scale, table.zero_point, *weight.form(table.scheme)
    return cpu_embedding(ids.reshape(-1), *of_table, dtype).reshape(*ids.shape, k)
