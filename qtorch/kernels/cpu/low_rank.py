"""What a branch of low rank adds to a product, compiled (src/low_rank.h).

y[m, n] += sum_r (sum_k x[m, k] * down[r, k]) * up[n, r]
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..custom_ops import note, opaque
from . import weight
from .compiled_library import TYPES, library, threads
from .memory import address
from .structs import LowRank, struct_of

HALVES = frozenset({torch.float16, torch.bfloat16})
"""Of the factors."""

FastLinear = Callable[[Tensor, Any, Tensor | None], Tensor | None]

_pack = struct_of(LowRank).pack


@opaque(lambda y, x, down, up: y.new_empty(y.shape))
def cpu_low_rank_mm(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """y plus the above, (M, N) in the dtype of y: the sums are in fp32, and rounded once.

    Args:
        y: (M, N) fp32, bf16 or fp16.
        x: (M, K), in one of these dtypes too.
        down, up: (R, K) and (N, R), fp16 or bf16.
    """
    (m, n), (rank, k) = y.shape, down.shape
    if x.shape != (m, k) or up.shape != (n, rank) or not {down.dtype, up.dtype} <= HALVES:
        got = " and ".join(f"{tuple(factor.shape)} in {factor.dtype}" for factor in (down, up))
        raise ValueError(f"takes factors (R, {x.shape[1]}) and ({n}, R) in 16 bits, got {got}")
    compiled = library()
    if compiled is None or y.dtype not in TYPES or x.dtype not in TYPES:
        note("cpu_low_rank_mm.torch")
        real = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
        return torch.addmm(y.to(real), torch.mm(x.to(real), down.to(real).t()), up.to(real).t()).to(y.dtype)
    note(f"cpu_low_rank_mm.{compiled.instruction_set}")
    x, down, up = (each if each.stride(1) == 1 else each.contiguous() for each in (x, down, up))
    out = y.clone(memory_format=torch.contiguous_format)
    of_x, of_out = (address(x), TYPES[x.dtype], x.stride(0), m), (address(out), TYPES[out.dtype], n, 0)
    compiled.low_rank_mm(_pack(*_factors(down, up), *of_x, *of_out, threads()))
    return out


def _factors(down: Tensor, up: Tensor) -> tuple[int, ...]:
    of_down = address(down), TYPES[down.dtype], down.stride(0), len(down)
    return *of_down, address(up), TYPES[up.dtype], up.stride(0), len(up), down.shape[1]


def prepare(quantized: Any, fast_linear: FastLinear | None) -> None:
    """Let the next `F.linear` with a weight that has a branch call `fast_linear`, of the matrix beside, at once."""
    down, up, compiled = quantized.down, quantized.up, library()
    if fast_linear is None or compiled is None or not (down.is_contiguous() and up.is_contiguous()):
        return
    state_of = weight.inference_state if down.is_inference() or up.is_inference() else weight.counted_state
    (n, _), k, factors, state = up.shape, down.shape[1], _factors(down, up), state_of(down, up)
    kind = TYPES[quantized.scheme.dtype]  # of x and y too, see `CompiledLinear.prepare`

    def linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor | None:
        if quantized.down is not down or quantized.up is not up or state_of(down, up) != state:
            return None
        y = fast_linear(x, quantized, bias)
        if y is not None:
            of_x, of_y = (address(x), kind, k, x.numel() // k), (address(y), kind, n, 0)
            compiled.low_rank_mm(_pack(*factors, *of_x, *of_y, threads()))
        return y

    vars(quantized)["fast_linear"] = linear
