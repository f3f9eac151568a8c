"""Products with the matrices of experts: the tiles of `intx_weight_mm` and `int8_grouped_mm`, found by expert.

    y[s] = x[s / share] w[ids[s]]^T,    0 where ids[s] names no expert

Rows of y are sorted by expert, on the device. A tile holds rows of one expert; its program finds which from the first
rows of all experts. How many tiles there are is not known on the host, but at most one for each expert with rows and
one for each full tile of rows: programs beyond the last return.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .int8_grouped_mm import Int8Operands, int8_products
from .intx_weight_mm import weight_products
from .launch import FLOATS, WeightArguments, check_device, check_matrix

CANDIDATES = [
    LaunchConfig(m, n, k, num_warps=warps, num_stages=stages)
    for m, n, warps in ((16, 32, 4), (16, 64, 4), (16, 128, 4), (32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8))
    for k in (64, 128)
    for stages in (3, 4)
]
"""What `autotune` tries."""


@triton.jit
def _rows_of_tile(first_ptr, order_ptr, tile, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its rows of y, which of them there are); the expert is E or more for a tile beyond the last."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(first_ptr + e, mask=e < E, other=0).to(tl.int32)
    stop = tl.load(first_ptr + e + 1, mask=e < E, other=0).to(tl.int32)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    own = e == expert
    begin = tl.sum(tl.where(own, ends - tiles, 0), 0)
    position = tl.sum(tl.where(own, start, 0), 0) + (tile - begin) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = position < tl.sum(tl.where(own, stop, 0), 0)
    return expert, tl.load(order_ptr + position, mask=valid, other=0).to(tl.int64), valid


@triton.jit
def _experts_weight_mm(
    x_ptr, q_ptr, scale_ptr, zero_ptr, y_ptr, first_ptr, order_ptr, E, N, K, G, share,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, SCALE_PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, rows, valid = _rows_of_tile(first_ptr, order_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = expert.to(tl.int64) * N + n % N
    inner = tl.arange(0, BLOCK_K)
    acc = weight_products(
        tl.zeros([BLOCK_N, BLOCK_M], tl.float32),
        x_ptr + (rows // share)[None, :] * stride_xm + inner[:, None] * stride_xk, valid[None, :],
        q_ptr + n_in[:, None] * stride_qn + inner[None, :],
        scale_ptr + n_in * stride_sn, zero_ptr + n_in * stride_zn, zero_ptr, inner, tl.zeros([1], tl.int32), 0, K, G,
        stride_xk, stride_sg, stride_zg, GROUP, BITS, OFFSET, MIDDLE, ZERO, ONE_GROUP, EVEN, SCALE_PRODUCT, PRECISION,
        ASM, 2, BLOCK_K, 1,
    )  # fmt: skip
    y_ptrs = y_ptr + rows[None, :] * N + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & valid[None, :])


@triton.jit
def _experts_int8_mm(
    x_ptr, q_ptr, y_ptr, scale_ptr, zero_ptr, x_scale_ptr, x_zero_ptr, first_ptr, order_ptr, E, N, K, G, share,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg, stride_xs, stride_xz,
    GROUP: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    WEIGHT_ZERO: tl.constexpr, INPUT_ZERO: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, rows, valid = _rows_of_tile(first_ptr, order_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = expert.to(tl.int64) * N + n % N
    m_in = rows // share
    inner = tl.arange(0, BLOCK_K)
    total = int8_products(
        x_ptr + m_in[None, :] * stride_xm + inner[:, None] * stride_xk, q_ptr + n_in[:, None] * stride_qn,
        scale_ptr + n_in * stride_sn, zero_ptr + n_in * stride_zn, x_zero_ptr + m_in * stride_xz, inner,
        K, G, stride_xk, stride_sg, stride_zg, GROUP, TILES, UNROLL, BITS, OFFSET, WEIGHT_ZERO, INPUT_ZERO, EVEN, ASM,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    y = (total * tl.load(x_scale_ptr + m_in * stride_xs).to(tl.float32)[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows[None, :] * N + n[:, None], y, mask=(n < N)[:, None] & valid[None, :])


class _Routes:
    """Rows of y sorted by expert, without reading anything on the host.

    Attributes:
        order: rows of y in the order of their experts.  first: where those of each expert begin, and the last end.
        mean: rows of an expert.
    """

    def __init__(self, experts: Tensor, count: int) -> None:
        ids = experts.reshape(-1)
        self.rows, self.share, self.count = ids.shape[0], experts.shape[1], count
        named = torch.where((ids >= 0) & (ids < count), ids, count)
        by_expert, self.order = named.sort(stable=True)
        self.first = torch.searchsorted(by_expert, torch.arange(count + 1, device=ids.device))
        self.mean = -(-self.rows // count)

    def grid(self, n: int, block_n: int, block_m: int) -> tuple[int, int]:
        """Programs for the most tiles that there can be."""
        return triton.cdiv(n, block_n), min(self.rows, self.count) + self.rows // block_m


def _check_experts(op: str, x: Tensor, experts: Tensor, qdata: Tensor, scale: Tensor) -> None:
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.is_floating_point():
        raise ValueError(
            f"{op}: experts must be integers of shape (T, R) for x (T, K), got {tuple(experts.shape)} of "
            f"{experts.dtype} for {tuple(x.shape)}"
        )
    if qdata.dim() != 3 or scale.dim() != 3:
        raise ValueError(
            f"{op}: qdata and scale must have three axes, the first of experts, got shapes {tuple(qdata.shape)} and "
            f"{tuple(scale.shape)}"
        )


def _matrices(qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(E, N, K) as (E * N, K)."""
    is_table = zero_point is None or zero_point.dim() == 1  # of all groups, if any
    return qdata.flatten(0, 1), scale.flatten(0, 1), zero_point if is_table else zero_point.flatten(0, 1)  # type: ignore[union-attr]


