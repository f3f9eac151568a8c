"""int8 products and the dynamic int8 linear layer against bf16. `python -m benchmarks.bench_int8_mm`

Ratios are the bf16 product's time divided by the candidate's: above 1 is faster than bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import qtorch
from benchmarks.gpu import DTYPE, ON_GPU, Row, copies, in_turn, main, measure, normal, sizes
from qtorch.kernels import quantize_int8_rowwise

SHAPES = [(16, 4096, 4096), (256, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192)]


def run() -> list[Row]:
    from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm

    rows: list[Row] = []
    compiled = torch.compile(_int_mm, dynamic=False) if ON_GPU else None
    for m, n, k in sizes(SHAPES, [(5, 20, 33)]):
        x = normal(m, k)
        floats = copies(lambda: normal(n, k), 2 * n * k)  # noqa: B023
        codes = [quantize_int8_rowwise(w) for w in floats]
        layers = [qtorch.int8_dynamic_activation_int8_weight().apply(w) for w in floats]
        xq, xs = quantize_int8_rowwise(x)
        candidates = {
            "bf16": in_turn(lambda w: torch.mm(x, w.t()), floats),  # noqa: B023
            "int8_scaled_mm": in_turn(
                lambda w: int8_scaled_mm(xq, w[0].t(), xs, w[1].t(), DTYPE),  # noqa: B023
                codes,
            ),
            "dynamic linear": in_turn(lambda w: functional.linear(x, w), layers),  # noqa: B023
        }
        if compiled is not None and m > 16:
            candidates["compiled _int_mm"] = in_turn(lambda w: compiled(xq, w[0], xs, w[1]), codes)  # noqa: B023
        with torch.no_grad():
            rows += measure("int8_mm", (m, n, k), candidates, "bf16")
    return rows


def _int_mm(xq: Tensor, wq: Tensor, xs: Tensor, ws: Tensor) -> Tensor:
    return (torch._int_mm(xq, wq.t()).float() * ws.t() * xs).to(DTYPE)


if __name__ == "__main__":
    main(run, __doc__)
