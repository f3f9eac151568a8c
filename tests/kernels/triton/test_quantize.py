"""Rows, columns and tiles quantized by Triton: the bits of the primitives; stochastic rounding: its expectation."""

import pytest
import torch

from qtorch import MappingType, PerBlock, PerRow, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.shared_ops import cuda_quantize_rowwise
from qtorch.kernels.cuda.triton.quantize import (
    quantize_columnwise,
    quantize_rowwise,
    quantize_rowwise_asymmetric,
    quantize_tilewise,
)
from qtorch.primitives import Rounding, ZeroPointDomain

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = [(1, 1), (5, 33), (70, 200), (3, 4100)]


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


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape, codes_dtype, device):
    for dtype in FLOATS:
        x = sample(shape, dtype, device)
        expected_scale, _ = spec(codes_dtype, PerRow()).choose_qparams(x)
        expected = spec(codes_dtype, PerRow()).quantize(x, expected_scale, None)
        for transposed in (False, True):
            with record_kernels() as ran:
                codes, scale, other = quantize_rowwise(x, codes_dtype, transposed=transposed)
            assert ran == ["triton.quantize_rowwise"]
            assert torch.equal(scale, expected_scale)
            assert_same(codes, expected)
            if transposed:
                assert_same(other, expected.t().contiguous())


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 5), (200, 70), (1100, 3)])
def test_columns(shape, codes_dtype, device):
    for dtype in FLOATS:
        x = sample(shape, dtype, device)
        with record_kernels() as ran:
            codes, scale = quantize_columnwise(x, codes_dtype)
        assert ran == ["triton.quantize_columnwise"]
        expected, expected_scale, _ = quantize_rowwise(x.t(), codes_dtype)
        assert torch.equal(scale, expected_scale)
        assert_same(codes, expected)
        assert torch.equal(scale, spec(codes_dtype, PerRow()).choose_qparams(x.t().contiguous())[0])


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
@pytest.mark.parametrize("tile", [(1, 128), (32, 32), (128, 128), (1, 24), (48, 5)])
def test_tiles(tile, codes_dtype, device):
    x = sample((tile[0] * 3, tile[1] * 2), torch.bfloat16, device)
    with record_kernels() as ran:
        codes, scale = quantize_tilewise(x, tile, codes_dtype)
    assert ran == ["triton.quantize_tilewise"]
    wanted = spec(codes_dtype, PerBlock(tile))
    expected_scale, _ = wanted.choose_qparams(x)
    assert torch.equal(scale, expected_scale)
    assert_same(codes, wanted.quantize(x, expected_scale, None))


def test_strides_and_empty_matrices(device):
    x = torch.randn(40, 60, device=device)
    for view in (x.t(), x[::2, 5:37], x[:, ::3]):
        codes, scale, _ = quantize_rowwise(view)
        expected, expected_scale, _ = quantize_rowwise(view.contiguous())
        assert torch.equal(codes, expected)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(quantize_columnwise(view)[0], quantize_columnwise(view.contiguous())[0])
        one_row = (1, view.shape[1])
        assert torch.equal(quantize_tilewise(view, one_row)[0], expected)
    for shape in ((0, 8), (3, 0)):
        codes, scale, other = quantize_rowwise(x.new_empty(shape), transposed=True)
        assert (codes.shape, scale.shape, other.shape) == (shape, (shape[0], 1), shape[::-1])
        assert (scale > 0).all()
        assert quantize_columnwise(x.new_empty(shape))[0].shape == shape[::-1]


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
def test_extreme_rows(value, device):
    x = torch.tensor([[value, 0.0, -value]], device=device)
    codes, scale, _ = quantize_rowwise(x)
    wanted = spec(torch.int8, PerRow())
    assert torch.equal(codes, wanted.quantize(x, *wanted.choose_qparams(x)))
    assert scale.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_does_not_vanish(device, value):
    x = torch.zeros(3, 40, device=device)
    x[1, 4] = value
    for scale in (quantize_rowwise(x)[1], quantize_tilewise(x, (1, 40))[1], quantize_columnwise(x.t())[1]):
        assert scale.isfinite().flatten().tolist() == [True, False, True]


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


