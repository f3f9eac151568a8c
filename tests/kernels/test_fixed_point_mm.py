"""Weight-only int8 layers without compiled kernels, whose input goes through integer products in fixed point."""

import pytest
import torch

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, QuantSpec
from qtorch.kernels.ops import weight_only_mm
from tests.rounding import EXTRA, assert_same_product, gamma, magnitude

pytestmark = pytest.mark.usefixtures("torch_kernels")


@pytest.fixture(autouse=True)
def products_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of doubles, which are as exact, where the CPU does not multiply bytes."""
    if not qtorch.kernels.features.cpu_has("vnni"):
        monkeypatch.setattr(qtorch.kernels.features, "cpu_has", lambda feature: True)
        exact = lambda a, b: (a.double() @ b.double()).to(torch.int32)  # noqa: E731
        monkeypatch.setattr(weight_only_mm, "int_matmul", exact)


@pytest.fixture(scope="module")
def weight() -> AffineQuantizedTensor:
    return AffineQuantizedTensor.from_float(torch.randn(1030, 1024), LinearSpec(QuantSpec("int8", quant_min=-127)))


def run(x: torch.Tensor, weight: AffineQuantizedTensor) -> tuple[torch.Tensor, bool]:
    """The result, and whether integers were multiplied."""
    with qtorch.kernels.record_kernels() as ran:
        y = torch.nn.functional.linear(x, weight)
    assert ran[:2] == ["linear:weight_only_mm", "weight_only_mm"]
    return y, "fixed_point_mm" in ran


def error(y: torch.Tensor, x: torch.Tensor, weight: AffineQuantizedTensor) -> float:
    """Largest error, relative to what the sums are made of."""
    exact = weight.dequantize().double()
    return float(((y.double() - x.double() @ exact.t()).abs() / magnitude(x, exact)).max())


def left_over(x: torch.Tensor, weight: AffineQuantizedTensor) -> float:
    """Largest error of an input in fixed point: half a unit of the third slice, relative to the sums' magnitude."""
    exact = weight.dequantize().double()
    unit = x.double().abs().amax(1, keepdim=True) / 127 / 254**2
    return float((unit / 2 * exact.abs().sum(1) / magnitude(x, exact)).max())


@pytest.mark.parametrize("rows", [1, 5, 128])
def test_as_exact_as_fp32(rows, weight):
    x = torch.randn(rows, 1024)
    x[-1] *= 1e-6
    y, fixed = run(x, weight)
    assert fixed
    # Sums are exact. The slices are cut with three roundings, then scaled, added and scaled again.
    assert 0 < error(y, x, weight) < left_over(x, weight) + gamma(8)


def test_rows_that_do_not_fit_and_where_it_is_faster(weight):
    x = torch.randn(3, 1024)
    x[1] = 0
    y, fixed = run(x, weight)
    assert fixed
    assert not y[1].any()
    assert y[0].any()
    x = torch.randn(3, 1024)
    x[1, 7] = 1e5
    y, fixed = run(x, weight)
    assert not fixed
    dense = weight.dequantize()
    assert_same_product(y[::2], torch.nn.functional.linear(x[::2], dense), x[::2], dense)
    assert 0 < error(y, x, weight) < gamma(1024 + EXTRA)
    assert not run(torch.randn(129, 1024), weight)[1]
    small = AffineQuantizedTensor.from_float(torch.randn(64, 1024), weight.scheme.spec)
    assert not run(torch.randn(1, 1024), small)[1]
    layer = torch.nn.Linear(1024, 1024)
    qtorch.quantize_(layer, qtorch.int8_weight_only())
    assert weight_only_mm.fixed_point_mm(torch.randn(1, 1024).bfloat16(), layer.weight.qdata) is None


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_are_lost(value, weight):
    """They do not decide how the others are multiplied."""
    x = torch.randn(3, 1024)
    expected = run(x, weight)[0]
    x[1, 7] = value
    y, fixed = run(x, weight)
    assert fixed
    assert torch.equal(y[::2], expected[::2])
    assert not torch.isfinite(y[1]).any()
