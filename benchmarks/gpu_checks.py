"""Are the GPU kernels right on this GPU, at the sizes that models have, as they are launched?

`python -m benchmarks.gpu_checks`. Integer sums must be exact; the rest is held against fp32, bounded on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

import qtorch
from benchmarks.gpu import DEVICE, DTYPE, ON_GPU, normal, sizes
from qtorch import LinearSpec, MappingType, PackedLayout, PerGroup, PerRow, QuantSpec, ZeroPointDomain
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.block_mm import tile_scaled_mm as tile_operator
from qtorch.kernels.registry import Problem, choose
from qtorch.primitives import compute_error

Check = tuple[str, Callable[[], str | None]]
"""Its name, and what is wrong, or None."""

TOKEN = QuantSpec("int8", PerRow(), quant_min=-127)
ASYMMETRIC_TOKEN = QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC)
GROUP = 128 if ON_GPU else 32
REAL_ZERO = QuantSpec("uint4", PerGroup(GROUP), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
INT4 = QuantSpec("uint4", PerGroup(GROUP), MappingType.ASYMMETRIC)
PACKED = PackedLayout()

LINEAR = {
    "int8 weight": LinearSpec(QuantSpec("int8", quant_min=-127)),
    "int4 weight": LinearSpec(INT4, layout=PACKED),
    "int4 weight, real zero": LinearSpec(REAL_ZERO, layout=PACKED),
    "int4 weight, rows": LinearSpec(QuantSpec("int4", PerRow()), layout=PACKED),
    "int3 weight": LinearSpec(QuantSpec("int3", PerGroup(GROUP)), layout=PACKED),
    "int6 weight": LinearSpec(QuantSpec("int6", PerGroup(GROUP)), layout=PACKED),
    "int8, int8": LinearSpec(QuantSpec("int8", quant_min=-127), TOKEN),
    "int8, int8 asymmetric": LinearSpec(QuantSpec("int8", quant_min=-127), ASYMMETRIC_TOKEN),
    "int8 group, int8": LinearSpec(QuantSpec("int8", PerGroup(GROUP)), TOKEN),
    "int4, int8": LinearSpec(QuantSpec("int4", PerGroup(GROUP)), ASYMMETRIC_TOKEN, layout=PACKED),
}


def linear_checks() -> Iterator[Check]:
    """Every scheme at every size: which kernel, and its numbers against the reference."""
    for name, spec in LINEAR.items():
        for m, n, k in sizes(
            [(1, 4096, 4096), (16, 4096, 14336), (77, 1000, 4096), (300, 4096, 1376), (2048, 4096, 4096)], [(3, 20, 64)]
        ):
            yield f"{name} {m} x {n} x {k}", lambda spec=spec, m=m, n=n, k=k: _linear(spec, m, n, k)  # type: ignore[misc]


def _linear(spec: LinearSpec, m: int, n: int, k: int) -> str | None:
    if not ON_GPU or k % GROUP:
        k = -(-k // GROUP) * GROUP
    weight = normal(n, k)
    quantized = qtorch.AffineQuantizedTensor.from_float(weight, spec)
    x, bias = normal(m, k), normal(n)
    kernel = choose(Problem("linear", quantized.scheme, x.dtype, "cuda"))
    with record_kernels() as ran:
        y = kernel(x, quantized, bias)
    if not ran[-1].startswith("triton."):
        return f"ran {ran}"
    expected = reference.linear(x, quantized, bias)
    if spec.activation is not None:
        return None if torch.equal(y, expected) else f"{(y != expected).float().mean():.2%} of the results differ"
    error = float(compute_error(expected, y))
    if not error > 38:
        return f"SQNR {error:.1f} dB against the reference"
    error = float(compute_error(functional.linear(x.float(), weight.float(), bias.float()), y))
    return None if 8 < error < 60 else f"SQNR {error:.1f} dB against float"


def product_checks() -> Iterator[Check]:
    """int8 products with operands in every order, at the sizes of the tables."""
    for m, n, k in sizes([(4096, 4096, 4096), (8192, 8192, 8192), (33, 4100, 4097), (1, 4096, 4096)], [(5, 20, 33)]):
        for order in ("rows, columns", "rows, rows", "columns, columns"):
            yield f"int8 product, {order}, {m} x {n} x {k}", lambda s=(m, n, k), o=order: _product(*s, o)  # type: ignore[misc]


def _product(m: int, n: int, k: int, order: str) -> str | None:
    from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm

    codes = lambda *s: torch.randint(-128, 128, s, dtype=torch.int8, device=DEVICE)  # noqa: E731
    first, second = order.split(", ")
    a = codes(m, k) if first == "rows" else codes(k, m).t()
    b = codes(k, n) if second == "rows" else codes(n, k).t()
    c = int8_scaled_mm(a, b, None, None, torch.int32)
    some = torch.randperm(m, device=DEVICE)[:64]
    expected = (a[some].double() @ b.double()).to(torch.int32)
    return None if torch.equal(c[some], expected) else f"{(c[some] != expected).float().mean():.2%} of the sums differ"


def quantizer_checks() -> Iterator[Check]:
    for m, k in sizes([(4096, 4096), (777, 14336), (64, 20000)], [(20, 64)]):
        yield f"quantizers {m} x {k}", lambda m=m, k=k: _quantizers(m, k)  # type: ignore[misc]


def _quantizers(m: int, k: int) -> str | None:
    from qtorch.kernels.cuda.triton.quantize import quantize_columnwise, quantize_rowwise

    x = normal(m, k)
    scale, _ = TOKEN.choose_qparams(x)
    expected = TOKEN.quantize(x, scale, None)
    for transposed in (False, True):
        codes, found, other = quantize_rowwise(x, transposed=transposed)
        if not torch.equal(found, scale) or not torch.equal(codes, expected):
            return f"rows differ from the primitives in {(codes != expected).sum()} codes"
        if other is not None and not torch.equal(other, expected.t()):
            return "the transposed codes differ"
    columns = quantize_columnwise(x.t())
    if not torch.equal(columns[0], expected) or not torch.equal(columns[1], scale):
        return "columns differ from rows of the transpose"
    seed = torch.ones(1, dtype=torch.int64, device=x.device)
    drawn, _, _ = quantize_rowwise(x, seed=seed)
    error = float((drawn - x.float() / scale).mean().abs())
    limit = 4 * 0.41 * x.numel() ** -0.5
    return None if 0 < error < limit else f"stochastic rounding is off by {error:.2e} on average, limit {limit:.2e}"


def tile_checks() -> Iterator[Check]:
    for dtype in (torch.int8, torch.float8_e4m3fn) if ON_GPU else (torch.int8,):
        for of_a, of_b in (((1, GROUP), (GROUP, GROUP)), ((32, 32), (32, 32))):
            yield f"tiles {of_a}, {of_b}, {dtype}", lambda d=dtype, t=(of_a, of_b): _tiles(d, *t)  # type: ignore[misc]


def _tiles(dtype: torch.dtype, of_a: tuple[int, int], of_b: tuple[int, int]) -> str | None:
    from qtorch.kernels.cuda.triton.quantize import quantize_tilewise

    m, n, k = (1024, 4096, 4096) if ON_GPU else (32, 32, 64)
    (a, a_scale), (b, b_scale) = (
        quantize_tilewise(x, t, dtype) for x, t in ((normal(m, k), of_a), (normal(n, k), of_b))
    )
    y = tile_operator(a, b, a_scale, b_scale, DTYPE)
    expected = tile_operator(*(t.cpu() for t in (a, b, a_scale, b_scale)), DTYPE)
    if dtype == torch.int8:
        return None if torch.equal(y.cpu(), expected) else "differs from torch's"
    error = float(compute_error(expected, y.cpu()))
    return None if error > 38 else f"SQNR {error:.1f} dB"


def float8_checks() -> Iterator[Check]:
    if ON_GPU:
        for granularity in (qtorch.PerRow(), qtorch.PerTensor()):
            yield f"float8 linear, {granularity}", lambda g=granularity: _float8(g)  # type: ignore[misc]


def _float8(granularity: qtorch.PerRow | qtorch.PerTensor) -> str | None:
    weight, x = normal(4096, 4096), normal(300, 4096)
    quantized = qtorch.float8_dynamic_activation_float8_weight(granularity).apply(weight)
    with record_kernels() as ran:
        y = functional.linear(x, quantized)
    error = float(compute_error(reference.linear(x, quantized, None), y))
    return None if ran[0] == "linear:float8_scaled_mm" and error > 35 else f"ran {ran[0]}, SQNR {error:.1f} dB"


def run() -> list[str]:
    """Names of the checks that fail, with what is wrong."""
    failed, count = [], 0
    for source in (quantizer_checks, product_checks, linear_checks, tile_checks, float8_checks):
        for name, check in source():
            count += 1
            try:
                wrong = check()
            except Exception as error:  # a kernel that does not compile or launch is a failed check
                wrong = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if wrong is not None:
                failed.append(f"{name}: {wrong}")
                print(f"WRONG {failed[-1]}", flush=True)
    print(f"{count - len(failed)} of {count} checks passed", flush=True)
    return failed


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    raise SystemExit(bool(run()))