def experts_weight_mm(
    x: Tensor, experts: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, middle: float,
    domain: str,
) -> Tensor:  # fmt: skip
    """See `cuda_experts_mm`; any strides."""
    op = "experts_weight_mm"
    check_matrix(op, "x", x, FLOATS)
    _check_experts(op, x, experts, qdata, scale)
    check_device(op, x=x, experts=experts, qdata=qdata, scale=scale, zero_point=zero_point)
    (count, n), k = qdata.shape[:2], x.shape[1]
    y = x.new_zeros(experts.numel(), n)
    if not y.numel() or not k or not count:
        return y
    weight = WeightArguments(op, k, *_matrices(qdata, scale, zero_point), dtype, middle, domain)
    routes = _Routes(experts, count)

    def run(config: LaunchConfig) -> None:
        block_m = max(16, config.block_m)
        _experts_weight_mm[routes.grid(n, config.block_n, block_m)](
            x, *weight.pointers, y, routes.first, routes.order, count, n, *weight.sizes, routes.share, *x.stride(),
            *weight.steps, **weight.constants(x, block_m, config.block_k), BLOCK_E=triton.next_power_of_2(count),
            BLOCK_N=config.block_n, **config.options, enable_fp_fusion=True,
        )  # fmt: skip

    launch(op, weight.key, (routes.mean, n, k), run, CANDIDATES, x.device)
    return y


def experts_int8_mm(
    xq: Tensor, experts: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, wz: Tensor | None,
    weight_dtype: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `cuda_experts_int8_mm`; any strides."""
    op = "experts_int8_mm"
    _check_experts(op, xq, experts, qdata, ws)
    (count, n), k = qdata.shape[:2], xq.shape[1]
    operands = Int8Operands(op, xq, xs, xz, *_matrices(qdata, ws, wz), weight_dtype, experts=experts)
    y = xq.new_zeros(experts.numel(), n, dtype=dtype)
    if not y.numel() or not k or not count:
        return y
    routes = _Routes(experts, count)

    def run(config: LaunchConfig) -> None:
        block_m = max(16, config.block_m)
        _experts_int8_mm[routes.grid(n, config.block_n, block_m)](
            *operands.codes, y, *operands.scales, routes.first, routes.order, count, n, *operands.sizes, routes.share,
            *operands.steps, **operands.constants(config), BLOCK_E=triton.next_power_of_2(count), BLOCK_M=block_m,
            **config.options, enable_fp_fusion=False,
        )  # fmt: skip

    launch(op, f"int{operands.bits}", (routes.mean, n, k), run, CANDIDATES, xq.device)
    return y
