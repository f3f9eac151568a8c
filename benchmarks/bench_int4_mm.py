"""Weight-only products, int4 in groups of 128 and int8, against bf16 and tinygemm. `python -m benchmarks.bench_int4_mm`

torchao's and gemlite's layers take part where they are importable.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qtorch
from benchmarks.gpu import DEVICE, DTYPE, ON_GPU, Row, copies, in_turn, main, measure, normal, sizes
from qtorch import ZeroPointDomain

GROUP = 128 if ON_GPU else 32

SHAPES = [
    *((m, n, n) for n in (4096, 8192, 16384) for m in (1, 16, 128)),
    *((m, 4096, 4096) for m in (4, 32, 64, 256, 1024, 4096)),
    (1, 14336, 4096),
    (1, 4096, 14336),
]

RECIPES = {
    "int4": qtorch.int4_weight_only(group_size=GROUP),
    "int4 real zero": qtorch.int4_weight_only(group_size=GROUP, zero_point_domain=ZeroPointDomain.FLOAT),
    "int8": qtorch.int8_weight_only(),
    "W4A8": qtorch.int8_dynamic_activation_int4_weight(group_size=GROUP),
}

TINYGEMM = qtorch.int4_weight_only(
    group_size=GROUP, zero_point_domain=ZeroPointDomain.FLOAT, layout=qtorch.TensorCoreTiledLayout()
)


def run() -> list[Row]:
    rows: list[Row] = []
    for m, n, k in sizes(SHAPES, [(1, 20, 64), (5, 20, 64)]):
        x = normal(m, k)
        floats = copies(lambda: normal(n, k), 2 * n * k)  # noqa: B023
        layer = lambda w: functional.linear(x, w)  # noqa: B023, E731
        recipes = RECIPES | ({"tinygemm": TINYGEMM} if ON_GPU else {})
        candidates = {"bf16": in_turn(layer, floats)}
        for name, recipe in recipes.items():
            # As many weights as bf16 has bytes: each kernel reads its own from memory.
            small = 4 if name == "int8" else 8
            weights = [recipe.apply(w) for w in floats]
            spare = [recipe.apply(normal(n, k)) for _ in range(len(floats) * small // 4)] if ON_GPU else []
            candidates[name] = in_turn(layer, weights + spare)
        for name, make in _other_libraries(m, n, k).items():
            modules = [make(w) for w in floats * 4]
            candidates[name] = in_turn(lambda module: module(x), modules)  # noqa: B023
        with torch.no_grad():
            rows += measure("int4_mm", (m, n, k), candidates, "bf16")
    return rows


def _other_libraries(m: int, n: int, k: int) -> dict[str, Callable[[Tensor], Any]]:
    """Constructors of their layers from a weight."""
    found: dict[str, Callable[[Tensor], Any]] = {}
    if not ON_GPU:
        return found
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        def torchao(weight: Tensor) -> Any:
            module = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, device="meta"))
            module[0].weight = torch.nn.Parameter(weight)
            quantize_(module, Int4WeightOnlyConfig(group_size=GROUP))
            return module

        found["torchao int4"] = torchao
    if importlib.util.find_spec("gemlite"):
        from gemlite.helper import A16W4

        def gemlite(weight: Tensor) -> Any:
            codes = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
            scale = torch.rand(n, k // GROUP, device=DEVICE, dtype=DTYPE)
            return A16W4(DEVICE, DTYPE).from_weights(codes, scale, scale, 4, GROUP)

        found["gemlite int4"] = gemlite
    return found


if __name__ == "__main__":
    main(run, __doc__)
