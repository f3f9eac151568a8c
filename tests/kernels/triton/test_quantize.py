"""Rows, columns and tiles quantized by Triton: the bits of the primitives; stochastic rounding: its expectation."""

import pytest
import torch

from qtorch import MappingType, PerBlock, PerRow, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.shared_ops import cuda_quantize_rowwise, triton_quantize_dynamic
from qtorch.kernels.cuda.triton.quantize import (
    quantize_columnwise,
    quantize_rowwise,
    quantize_rowwise_asymmetric,
    quantize_tilewise,
)
from qtorch.primitives import ZeroPointDomain
from tests.fast_part import matrix_but
from tests.refusals import refuses

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
ASYMMETRIC = QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC)


def both(x, dtype, **more):
    codes, scale, transposed = quantize_rowwise(x, dtype, transposed=True, **more)
    assert_same(transposed, codes.t().contiguous())
    return codes, scale


QUANTIZERS = {
    "rowwise": lambda x, dtype, **more: quantize_rowwise(x, dtype, **more)[:2],
    "rowwise, both": both,
    "columnwise": lambda x, dtype, **more: quantize_columnwise(x.t(), dtype, **more),
    "tilewise": lambda x, dtype, **more: quantize_tilewise(x, (1, x.shape[1]), dtype, **more),
}
"""Each gives the codes of rows and their scales."""
EVERY_QUANTIZER = pytest.mark.parametrize("name", QUANTIZERS)


def spec(dtype, granularity):
    if dtype == torch.int8:
        return QuantSpec("int8", granularity, quant_min=-127, scale_dtype=torch.float32)
    return QuantSpec(dtype, granularity, zero_point_domain=ZeroPointDomain.NONE, scale_dtype=torch.float32)


