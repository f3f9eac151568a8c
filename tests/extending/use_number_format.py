"""What docs/extending/number_format.md promises, with its file loaded by `test_pages.py`."""

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from my_format import FLOAT7, RootMeanSquareRule, float7_weight_only

import qtorch
from qtorch.primitives import MinMaxRule, qdtype
from tests.extending.pages import layers, reloaded


def test_the_format() -> None:
    assert qdtype("float7_e3m3") is FLOAT7 is pickle.loads(pickle.dumps(FLOAT7)) is copy.deepcopy(FLOAT7)
    assert (FLOAT7.bits, FLOAT7.quant_min, FLOAT7.quant_max) == (7, -30.0, 30.0)
    values = FLOAT7.decode(torch.arange(128, dtype=torch.uint8))
    assert values[:10].tolist() == [0, 1 / 32, 2 / 32, 3 / 32, 4 / 32, 5 / 32, 6 / 32, 7 / 32, 0.25, 0.28125]
    assert (float(values.min()), float(values.max())) == (-30.0, 30.0)
    assert FLOAT7.decode(FLOAT7.encode(torch.tensor([100.0, -0.26, 0.0]))).tolist() == [30.0, -0.25, 0.0]


def test_it_is_as_precise_as_float8() -> None:
    x = torch.randn(64, 128)
    errors = {
        name: qtorch.compute_error(x, qtorch.QuantSpec(name, qtorch.PerRow()).fake_quantize(x))
        for name in ("float6_e3m2", "float7_e3m3", "float8_e4m3fn")
    }
    assert abs(errors["float7_e3m3"] - errors["float8_e4m3fn"]) < 1
    assert 5 < errors["float7_e3m3"] - errors["float6_e3m2"] < 7


def test_the_rule() -> None:
    x = torch.randn(4, 64)
    x[1] = 0
    x[2, 5] = math.nan
    x[3] *= 1e30
    spec = qtorch.QuantSpec("float7_e3m3", scale_rule=RootMeanSquareRule(2.0))
    low, high = RootMeanSquareRule(2.0).min_max(x, spec)
    assert torch.equal(low[[0, 1, 3]], -high[[0, 1, 3]])
    wanted = 2 * x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(high.double(), wanted, equal_nan=True)
    scale, _ = spec.choose_qparams(x)
    assert scale.isnan().flatten().tolist() == [False, False, True, False]
    # A scale is the range over the bounds of the format.
    assert scale[0].item() == pytest.approx(high[0].item() / 30)
    with pytest.raises(ValueError, match="sigmas is positive"):
        RootMeanSquareRule(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_quantized_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    in_float, quantized = layers(float7_weight_only(), 128, 48, dtype)
    x = torch.randn(5, 128, dtype=dtype)
    with qtorch.kernels.record_kernels() as ran:
        y = quantized(x)
    assert ran[0] == "linear:packed_weight_mm"
    (explained,) = qtorch.explain(quantized, x)
    assert explained.kernel == "packed_weight_mm"
    expected = qtorch.kernels.linear.reference.linear(x, quantized.weight, quantized.bias)
    assert qtorch.compute_error(expected, y) > (105 if dtype == torch.float32 else 38)
    assert 26 < qtorch.compute_error(in_float(x), y) < 38
    assert quantized.weight.nbytes == 48 * 128 * 7 // 8 + 48 * 2 * dtype.itemsize

    loaded = reloaded(quantized, tmp_path)
    assert loaded.weight.scheme.weight.dtype is FLOAT7
    assert loaded.weight.scheme.weight.scale_rule == RootMeanSquareRule()
    assert torch.equal(loaded(x), y)


def test_an_outlier_clips_and_the_others_keep_their_precision() -> None:
    x = torch.randn(8, 256)
    x[:, 0] = 1000.0
    recipe = float7_weight_only(256)
    clipped, whole = recipe.apply(x), float7_weight_only(256, MinMaxRule()).apply(x)
    error = [qtorch.compute_error(x[:, 1:], w.dequantize()[:, 1:]) for w in (clipped, whole)]
    assert error[0] > error[1] + 3


def test_training_in_the_new_format() -> None:
    spec = qtorch.QuantSpec(FLOAT7, qtorch.PerRow(), zero_point_domain=qtorch.ZeroPointDomain.NONE)
    gemm = qtorch.training.GemmSpec(spec, spec)
    layer = torch.nn.Linear(64, 32)
    qtorch.quantize_(layer, qtorch.training.mixed_precision_training(qtorch.training.TrainingSpec(gemm, gemm, gemm)))
    x = torch.randn(40, 64, requires_grad=True)
    layer(x).square().sum().backward()
    exact = 2 * (x @ layer.weight.master.t() + layer.bias)
    assert 22 < qtorch.compute_error(exact.detach().t() @ x.detach(), layer.weight.grad) < 40
    assert 22 < qtorch.compute_error((exact @ layer.weight.master).detach(), x.grad) < 40
