"""Products with a scale for each tile: int8 bit for bit, float8 closely."""

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.quantize import quantize_tilewise
from qtorch.kernels.cuda.triton.tile_scaled_mm import tile_scaled_mm
from qtorch.kernels.ops.block_mm import tile_scaled_mm as reference
from qtorch.primitives import compute_error
from tests.fast_part import matrix_but
from tests.refusals import refusals

TILES = [((32, 32), (32, 32)), ((1, 64), (64, 64)), ((8, 16), (4, 16)), ((1, 12), (1, 12)), ((1, 192), (64, 192))]

CONFIGS = [LaunchConfig(32, 32, 32), LaunchConfig(16, 64, 64, group_m=2)]


def operands(dtype, tiles, device):
    x, w = torch.randn(96, 192, device=device), torch.randn(64, 192, device=device)
    (a, a_scale), (b, b_scale) = (quantize_tilewise(t, tile, dtype) for t, tile in zip((x, w), tiles))
    return x, w, (a, b, a_scale, b_scale)


def on_cpu(arguments, dtype):
    """By torch: the CPU's variant of the operator."""
    return reference(*(t.cpu() for t in arguments), dtype)


@pytest.mark.parametrize("tiles", matrix_but(TILES[:3], TILES), ids=str)
@pytest.mark.parametrize("config", matrix_but(CONFIGS[:1], CONFIGS), ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_against_torch(dtype, config, tiles, device):
    x, w, arguments = operands(dtype, tiles, device)
    with forced(config), record_kernels() as ran:
        y = tile_scaled_mm(*arguments, torch.float32)
    assert ran == ["triton.tile_scaled_mm"]
    expected = on_cpu(arguments, torch.float32)
    if dtype == torch.int8:
        assert torch.equal(y.cpu(), expected)
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


def test_empty(device):
    _, _, (a, b, a_scale, b_scale) = operands(torch.int8, TILES[0], device)
    assert tile_scaled_mm(a[:0], b, a_scale[:0], b_scale, torch.float32).shape == (0, 64)


def test_errors(device):
    _, _, (a, b, a_scale, b_scale) = operands(torch.int8, TILES[0], device)
    refusals(
        tile_scaled_mm,
        {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "dtype": torch.float32},
        ("a", a.float(), r"a must be a matrix of int8 or .* got shape \(96, 192\) of torch.float32"),
        ("b", b[:, :160], r"takes \(M, K\), \(N, K\) and a float dtype, got \(96, 192\), \(64, 160\)"),
        ("a_scale", a_scale[:, :5], r"a_scale has shape \(3, 5\); its sizes must divide .* \(96, 192\)"),
        ("b_scale", b_scale[:, :3], r"b_scale has shape \(2, 3\).*the same number of tiles"),
        ("b_scale", b_scale.double(), r"b_scale must be a matrix of float32"),
    )
