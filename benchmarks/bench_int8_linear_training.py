"""The three matmuls of a linear layer in training, in int8, quantization included, against bf16.

output       y  = x w'    contracts K: rows of x and of w are quantized
grad_input   dx = g w     contracts N: rows of g, columns of w
grad_weight  dw = g' x    contracts M: columns of g and of x

`python -m benchmarks.bench_int8_linear_training`
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import DTYPE, Row, main, measure, normal, sizes


def product(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """(rows of a, rows of b) of two quantized operands, the contracted axis last in both."""
    from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm

    return int8_scaled_mm(a[0], b[0].t(), a[1], b[1].t(), DTYPE)


def forward(x: Tensor, w: Tensor) -> Tensor:
    from qtorch.kernels.cuda.triton.quantize import quantize_rowwise

    return product(quantize_rowwise(x), quantize_rowwise(w))


def backward(x: Tensor, w: Tensor, g: Tensor, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from qtorch.kernels.cuda.triton.quantize import quantize_columnwise, quantize_rowwise

    grad_input = product(quantize_rowwise(g, seed=seed), quantize_columnwise(w))
    return grad_input, product(quantize_columnwise(g, seed=seed), quantize_columnwise(x))


def run() -> list[Row]:
    rows: list[Row] = []
    for m, n, k in sizes([(4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096)], [(20, 33, 17)]):
        x, w, g = normal(m, k), normal(n, k), normal(m, n)
        seed = torch.ones(1, dtype=torch.int64, device=x.device)
        candidates = {
            "bf16": lambda call: (torch.mm(x, w.t()), torch.mm(g, w), torch.mm(g.t(), x)),  # noqa: B023
            "int8": lambda call: (forward(x, w), backward(x, w, g)),  # noqa: B023
            "int8, stochastic gradients": lambda call: (forward(x, w), backward(x, w, g, seed)),  # noqa: B023
        }
        rows += measure("int8_linear_training", (m, n, k), candidates, "bf16", calls=5)
        rows += measure(
            "int8_linear_forward",
            (m, n, k),
            {"bf16": lambda call: torch.mm(x, w.t()), "int8": lambda call: forward(x, w)},  # noqa: B023
            "bf16",
            calls=5,
        )
    return rows


if __name__ == "__main__":
    main(run, __doc__)
