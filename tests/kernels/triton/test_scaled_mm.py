"""int8 products with scales for rows, and products with a scale for each tile: any strides, every epilogue."""

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.shared_ops import triton_int8_block_mm
from qtorch.kernels.cuda.triton import int8_scaled_mm as module
from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm, transposed_copy
from qtorch.kernels.cuda.triton.quantize import quantize_tilewise
from qtorch.kernels.cuda.triton.tile_scaled_mm import tile_scaled_mm
from qtorch.kernels.ops.block_mm import tile_scaled_mm as reference
from qtorch.primitives import compute_error
from tests.fast_part import matrix_but
from tests.refusals import refusals

SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 129), (64, 96, 40), (1, 256, 48)]
CONFIGS = [LaunchConfig(16, 32, 32), LaunchConfig(32, 16, 64, group_m=2), LaunchConfig(16, 32, 64, tma=True)]


def codes(*shape, device):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def exact(a, b):
    return (a.double() @ b.double()).to(torch.int32)


@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_are_exact(m, k, n, config, device):
    a, b = codes(m, k, device=device), codes(n, k, device=device).t()
    with forced(config), record_kernels() as ran:
        c = int8_scaled_mm(a, b, None, None, torch.int32)
    assert ran == ["triton.int8_scaled_mm"]
    assert c.dtype == torch.int32
    assert torch.equal(c, exact(a, b))


def test_sums_strides_and_empty_products(device):
    a = torch.full((2, 4096), -128, dtype=torch.int8, device=device)
    with forced(CONFIGS[0], block_k=512):
        assert (int8_scaled_mm(a, a.t(), None, None, torch.int32) == 4096 * 128 * 128).all()
    base_a, base_b = codes(40, 96, device=device), codes(96, 40, device=device)
    for a in (base_a[::2, 10:58], base_a[:, :48].contiguous().t()[:, :48].t(), base_b[:48, ::2].t()):
        for b in (base_b[:48], base_b[::2, 3:30], base_a[:, 48:].t()):
            with forced(CONFIGS[2]):
                assert torch.equal(int8_scaled_mm(a, b, None, None, torch.int32), exact(a, b))
    x = codes(150, 70, device=device)
    for view in (x, x.t(), x[::2, 1:]):
        assert torch.equal(transposed_copy(view), view.t())
        assert transposed_copy(view).is_contiguous()
    c = int8_scaled_mm(codes(0, 8, device=device), codes(8, 4, device=device), None, None, torch.int32)
    assert c.shape == (0, 4)
    with forced(CONFIGS[0]):
        c = int8_scaled_mm(codes(3, 0, device=device), codes(0, 4, device=device), None, None, torch.int32)
    assert torch.equal(c, torch.zeros(3, 4, dtype=torch.int32, device=device))


@pytest.mark.parametrize("dtype", matrix_but((torch.float16,), (torch.float32, torch.bfloat16, torch.float16)))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=["pointers", "tma"])
def test_scales_zero_points_and_bias(dtype, has_bias, has_zero, config, device):
    """In this order, rounded before the bias: bit for bit what the CPU kernels do."""
    m, k, n = 19, 48, 37
    a, b = codes(m, k, device=device), codes(n, k, device=device).t()
    bias = torch.randn(n, device=device).to(dtype) if has_bias else None
    for rows, columns in ((m, n), (1, n), (m, 1), (1, 1)):
        row_scale, column_scale = (torch.rand(s, device=device) / 64 for s in ((rows, 1), (1, columns)))
        zero = codes(rows, 1, device=device) if has_zero else None
        with forced(config):
            y = int8_scaled_mm(a, b, row_scale, column_scale, dtype, bias, zero)
        sums = exact(a, b)
        if has_zero:
            sums = sums - zero.to(torch.int32) * b.sum(0, dtype=torch.int32)
        expected = (sums.float() * column_scale * row_scale).to(dtype)
        assert torch.equal(y, expected if bias is None else expected + bias)


def test_large_products_copy_operands_in_another_order(device, monkeypatch):
    copied = []
    copy = lambda x: copied.append(tuple(x.shape)) or transposed_copy(x)  # noqa: E731
    monkeypatch.setattr(module, "transposed_copy", copy)
    a, b = codes(32, 256, device=device).t(), codes(32, 256, device=device)
    with forced(LaunchConfig(128, 128, 32)):
        assert torch.equal(int8_scaled_mm(a, b, None, None, torch.int32), exact(a, b))
        assert copied == [(32, 256), (32, 256)]
        int8_scaled_mm(a[:8], b, None, None, torch.int32)
        int8_scaled_mm(a.contiguous(), b.t().contiguous().t(), None, None, torch.int32)
    assert len(copied) == 2


