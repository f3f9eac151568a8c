"""Products that kernels of torch compute: int8 in int32, int4 in tiles (tinygemm), and float8."""

import importlib

import pytest
import torch

from qtorch import AffineQuantizedTensor, MappingType, PerGroup, PerRow, PerTensor, QuantSpec, TensorCoreTiledLayout
from qtorch.kernels import features, int_matmul, int_scaled_matmul, record_kernels
from qtorch.kernels.cuda.float8_scaled import float8_scaled_mm
from qtorch.kernels.linear import int4_tiled, reference
from qtorch.primitives import LinearSpec, ZeroPointDomain, compute_error


def layer(dtype: torch.dtype, n: int = 72, k: int = 160, group: int = 32, rows: int = 5):
    """(input, float weight, quantized weight, bias)."""
    weight = torch.randn(n, k, dtype=dtype)
    spec = QuantSpec("uint4", PerGroup(group), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    quantized = AffineQuantizedTensor.from_float(weight, LinearSpec(spec, layout=TensorCoreTiledLayout()))
    return torch.randn(rows, k, dtype=dtype), weight, quantized, torch.randn(n, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("rows", [0, 1, int4_tiled.MAX_ROWS[True], int4_tiled.MAX_ROWS[True] + 1])
def test_against_reference_and_float(dtype, has_bf16, rows, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: has_bf16)
    x, weight, quantized, bias = layer(dtype, rows=rows)
    with record_kernels() as ran:
        y = torch.nn.functional.linear(x, quantized, bias)
    packed = dtype == torch.bfloat16 and 0 < rows <= int4_tiled.MAX_ROWS[has_bf16]
    assert ran == ["linear:int4_tiled_mm", "int4_tiled_mm"] + ["int4_tiled_mm.int4pack"] * packed
    assert (y.dtype, y.shape) == (dtype, (rows, 72))
    if rows:
        expected = reference.linear(x, quantized, bias)
        assert compute_error(expected, y) > {torch.float32: 110, torch.float16: 55, torch.bfloat16: 40}[dtype]
        error = compute_error(torch.nn.functional.linear(x.float(), weight.float(), bias.float()), y)
        assert 18 < error < 28


@pytest.mark.parametrize("k, group", [(32, 32), (64, 32), (96, 32), (512, 64), (512, 128), (512, 256)])
@pytest.mark.parametrize("n", [1, 16, 32, 64, 65, 130])
def test_groups_and_sizes(n, k, group):
    for dtype in (torch.float32, torch.bfloat16):
        x, _, quantized, _ = layer(dtype, n, k, group, rows=2)
        with record_kernels() as ran:
            y = torch.nn.functional.linear(x, quantized)
        assert (ran[-1] == "int4_tiled_mm.int4pack") == (dtype == torch.bfloat16)
        assert compute_error(reference.linear(x, quantized, None), y) > (40 if dtype == torch.bfloat16 else 110)


def test_scales_errors_and_longest_sums():
    """Weights quantized in fp32, activations in bf16, as under autocast: scales are rounded on the way."""
    x, _, quantized, _ = layer(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, quantized)
    assert 35 < compute_error(reference.linear(x.bfloat16(), quantized, None), y) < 70
    xq, xs, wq, ws = operands()
    assert float8_scaled_mm(xq[:0], xs[:0], wq, ws, torch.float32).shape == (0, 20)
    assert torch.equal(float8_scaled_mm(xq[:, :0], xs, wq[:, :0], ws, torch.float32), torch.zeros(5, 20))
    xq, xs, wq, ws = operands()
    with pytest.raises(ValueError, match=r"takes float8 \(M, K\) and \(N, K\), got \(5, 33\) of torch.float32"):
        float8_scaled_mm(xq.float(), xs, wq, ws, torch.float32)
    with pytest.raises(ValueError, match=r"got \(5, 33\) of torch.float8_e4m3fn and \(20, 32\)"):
        float8_scaled_mm(xq, xs, wq[:, :32], ws, torch.float32)
    with pytest.raises(ValueError, match=r"takes scales .* got \(4, 1\) and \(20, 1\) for M, N = \(5, 20\)"):
        float8_scaled_mm(xq, xs[:4], wq, ws, torch.float32)
    a, b = random_codes(40, 24)[::2, 4:20], random_codes(16, 9)
    for other in (b, b.t().contiguous().t()):
        assert torch.equal(int_matmul(a, other).long(), a.long() @ b.long())
    flat = random_codes(1, 999)[0]
    windows = flat.as_strided((40, 16), (3, 1)), flat[:16].expand(40, 16), flat[:40, None].expand(40, 16)
    for a in windows:  # rows that overlap
        for b in (flat.as_strided((16, 9), (1, 7)), flat.as_strided((16, 1), (1, 1)), windows[0][:16]):
            assert torch.equal(int_matmul(a, b).long(), a.long() @ b.long())
    a, b, scale = random_codes(3, 8), random_codes(8, 4), torch.rand(3, 1)
    expected = (a.long() @ b.long()).float() * scale
    torch.testing.assert_close(int_scaled_matmul(a, b, scale), expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"takes int8 matrices, got torch.uint8 and torch.int8"):
        int_matmul(random_codes(2, 3).view(torch.uint8), random_codes(3, 2))
    with pytest.raises(ValueError, match=r"takes \(M, K\) and \(K, N\), got \(2, 3\) and \(4, 2\)"):
        int_matmul(random_codes(2, 3), random_codes(4, 2))
    a, b = torch.full((2, 140_000), -128, dtype=torch.int8), torch.full((140_000, 3), -128, dtype=torch.int8)
    assert (int_scaled_matmul(a, b, torch.ones(2, 1, dtype=torch.float64)) == 140_000 * 128 * 128).all()
    with pytest.raises(ValueError, match="need not hold sums of 140000 products"):
        int_matmul(a, b)
    longest = module.int32_terms()
    assert longest * 128 * 128 < 2**31 <= (longest + 1) * 128 * 128
    assert (int_matmul(a[:, :longest], b[:longest]) == longest * 128 * 128).all()


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_cuda(rows, inner_k_tiles):
    x, _, quantized, bias = layer(torch.bfloat16, rows=rows)
    quantized = quantized.to_layout(TensorCoreTiledLayout(inner_k_tiles)).cuda()
    with record_kernels() as ran:
        y = torch.nn.functional.linear(x.cuda(), quantized, bias.cuda())
    assert ran == ["linear:int4_tiled_mm", "int4_tiled_mm", "int4_tiled_mm.int4pack"]
    assert 38 < compute_error(reference.linear(x.cuda(), quantized, bias.cuda()), y) < 90
    x32 = x.float().cuda()
    assert compute_error(reference.linear(x32, quantized, None), torch.nn.functional.linear(x32, quantized)) > 60


NONE = ZeroPointDomain.NONE


def operands(m=5, k=33, n=20, device="cpu"):
    codes = lambda *shape: torch.randn(shape, device=device).to(torch.float8_e4m3fn)  # noqa: E731
    return codes(m, k), torch.rand(m, 1, device=device), codes(n, k), torch.rand(n, 1, device=device)


def product(a, b, scale_a, scale_b, out_dtype):
    """What the hardware does, with its conditions."""
    assert a.shape[1] % 16 == 0
    assert b.shape[1] % 16 == 0
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    by_rows = scale_a.dim() == 2
    if by_rows:
        assert out_dtype == torch.bfloat16
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows, columns", [(True, True), (False, True), (True, False), (False, False)])
def test_arguments_of_the_hardware(rows, columns, dtype, monkeypatch):
    """Padded to multiples of 16, and scaled outside where it does not scale by rows."""
    monkeypatch.setattr(torch, "_scaled_mm", product)
    for m, k, n in ((5, 33, 20), (1, 16, 16), (3, 1, 1)):
        xq, xs, wq, ws = operands(m, k, n)
        xs, ws = xs if rows else xs[:1], ws if columns else ws[:1]
        y = float8_scaled_mm(xq, xs, wq, ws, dtype)
        assert (y.shape, y.dtype) == ((m, n), dtype)
        expected = (xq.float() @ wq.float().t()) * xs * ws.t()
        torch.testing.assert_close(y.float(), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_cuda_of_float8(rows, dtype, granularity):
    spec = QuantSpec("float8_e4m3fn", granularity, zero_point_domain=NONE)
    weight = torch.randn(200, 300, device="cuda", dtype=dtype)
    quantized = AffineQuantizedTensor.from_float(weight, LinearSpec(spec, spec))
    x, bias = torch.randn(rows, 300, device="cuda", dtype=dtype), torch.randn(200, device="cuda", dtype=dtype)
    with record_kernels() as ran:
        y = torch.nn.functional.linear(x, quantized, bias)
    assert ran[0] == "linear:float8_scaled_mm"
    assert y.dtype == dtype
    assert compute_error(reference.linear(x, quantized, bias), y) > 38
    assert 24 < compute_error(torch.nn.functional.linear(x.float(), weight.float(), bias.float()), y) < 36


module = importlib.import_module("qtorch.kernels.ops.int_matmul")

SHAPES = [(1, 1, 1), (3, 1, 5), (3, 5, 7), (1, 1024, 4), (17, 1025, 3), (2, 4097, 33), (0, 8, 4), (4, 8, 0), (3, 0, 5)]


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def sliced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return module._sliced(torch.empty(a.shape[0], b.shape[1], dtype=torch.int32), a, b)


@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("multiply", [int_matmul, sliced], ids=["chosen", "sliced"])
def test_exact(m, k, n, multiply):
    a, b = random_codes(m, k), random_codes(n, k).t()
    result = multiply(a, b)
    assert result.dtype == torch.int32
    assert torch.equal(result.long(), a.long() @ b.long())


@pytest.mark.parametrize("multiply", [int_matmul, sliced], ids=["chosen", "sliced"])
def test_exact_at_the_largest_sums(multiply):
    """Every product is 128 * 128: the case in which a slice of more than 1024 terms would leave fp32's integers."""
    a, b = torch.full((2, 5000), -128, dtype=torch.int8), torch.full((5000, 3), -128, dtype=torch.int8)
    assert (multiply(a, b) == 5000 * 128 * 128).all()
    odd = b.clone()
    odd[0] = -127
    assert (multiply(a, odd) == 5000 * 128 * 128 - 128).all()


@pytest.mark.parametrize("vnni", [True, False])
def test_the_choice_follows_the_processor(vnni, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: vnni)
    with record_kernels() as ran:
        int_matmul(random_codes(2, 8), random_codes(8, 2))
    assert ran == ["int_matmul", "int_matmul.vnni" if vnni else "int_matmul.sliced"]
