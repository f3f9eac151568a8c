"""int8 activations and grouped weights, plain and packed: bit for bit the reference."""

import pytest
import torch

from qtorch import PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.quantize import quantize_input

from .quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, TOKEN, refusals, weight_of

ACTIVATIONS = {"token": TOKEN, "token asymmetric": ASYMMETRIC_TOKEN, "tensor": QuantSpec("int8", PerTensor())}
CONFIGS = [LaunchConfig(16, 32, 64), LaunchConfig(32, 16, 32)]


def check(spec, activation, rows, n, k, device, dtype=torch.float32, config=CONFIGS[0]):
    weight = weight_of(spec, (n, k), device, ACTIVATIONS[activation], dtype)
    x, bias = torch.randn(rows, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    (xq, xs, xz), name = quantize_input(x, weight), spec.dtype.name
    with forced(config), record_kernels() as ran:
        y = int8_grouped_mm(xq, xs, xz, weight.qdata, weight.scale, weight.zero_point, name, bias, dtype)
    assert ran == ["triton.int8_grouped_mm"]
    assert torch.equal(y, reference.linear(x, weight, bias)), (spec, activation, rows, n, k)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", [*(f"int{bits}" for bits in range(1, 9)), "uint4", "uint8"])
def test_every_width(name, activation, device):
    check(QuantSpec(name, PerGroup(32), ASYMMETRIC), activation, 5, 20, 256, device)
    check(QuantSpec(name, PerRow()), activation, 3, 20, 96, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_dtypes(dtype, activation, config, device):
    check(QuantSpec("int4", PerGroup(32)), activation, 33, 44, 256, device, dtype, config)
    check(QuantSpec("uint8", PerGroup(64), ASYMMETRIC), activation, 17, 20, 128, device, dtype, config)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "n, k, group", [(1, 1, 1), (3, 5, 5), (17, 101, -1), (33, 136, 17), (7, 50, 10), (20, 1024, 512)]
)
def test_odd_sizes(n, k, group, activation, device):
    """Groups of fewer than 32 codes, that straddle segments, and of more than are unrolled."""
    for name in ("uint4", "int5", "int8"):
        check(QuantSpec(name, PerGroup(group), ASYMMETRIC), activation, 19, n, k, device)


def test_largest_sums(device):
    """All codes at their bounds: sums that fp32 could not hold."""
    k = 4096
    xq = torch.full((2, k), -128, dtype=torch.int8, device=device)
    one = torch.ones(2, 1, device=device)
    codes = torch.full((3, k), 255, dtype=torch.uint8, device=device)
    codes[0, 0] = 254
    with forced(CONFIGS[0], block_k=128):
        y = int8_grouped_mm(xq, one, None, codes, one[:1].expand(3, 1), None, "uint8", None, torch.float32)
    sums = torch.full((2, 3), -128 * 255 * k, device=device, dtype=torch.int32)
    sums[:, 0] += 128
    assert torch.equal(y, sums.float())


def test_strides_and_empty(device):
    xq = torch.randint(-128, 128, (40, 64), dtype=torch.int8, device=device)
    codes = torch.randint(-128, 128, (20, 64), dtype=torch.int8, device=device)
    xs, ws = torch.rand(40, 1, device=device), torch.rand(2, 20, device=device).t()
    run = lambda x, s, w, ws: int8_grouped_mm(x, s, None, w, ws, None, "int8", None, torch.float32)  # noqa: E731
    with forced(CONFIGS[1]):
        y = run(xq, xs, codes, ws)
        assert torch.equal(run(xq[::3], xs[::3], codes[::2], ws[::2]), y[::3, ::2])
        assert torch.equal(run(xq.t().contiguous().t(), xs, codes.t().contiguous().t(), ws.contiguous()), y)
    assert run(xq[:0], xs[:0], codes, ws).shape == (0, 20)
    assert torch.equal(run(xq[:, :0], xs, codes[:, :0], ws), torch.zeros(40, 20, device=device))


def test_errors(device):
    xq, xs = torch.ones(2, 64, dtype=torch.int8, device=device), torch.ones(2, 1, device=device)
    codes, ws = torch.ones(6, 32, dtype=torch.uint8, device=device), torch.ones(6, 2, device=device)
    of_weight = {"qdata": codes, "ws": ws, "wz": None, "weight_dtype": "int4"}
    refusals(
        int8_grouped_mm,
        {"xq": xq, "xs": xs, "xz": None, **of_weight, "bias": None, "dtype": torch.float32},
        ("xq", xq.float(), r"xq must be a matrix of int8, got shape \(2, 64\) of torch.float32"),
        ("xs", xs[:1].expand(3, 1), r"xs must have shape \(2, 1\) or \(1, 1\), got \(3, 1\)"),
        ("qdata", codes[:, :31], r"qdata must have shape \(6, 32\), got \(6, 31\)"),
        ("ws", ws[:5], r"must have shape \(N, groups\), groups dividing K, got \(5, 2\) for N, K = \(6, 64\)"),
        ("ws", ws[:, :1].expand(6, 3), r"groups dividing K, got \(6, 3\)"),
        ("wz", ws[:, :1], r"zero_point must have shape \(6, 2\), got \(6, 1\)"),
        ("ws", ws.to("meta"), "all tensors must be on one device, got .* ws on meta"),
    )
