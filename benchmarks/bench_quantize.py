"""Quantizing a bf16 matrix, against copying it and against torch.compile. `python -m benchmarks.bench_quantize`

Ratios are the copy's time divided by the candidate's. A copy reads and writes 4 bytes an element; quantizing to 8 bits
moves 3, and 5 with the second reading of columns: 1.3 and 0.8 are the limits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import DEVICE, ON_GPU, Row, main, measure, normal, sizes


def _eager(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1, keepdim=True).float() / 127.0).clamp(min=1e-38)
    return torch.round(x * (1.0 / scale)).to(torch.int8), scale


def run() -> list[Row]:
    from qtorch.kernels.cuda.triton.quantize import quantize_columnwise, quantize_rowwise, quantize_tilewise
    from qtorch.kernels.cuda.triton.stochastic_update import update_bf16, update_int8

    rows: list[Row] = []
    compiled = torch.compile(_eager, dynamic=False) if ON_GPU else _eager
    for m, k in sizes([(16, 4096), (4096, 4096), (8192, 8192), (16384, 14336)], [(20, 128)]):
        inputs = [normal(m, k) for _ in range(4 if ON_GPU else 1)]
        copy, weight = torch.empty_like(inputs[0]), inputs[0].to(torch.bfloat16, copy=True)
        seed = torch.ones(1, dtype=torch.int64, device=DEVICE)
        codes, scale, _ = quantize_rowwise(inputs[0])
        tile = 128
        turn = lambda function: lambda call: function(inputs[call % len(inputs)])  # noqa: B023, E731
        candidates = {
            "copy": turn(copy.copy_),
            "rows": turn(quantize_rowwise),
            "rows, compiled": turn(compiled),
            "rows, stochastic": turn(lambda x: quantize_rowwise(x, seed=seed)),  # noqa: B023
            "rows and transposed": turn(lambda x: quantize_rowwise(x, transposed=True)),
            "columns": turn(quantize_columnwise),
            "1 x 128": turn(lambda x: quantize_tilewise(x, (1, tile))),  # noqa: B023
            "update bf16": turn(lambda x: update_bf16(weight, x, 1e-9, seed)),  # noqa: B023
            "update int8": turn(lambda x: update_int8(codes, scale, x, 1e-9, seed)),  # noqa: B023
        }
        if ON_GPU:
            candidates["rows, float8"] = turn(lambda x: quantize_rowwise(x, torch.float8_e4m3fn))
        rows += measure("quantize", (m, k, k), candidates, "copy")
    return rows


if __name__ == "__main__":
    main(run, __doc__)