def test_stochastic_rounding_does_not_depend_on_the_way(device):
    """Rows, columns of the transpose and tiles of a row draw the same numbers."""
    x = torch.randn(70, 90, device=device)
    expected, _, transposed = quantize_rowwise(x, seed=seed(device), transposed=True)
    assert torch.equal(transposed.t(), expected)
    assert torch.equal(quantize_rowwise(x, seed=seed(device))[0], expected)
    assert torch.equal(quantize_columnwise(x.t(), seed=seed(device))[0], expected)
    assert torch.equal(quantize_tilewise(x, (1, 90), seed=seed(device))[0], expected)


def test_is_an_unbiased_estimate_of_small_values(device):
    """0.3 of a step becomes 1 three times in ten."""
    x = torch.full((100, 101), 0.3, device=device)
    x[:, 0] = 127
    codes, _, _ = quantize_rowwise(x, seed=seed(device))
    assert abs((codes[:, 1:] == 1).float().mean() - 0.3) < 0.02
    assert Rounding.STOCHASTIC is not Rounding.NEAREST_EVEN


def test_errors(device):
    x = torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match=r"quantize_rowwise: x must be a matrix of float32 .* got shape \(6,\)"):
        quantize_rowwise(x[0])
    with pytest.raises(ValueError, match=r"codes are int8, float8_e4m3fn or float8_e5m2, got torch.uint8"):
        quantize_columnwise(x, torch.uint8)
    with pytest.raises(ValueError, match=r"stochastic rounding gives int8, got torch.float8_e4m3fn"):
        quantize_rowwise(x, torch.float8_e4m3fn, seed(device))
    with pytest.raises(ValueError, match=r"the seed is one int64, got shape \(2,\) of torch.int32"):
        quantize_rowwise(x, seed=torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"tiles of 3 x 2 must divide the matrix .* shape \(4, 6\)"):
        quantize_tilewise(x, (3, 2))
    with pytest.raises(ValueError, match=r"all tensors must be on one device, got x on .*, seed on meta"):
        quantize_rowwise(x, seed=torch.zeros(1, dtype=torch.int64, device="meta"))


ASYMMETRIC = QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 8)])
def test_asymmetric_rows(shape, device):
    for dtype in FLOATS:
        for shift in (0.0, 3.0, -1e4):
            x = (sample(shape, torch.float32, device) + shift if shape[0] else torch.empty(shape, device=device)).to(
                dtype
            )
            with record_kernels() as ran:
                codes, scale, zero = quantize_rowwise_asymmetric(x)
            assert ran == ["triton.quantize_rowwise_asymmetric"]
            expected_scale, expected_zero = ASYMMETRIC.choose_qparams(x)
            assert torch.equal(scale, expected_scale)
            assert torch.equal(zero, expected_zero)
            assert torch.equal(codes, ASYMMETRIC.quantize(x, expected_scale, expected_zero))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
def test_extreme_asymmetric_rows(value, device):
    for x in (torch.tensor([[value, 0.0, -value]]), torch.tensor([[value, 0.0, 1.0]])):
        x = x.to(device)
        expected_scale, expected_zero = ASYMMETRIC.choose_qparams(x)
        codes, scale, zero = quantize_rowwise_asymmetric(x)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(zero, expected_zero)
        assert torch.equal(codes, ASYMMETRIC.quantize(x, expected_scale, expected_zero))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_asymmetric_nan_and_errors(device):
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 40, device=device)
        x[1, 4] = value
        assert quantize_rowwise_asymmetric(x)[1].isnan().flatten().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"rows of at most 16384 elements, got shape \(1, 16385\)"):
        quantize_rowwise_asymmetric(torch.ones(1, 16385, device=device))


def test_operator_reads_along_memory(device):
    """Transposed views go to the kernel of columns: the same numbers."""
    x = torch.randn(40, 60, device=device)
    for view, kernel in ((x, "triton.quantize_rowwise"), (x.t(), "triton.quantize_columnwise")):
        with record_kernels() as ran:
            codes, scale = cuda_quantize_rowwise(view, torch.int8)
        assert ran == ["cuda_quantize_rowwise", kernel]
        expected, expected_scale, _ = quantize_rowwise(view)
        assert torch.equal(codes, expected)
        assert torch.equal(scale, expected_scale)
