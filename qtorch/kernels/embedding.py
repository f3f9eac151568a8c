"""Embedding: gather the requested rows, then dequantize only those.

y[i] = dequantize(w)[ids[i]]
"""

from typing import Any

from torch import Tensor, nn

from ..primitives import CodebookSpec, dequantize_affine, dequantize_codebook, granularity, vector_spec
from ..primitives.layouts import semi_sparse, unpack_codes
from .linear.codebooks import CodebookWeight
from .ops.portable import dequantize_portably
from .registry import REFERENCE, Problem, QuantizedWeight, needs_matrix, needs_rows, register

NOTE = "on CPU it saves memory, not time"


def _supports(problem: Problem) -> str | None:
    return needs_rows(problem) or needs_matrix(problem)


@register("embedding", layout="plain", priority=10, supports=_supports, note=NOTE)
@register("embedding", layout="packed", priority=10, supports=_supports, note=NOTE, name="gather_packed_rows")
def gather_rows(ids: Tensor, weight: Any) -> Tensor:
    """Rows `ids` (any shape, int) of a (V, D) weight, the only ones unpacked: (*ids.shape, D) in its logical dtype."""
    return _dequantize_rows(ids, _codes(ids, weight), weight)


@register("embedding", layout="semi_sparse", priority=10, supports=_supports)
def gather_semi_sparse_rows(ids: Tensor, weight: Any) -> Tensor:
    """`gather_rows` of a weight in the semi-sparse layout, which has no rows where cuSPARSELt compressed it."""
    scheme, flat = weight.scheme, ids.reshape(-1)
    if scheme.layout.can_view(weight.qdata):
        rows = weight.qdata.index_select(0, flat)
        return _dequantize_rows(ids, semi_sparse.unpack_2_4(rows, scheme.shape[1], scheme.weight.dtype.storage), weight)
    return _dequantize_rows(ids, weight.plain()[0].index_select(0, flat), weight)


def _dequantize_rows(ids: Tensor, codes: Tensor, weight: Any) -> Tensor:
    """Dequantize `codes`, those of the rows `ids`."""
    scheme, block_ids, columns = weight.scheme, *_blocks(ids, weight)
    scale, zero_point, spec = weight.dense_scale(block_ids), weight.dense_zero_point(block_ids), scheme.weight
    numerics = (spec.dtype, *spec.code_range, spec.zero_point_domain, scheme.dtype)
    y = dequantize_affine(codes, (1, columns), scale, zero_point, *numerics)
    return y.reshape(*ids.shape, scheme.shape[1])


def _blocks(ids: Tensor, weight: Any) -> tuple[Tensor, int]:
    """The rows of scales that belong to the rows `ids`, and the columns of a block."""
    rows, columns = granularity.block_of(weight.scheme.shape, weight.scale.shape)
    return ids.reshape(-1) // rows, columns


def _codes(ids: Tensor, weight: Any) -> Tensor:
    """The codes (I, D) of the rows `ids`, one code an element."""
    rows, scheme = weight.qdata.index_select(0, ids.reshape(-1)), weight.scheme
    return rows if scheme.layout.packed_axis is None else unpack_codes(rows, scheme.weight.dtype, scheme.shape[1])


@register("embedding", spec=CodebookSpec, priority=10, supports=_supports, note=NOTE)
def gather_lut_rows(ids: Tensor, weight: CodebookWeight) -> Tensor:
    """`gather_rows` of a weight of look-up tables."""
    scheme, table = weight.scheme, weight.table
    block_ids, columns = _blocks(ids, weight)
    table = table if table.dim() == 1 else table.index_select(0, block_ids)
    y = dequantize_codebook(_codes(ids, weight), (1, columns), weight.dense_scale(block_ids), table, scheme.dtype)
    return y.reshape(*ids.shape, scheme.shape[1])


@register("embedding", layout="vector_codebook", priority=10, rotated=True, supports=_supports, note=NOTE)
def gather_vector_rows(ids: Tensor, weight: Any) -> Tensor:
    """`gather_rows` of a weight of vectors in bytes, which rows are rotated back."""
    scheme, flat = weight.scheme, ids.reshape(-1)
    codes, scale = vector_spec.unpack_vectors(weight.qdata.index_select(0, flat)), weight.scale.index_select(0, flat)
    return scheme.weight.dequantize(codes, scale, None, scheme.dtype).reshape(*ids.shape, scheme.shape[1])


@register("embedding", layout="portable", spec=None, priority=100, supports=needs_matrix, note=NOTE)
def gather_portable_rows(ids: Tensor, weight: Any) -> Tensor:
    """`gather_rows` of a weight in the portable layout, by operators of torch alone."""
    scheme = weight.scheme
    if isinstance(scheme.weight, CodebookSpec):
        return gather_lut_rows(ids, weight)
    if scheme.weight.scale_spec is not None:
        return gather_rows(ids, weight)
    codes, scale, zero_point = weight.plain()
    rows, columns = granularity.block_of(scheme.shape, scale.shape)
    flat = ids.reshape(-1)
    block_ids = flat if rows == 1 else flat // rows
    codes, scale = codes.index_select(0, flat), scale.index_select(0, block_ids)
    zero_point = None if zero_point is None else zero_point.index_select(0, block_ids)
    y = dequantize_portably(scheme.weight, (1, columns), codes, scale, zero_point, scheme.dtype)
    return y.reshape(*ids.shape, scheme.shape[1])


@register("embedding", spec=None, priority=REFERENCE, rotated=True, name="reference")
def embedding(ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Dequantize the whole weight (V, D), then look up."""
    codes, scale, zero_point = weight.plain()
    return nn.functional.embedding(ids, weight.scheme.weight.dequantize(codes, scale, zero_point, weight.scheme.dtype))