def sample(shape, dtype, device):
    """Rows of very different sizes; a row of zeros."""
    x = torch.randn(shape, device=device) * torch.logspace(-6, 4, shape[0], device=device)[:, None]
    x[shape[0] // 2] = 0
    return x.to(dtype)


def assert_same(codes, expected):
    assert codes.dtype == expected.dtype
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def check(x, codes, scale, wanted):
    """The bits of the primitives."""
    expected_scale, _ = wanted.choose_qparams(x)
    assert torch.equal(scale, expected_scale)
    assert_same(codes, wanted.quantize(x, expected_scale, None))


def check_asymmetric(x):
    with record_kernels() as ran:
        codes, scale, zero = quantize_rowwise_asymmetric(x)
    assert ran == ["triton.quantize_rowwise_asymmetric"]
    expected_scale, expected_zero = ASYMMETRIC.choose_qparams(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(zero, expected_zero)
    assert torch.equal(codes, ASYMMETRIC.quantize(x, expected_scale, expected_zero))


@EVERY_QUANTIZER
@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
@pytest.mark.parametrize("shape", matrix_but(((5, 33),), ((1, 1), (5, 33), (70, 200), (3, 1100))), ids=str)
def test_rows(shape, codes_dtype, name, device):
    for dtype in FLOATS:
        x = sample(shape, dtype, device)
        with record_kernels() as ran:
            codes, scale = QUANTIZERS[name](x, codes_dtype)
        assert ran == [f"triton.quantize_{name.removesuffix(', both')}"]
        check(x, codes, scale, spec(codes_dtype, PerRow()))


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
@pytest.mark.parametrize("tile", [(1, 128), (32, 32), (128, 128), (1, 24), (48, 5)])
def test_tiles(tile, codes_dtype, device):
    x = sample((tile[0] * 3, tile[1] * 2), torch.bfloat16, device)
    check(x, *quantize_tilewise(x, tile, codes_dtype), spec(codes_dtype, PerBlock(tile)))
    x, wanted = x.float(), spec(codes_dtype, PerBlock(tile))
    if codes_dtype != torch.int8:
        with record_kernels() as ran:
            check(x, *triton_quantize_dynamic(x, wanted)[:2], wanted)
        assert ran == ["cuda_quantize_tilewise", "triton.quantize_tilewise"]


@EVERY_QUANTIZER
def test_strides_and_empty_matrices(name, device):
    x = torch.randn(40, 60, device=device)
    for view in (x.t(), x[::2, 5:37], x[:, ::3]):
        check(view, *QUANTIZERS[name](view, torch.int8), spec(torch.int8, PerRow()))
    for shape in ((0, 8), (3, 0)) if name != "tilewise" else ():
        codes, scale = QUANTIZERS[name](x.new_empty(shape), torch.int8)
        assert scale.shape == (shape[0], 1)
        assert (scale > 0).all()
        assert codes.shape == shape


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
def test_extreme_rows(value, device):
    x = torch.tensor([[value, 0.0, -value]], device=device)
    codes, scale, _ = quantize_rowwise(x)
    check(x, codes, scale, spec(torch.int8, PerRow()))
    assert scale.isfinite().all()
    check_asymmetric(x)
    check_asymmetric(torch.tensor([[value, 0.0, 1.0]], device=device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_does_not_vanish(device, value):
    x = torch.zeros(3, 40, device=device)
    x[1, 4] = value
    scales = [quantize(x, torch.int8)[1] for quantize in QUANTIZERS.values()]
    for scale in (*scales, quantize_rowwise_asymmetric(x)[1]):
        assert scale.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.parametrize(
    "shape", matrix_but(((5, 33), (0, 8)), ((1, 1), (5, 33), (70, 200), (3, 4100), (0, 8))), ids=str
)
def test_asymmetric_rows(shape, device):
    for dtype in FLOATS:
        for shift in (0.0, 3.0, -1e4):
            x = sample(shape, torch.float32, device) if shape[0] else torch.empty(shape, device=device)
            check_asymmetric((x + shift).to(dtype))


def seed(device, value=1):
    return torch.tensor([value], device=device)


def test_stochastic_rounding(device):
    """Up or down to a neighbour, on average right, the same for the same seed and another for another."""
    x = torch.randn(200, 64, device=device)
    codes, scale, _ = quantize_rowwise(x, seed=seed(device))
    assert torch.equal(scale, quantize_rowwise(x)[1])
    value = x / scale
    assert ((codes - value).abs() < 1).all()
    assert (codes != quantize_rowwise(x)[0]).float().mean() > 0.1
    error = (codes - value).mean().abs()
    assert 0 < error < 5 * (value.numel() / 6) ** -0.5 * 0.5
    assert torch.equal(codes, quantize_rowwise(x, seed=seed(device))[0])
    assert not torch.equal(codes, quantize_rowwise(x, seed=seed(device, 2))[0])
    assert (codes[:, 1:] != codes[:, :-1]).any()
    whole = torch.tensor([[127.0, 3.0, -5.0, 0.0]], device=device)
    assert quantize_rowwise(whole, seed=seed(device))[0].tolist() == [[127, 3, -5, 0]]
    # 0.3 of a step becomes 1 three times in ten.
    x = torch.full((100, 101), 0.3, device=device)
    x[:, 0] = 127
    codes, _, _ = quantize_rowwise(x, seed=seed(device))
    assert abs((codes[:, 1:] == 1).float().mean() - 0.3) < 0.02


def test_ways_and_errors(device):
    """Rows, columns of the transpose and tiles of a row draw the same numbers."""
    x = torch.randn(70, 90, device=device)
    first, *others = (quantize(x, torch.int8, seed=seed(device))[0] for quantize in QUANTIZERS.values())
    assert all(torch.equal(codes, first) for codes in others)
    # Transposed views go to the kernel of columns: the same numbers.
    x = torch.randn(40, 60, device=device)
    for view, kernel in ((x, "triton.quantize_rowwise"), (x.t(), "triton.quantize_columnwise")):
        with record_kernels() as ran:
            codes, scale = cuda_quantize_rowwise(view, torch.int8)
        assert ran == ["cuda_quantize_rowwise", kernel]
        check(view, codes, scale, spec(torch.int8, PerRow()))
    x, long = torch.randn(4, 6, device=device), torch.zeros(1, dtype=torch.int64, device="meta")
    for call, words in (
        (lambda: quantize_rowwise(x[0]), r"quantize_rowwise: x must be a matrix of float32 .* got shape \(6,\)"),
        (lambda: quantize_columnwise(x, torch.uint8), r"are int8, float8_e4m3fn or float8_e5m2, got torch.uint8"),
        (lambda: quantize_rowwise(x, torch.float8_e4m3fn, seed(device)), r"stochastic rounding gives int8, got torch"),
        (lambda: quantize_rowwise(x, seed=torch.zeros(2).int()), r"the seed is one int64, got shape \(2,\) of .*int32"),
        (lambda: quantize_tilewise(x, (3, 2)), r"tiles of 3 x 2 must divide the matrix .* shape \(4, 6\)"),
        (lambda: quantize_rowwise(x, seed=long), r"all tensors must be on one device, got x on .*, seed on meta"),
        (lambda: quantize_rowwise_asymmetric(x.new_ones(1, 16385)), r"at most 16384 elements, got shape \(1, 16385\)"),
    ):
        refuses(words, lambda call=call: call())
