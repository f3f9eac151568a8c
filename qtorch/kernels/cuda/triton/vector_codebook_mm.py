"""Weight-only product with bytes that stand for vectors of four columns (`primitives.vector_spec`).

    y[m, n] = sum_j sum_i x[m, 4 j + i] * entry[byte[n, j]][i] * s[n, g] + bias[n]

The four codes of a byte are a word of a table of 256. The input is rotated before, in torch operators.

"mm"     few rows of x: tensor cores, one product for each of the four columns; the weight is the left operand.
"dense"  many rows: the weight is dequantized, then cuBLAS multiplies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.vector_spec import ENTRIES, VECTOR
from ..launch_config import LaunchConfig, launch
from .intx_weight_mm import store_tile
from .launch import FLOATS, check_device, check_matrix, check_shape, power_of_two_in, without_terms

CANDIDATES = [
    *(
        LaunchConfig(m, n, k, num_warps=4, num_stages=stages, path="mm")
        for m in (16, 32, 64)
        for n, k in ((32, 64), (64, 32), (64, 64))
        for stages in (2, 4)
    ),
    LaunchConfig(path="dense"),
]
"""What `autotune` tries; `block_k` counts bytes."""

MOST_ROWS = 128
"""Of x, that "mm" multiplies where nothing is tuned; with more, each byte would be looked up many times."""


@triton.jit
def _codes(words, COLUMN: tl.constexpr, dtype: tl.constexpr):
    """Those of one of the four columns; odd integers of 7 bits, exact in every type."""
    return ((words << (24 - 8 * COLUMN)) >> 24).to(dtype)


@triton.jit
def _vector_codebook_mm(
    x_ptr, q_ptr, scale_ptr, table_ptr, bias_ptr, y_ptr, M, N, J, stride_xm, stride_qn, stride_sn,
    GROUP: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond the last are read as others, and not stored.
    n_in = (n % N).to(tl.int64)
    m_in = (m % M).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn + inner[None, :]
    x_ptrs = x_ptr + m_in[None, :] * stride_xm + inner[:, None] * 4
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # A tile lies in one group.
    for j in range(0, J, BLOCK_K):
        inside = j + inner < J
        if EVEN:
            byte = tl.load(q_ptrs + j)
        else:
            byte = tl.load(q_ptrs + j, mask=inside[None, :], other=0)
        words = tl.load(table_ptr + byte.to(tl.int32))
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for column in tl.static_range(4):
            if EVEN:
                x = tl.load(x_ptrs + (4 * j + column))
            else:
                x = tl.load(x_ptrs + (4 * j + column), mask=inside[:, None], other=0.0)
            part = tl.dot(_codes(words, column, dtype), x, part, input_precision=PRECISION)
        total += part * tl.load(scale_ptr + n_in * stride_sn + j // GROUP).to(tl.float32)[:, None]
    store_tile(total, bias_ptr, y_ptr, m, n, n_in, M, N, BIAS)


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, table_ptr, w_ptr, J, stride_qn, stride_sn, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    byte = tl.load(q_ptr + n * stride_qn + j, mask=j < J, other=0)
    words = tl.load(table_ptr + byte.to(tl.int32))
    scale = tl.load(scale_ptr + n * stride_sn + j // GROUP, mask=j < J, other=0.0).to(tl.float32)
    for column in tl.static_range(4):
        w = (_codes(words, column, tl.float32) * scale).to(w_ptr.dtype.element_ty)
        tl.store(w_ptr + (n * J + j) * 4 + column, w, mask=j < J)


def vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The equation above, (M, N) in the dtype of x.

    Args:
        x: (M, K), rotated if the weight is; fp32, fp16 or bf16.
        codes: (N, K / 4) uint8.
        scale: (N, groups), groups dividing K.
        bias: (N,) or None.
    """
    op = "vector_codebook_mm"
    check_matrix(op, "x", x, FLOATS)
    check_matrix(op, "codes", codes, (torch.uint8,))
    (m, k), (n, quarter) = x.shape, codes.shape
    groups = scale.shape[1] if scale.dim() == 2 else 0
    if k != quarter * VECTOR or not groups or quarter % groups:
        raise ValueError(f"{op}: x {tuple(x.shape)} and codes {tuple(codes.shape)} do not fit {tuple(scale.shape)}")
    check_shape(op, "scale", scale, (n, groups))
    check_shape(op, "bias", bias, (n,))
    check_device(op, x=x, codes=codes, scale=scale, bias=bias)
    x, codes, scale = (t if t.stride(1) == 1 else t.contiguous() for t in (x, codes, scale))
    y = x.new_empty(m, n)
    if not y.numel() or not k:
        return without_terms(y, bias)
    table = ENTRIES.view(torch.int32).flatten().to(x.device)
    group = quarter // groups

    def run(config: LaunchConfig) -> None:
        if config.path == "dense" or (not config.path and m > MOST_ROWS):
            w = x.new_empty(n, k)
            _dequantize[(n, triton.cdiv(quarter, 512))](
                codes, scale, table, w, quarter, codes.stride(0), scale.stride(0), GROUP=group, BLOCK_K=512
            )
            torch.mm(x, w.t(), out=y)
            if bias is not None:
                y.add_(bias)
            return
        block_m, block_k = max(16, config.block_m), config.block_k if groups == 1 else power_of_two_in(group)
        block_k = max(16, min(block_k, config.block_k))
        if groups > 1 and group % block_k:  # groups of less than 16 bytes
            run(LaunchConfig(path="dense"))
            return
        _vector_codebook_mm[(triton.cdiv(n, config.block_n), triton.cdiv(m, block_m))](
            x, codes, scale, table, y if bias is None else bias, y, m, n, quarter,
            x.stride(0), codes.stride(0), scale.stride(0), GROUP=group, EVEN=quarter % block_k == 0,
            BIAS=bias is not None, PRECISION="ieee", BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=block_k,
            **config.options,
        )  # fmt: skip

    launch(op, str(x.dtype).removeprefix("torch."), (m, n, k), run, CANDIDATES, x.device)
    return y