def test_errors_and_refused_tiles(device):
    a, b, one = codes(4, 8, device=device), codes(8, 6, device=device), torch.ones(1, 1, device=device)
    refusals(
        int8_scaled_mm,
        {"a": a, "b": b, "row_scale": one, "column_scale": one, "dtype": torch.float32, "bias": None},
        ("a", a.float(), r"a must be a matrix of int8, got shape \(4, 8\) of torch.float32"),
        ("b", b.t(), r"takes \(M, K\) and \(K, N\), got \(4, 8\) and \(6, 8\)"),
        ("row_scale", one.expand(6, 1), r"row_scale must have shape \(4, 1\) or \(1, 1\), got \(6, 1\)"),
        ("column_scale", None, "needs both scales and a floating-point dtype, or neither and int32"),
        ("dtype", torch.int32, "needs both scales"),
        ("bias", torch.ones(4, device=device), r"bias must have shape \(6,\), got \(4,\)"),
        ("b", b.to("meta"), r"all tensors must be on one device, got a on .*, b on meta"),
    )
    with pytest.raises(ValueError, match="runs on CUDA, or with TRITON_INTERPRET=1 on CPU; the tensors are on meta"):
        int8_scaled_mm(a.to("meta"), b.to("meta"), None, None, torch.int32)
    _, _, (a, b, a_scale, b_scale) = operands(torch.int8, TILES[0], device)
    assert tile_scaled_mm(a[:0], b, a_scale[:0], b_scale, torch.float32).shape == (0, 64)
    refusals(
        tile_scaled_mm,
        {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "dtype": torch.float32},
        ("a", a.float(), r"a must be a matrix of int8 or .* got shape \(96, 192\) of torch.float32"),
        ("b", b[:, :160], r"takes \(M, K\), \(N, K\) and a float dtype, got \(96, 192\), \(64, 160\)"),
        ("a_scale", a_scale[:, :5], r"a_scale has shape \(3, 5\); its sizes must divide .* \(96, 192\)"),
        ("b_scale", b_scale[:, :3], r"b_scale has shape \(2, 3\).*the same number of tiles"),
        ("b_scale", b_scale.double(), r"b_scale must be a matrix of float32"),
    )


TILES = [((32, 32), (32, 32)), ((1, 64), (64, 64)), ((8, 16), (4, 16)), ((1, 12), (1, 12)), ((1, 192), (64, 192))]

TILES_CONFIGS = [LaunchConfig(32, 32, 32), LaunchConfig(16, 64, 64, group_m=2)]


def operands(dtype, tiles, device):
    x, w = torch.randn(96, 192, device=device), torch.randn(64, 192, device=device)
    (a, a_scale), (b, b_scale) = (quantize_tilewise(t, tile, dtype) for t, tile in zip((x, w), tiles))
    return x, w, (a, b, a_scale, b_scale)


def on_cpu(arguments, dtype):
    """By torch: the CPU's variant of the operator."""
    return reference(*(t.cpu() for t in arguments), dtype)


@pytest.mark.parametrize("tiles", matrix_but(TILES[:3], TILES), ids=str)
@pytest.mark.parametrize("config", matrix_but(TILES_CONFIGS[:1], TILES_CONFIGS), ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_against_torch(dtype, config, tiles, device):
    x, w, arguments = operands(dtype, tiles, device)
    with forced(config), record_kernels() as ran:
        y = tile_scaled_mm(*arguments, torch.float32)
    assert ran == ["triton.tile_scaled_mm"]
    expected = on_cpu(arguments, torch.float32)
    if dtype == torch.int8:
        assert torch.equal(y.cpu(), expected)
        a, b, a_scale, b_scale = arguments
        with forced(config), record_kernels() as ran:
            assert torch.equal(triton_int8_block_mm(a, a_scale, b, b_scale, torch.float32), y)
        assert ran[-1] == "triton.tile_scaled_mm"
    else:
        assert compute_error(expected, y.cpu()) > 60, "the hardware's float8 sums keep some 14 bits"
    assert 25 < compute_error(x @ w.t(), y) < 50


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_result_dtypes_and_strides(out, device):
    _, _, (a, b, a_scale, b_scale) = operands(torch.int8, TILES[0], device)
    with forced(LaunchConfig(32, 32, 32)):
        y = tile_scaled_mm(a, b, a_scale, b_scale, out)
        other = tile_scaled_mm(
            a.t().contiguous().t(), b.t().contiguous().t(), a_scale.t().contiguous().t(), b_scale, out
        )
    assert torch.equal(y.cpu(), on_cpu((a, b, a_scale, b_scale), out))
    assert torch.equal(y, other)
