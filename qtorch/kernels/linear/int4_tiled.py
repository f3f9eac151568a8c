"""Linear with a uint4 weight in the tiled layout, by the tinygemm kernels of torch.

    y[m, n] = sum_k x[m, k] * ((q[n, k] - 8) * scale[n, k / group] + zero_point[n, k / group]) + bias[n]

On CUDA `aten::_weight_int4pack_mm` runs for bf16 at any M. On CPU `aten::_weight_int4pack_mm_for_cpu` reads each code
once and is faster than bf16 F.linear at small M. At larger M it is slower on CPUs with bf16 products, and for fp32 and
fp16 it is not vectorized. In these cases, and on CUDA for other dtypes, slices of the weight are unpacked and
dequantized.
"""

from typing import Any

import torch
from torch import Tensor

from ...primitives import ZeroPointDomain, qdtype
from ...primitives.layouts.tensor_core_tiled import cpu_packing, unpack_cpu, unpack_cuda
from .. import features
from ..custom_ops import implement, note, opaque, portable
from ..ops.weight_only_mm import CodeNumerics, multiply_codes
from ..registry import Problem, from_rows, register, to_rows

MAX_ROWS = {True: 64, False: 1 << 30}  # of x for the packed product on CPU, by whether it has bf16 products
ROW_TILE = 64  # rows that are unpacked together: a multiple of the blocks of either device


@opaque(lambda x, qdata, scale_and_zero, n, group: x.new_empty(x.shape[0], n))
def int4_tiled_mm(x: Tensor, qdata: Tensor, scale_and_zero: Tensor, n: int, group: int) -> Tensor:
    """The equation above without bias, (M, N) in the dtype of x (M, K); `group` columns share a scale. `qdata` and
    `scale_and_zero` are those of `TensorCoreTiledLayout` for the device of x, padded."""
    k = x.shape[1]
    scale, zero_point = scale_and_zero[: k // group, :n].transpose(0, 1).unbind(-1)
    numerics = CodeNumerics(scale, zero_point, qdtype("uint4"), 0, 15, ZeroPointDomain.FLOAT)
    return multiply_codes(x, (n, k), lambda a, b: _rows(qdata, a, b)[:, :k], numerics)


@implement("int4_tiled_mm", "cuda")
def tinygemm_cuda(x: Tensor, qdata: Tensor, scale_and_zero: Tensor, n: int, group: int) -> Tensor:
    """See `int4_tiled_mm`."""
    if not x.shape[0] or x.dtype != torch.bfloat16:
        return portable(int4_tiled_mm)(x, qdata, scale_and_zero, n, group)
    note("int4_tiled_mm.int4pack")
    columns = qdata.shape[1] * qdata.shape[3] * 32
    x = torch.nn.functional.pad(x, (0, columns - x.shape[1])).contiguous()
    return torch.ops.aten._weight_int4pack_mm(x, qdata, group, scale_and_zero.to(x.dtype))[:, :n].contiguous()


@implement("int4_tiled_mm", "cpu")
def tinygemm_cpu(x: Tensor, qdata: Tensor, scale_and_zero: Tensor, n: int, group: int) -> Tensor:
    """See `int4_tiled_mm`."""
    if not 0 < x.shape[0] <= MAX_ROWS[features.cpu_has("bf16")] or x.dtype != torch.bfloat16:
        return portable(int4_tiled_mm)(x, qdata, scale_and_zero, n, group)
    note("int4_tiled_mm.int4pack")
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(x.contiguous(), qdata, group, scale_and_zero.to(x.dtype))[:, :n].contiguous()


def _rows(qdata: Tensor, start: int, stop: int) -> Tensor:
    """The codes of rows `start` to `stop`."""
    first, last = start // ROW_TILE, -(-stop // ROW_TILE)
    if qdata.dtype == torch.int32:
        per_tile = ROW_TILE // 8
        codes = unpack_cuda(qdata[first * per_tile : last * per_tile])
    else:
        codes = unpack_cpu(qdata[first * ROW_TILE : last * ROW_TILE], cpu_packing())
    return codes[start - first * ROW_TILE : stop - first * ROW_TILE]


def _supports(problem: Problem) -> str | None:
    return None if problem.device in ("cpu", "cuda") and not torch.version.hip else "runs on CPU and CUDA"


NOTE = "bf16 inputs: scales and zero points are rounded to bf16"


@register(
    "linear", layout="tensor_core_tiled", activation=(), priority=10, supports=_supports, note=NOTE,
    name="int4_tiled_mm",
)  # fmt: skip
def int4_tiled_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with a weight in the tiled layout."""
    n, k = weight.scheme.shape
    group = weight.scheme.weight.block_size((n, k))[1]
    return from_rows(int4_tiled_mm(to_rows(x), weight.qdata, weight.scale_and_zero, n, group), x, bias)
