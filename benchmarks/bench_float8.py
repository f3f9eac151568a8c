"""float8 linear layers against bf16: scales by rows through torch, by tiles in Triton.

`python -m benchmarks.bench_float8`
"""

from __future__ import annotations

import torch
from torch.nn import functional

import qtorch
from benchmarks.gpu import DTYPE, ON_GPU, Row, copies, in_turn, main, measure, normal, sizes

TILE = 128 if ON_GPU else 32
FLOAT8 = torch.float8_e4m3fn if ON_GPU else torch.int8
"""The interpreter rounds to float8 as no GPU does."""


def run() -> list[Row]:
    from qtorch.kernels.cuda.triton.quantize import quantize_tilewise
    from qtorch.kernels.cuda.triton.tile_scaled_mm import tile_scaled_mm

    rows: list[Row] = []
    for m, n, k in sizes([(16, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192)], [(32, 32, 64)]):
        x = normal(m, k)
        floats = copies(lambda: normal(n, k), 2 * n * k)  # noqa: B023
        tiles = [quantize_tilewise(w, (TILE, TILE), FLOAT8) for w in floats]
        linear = lambda w: functional.linear(x, w)  # noqa: B023, E731
        xq, xs = quantize_tilewise(x, (1, TILE), FLOAT8)
        candidates = {
            "bf16": in_turn(linear, floats),
            "tiles, product": in_turn(lambda w: tile_scaled_mm(xq, w[0], xs, w[1], DTYPE), tiles),  # noqa: B023
            "tiles, linear": in_turn(
                lambda w: tile_scaled_mm(*_interleaved(quantize_tilewise(x, (1, TILE), FLOAT8), w), DTYPE),  # noqa: B023
                tiles,
            ),
        }
        if ON_GPU:
            recipe = qtorch.float8_dynamic_activation_float8_weight()
            candidates["rows, linear"] = in_turn(linear, [recipe.apply(w) for w in floats])
        with torch.no_grad():
            rows += measure("float8", (m, n, k), candidates, "bf16")
    return rows


def _interleaved(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(codes, codes, scale, scale)"""
    return a[0], b[0], a[1], b[1]


if __name__ == "__main__":
    main(run, __doc__)
