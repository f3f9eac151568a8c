"""The fast path of rowwise quantization equals the primitives bit for bit."""

import pytest
import torch

from qtorch import PerToken, QuantSpec
from qtorch.kernels import quantize_int8_rowwise

SPEC = QuantSpec("int8", PerToken(), quant_min=-127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (64, 128), (0, 16), (3, 0)])
def test_equals_the_primitives(dtype, shape):
    x = (torch.randn(shape) * torch.logspace(-6, 4, max(1, shape[0]))[: shape[0], None]).to(dtype)
    codes, scale = quantize_int8_rowwise(x)
    expected_scale, zero_point = SPEC.choose_qparams(x)
    assert zero_point is None
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, SPEC.quantize(x, scale, None))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
def test_extreme_rows(value):
    x = torch.tensor([[value, 0.0, -value]])
    codes, scale = quantize_int8_rowwise(x)
    assert scale.isfinite().all()
    assert torch.equal(codes, SPEC.quantize(x, *SPEC.choose_qparams(x)))
    assert codes[0, 1] == 0
    if abs(value) > 1e-30:
        assert codes[0].abs().max() == 127


def test_random_rows_use_the_whole_range():
    codes, _ = quantize_int8_rowwise(torch.randn(1000, 50))
    assert (codes.abs().amax(1) == 127).all()
    assert codes.min() == -127
