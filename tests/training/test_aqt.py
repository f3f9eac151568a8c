"""AQT in the engine: the example of its README, operands that are balanced or folded, clipped gradients, accumulators.

`aqt_readme.json` has what aqtp 0.9.0 computes: the parameters of the example, its outputs, and the gradients of the sum
of their squares, rounded to nearest. The README shows the same outputs with seven digits.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtorch import PerAxis, PerGroup, QuantSpec, compute_error, quantize_, training
from qtorch.kernels import record_kernels
from qtorch.primitives import AbsMaxRule, Noise, Rounding, from_json, to_json
from qtorch.training import GemmSpec, TrainingSpec, convert, fully_quantized, integer, mixed_precision_training
from qtorch.training.engine.contraction import balanced, contraction
from tests.refusals import refuses

README: Any = json.loads((Path(__file__).parent / "aqt_readme.json").read_text())

README_INT8 = [
    [0.7030779, 1.5099456, -2.6334763, -1.7550919],
    [-0.00901393, 0.08774488, -1.5644912, -0.3728472],
    [0.40121436, 1.189411, -0.6939189, -0.48000643],
]
README_MATMUL = [
    [3.5998788, 5.8562713, 1.9385538, 4.7426414, 1.9792401],
    [4.321886, 0.99681264, 2.737299, 4.3591022, 3.6352503],
    [-0.07714217, 2.7415617, -0.35343346, 0.20568734, -1.1974115],
]


def gen_matrix(rows: int, columns: int) -> torch.Tensor:
    """As the README has it."""
    return torch.tensor(np.random.RandomState(0).normal(size=(rows, columns)), dtype=torch.float32)


def test_the_readme_noise_and_lost_tokens() -> None:
    y = training.quantized_matmul(gen_matrix(3, 4), gen_matrix(4, 5), fully_quantized(8, 8))
    torch.testing.assert_close(y, torch.tensor(README_MATMUL), rtol=1e-6, atol=1e-6)
    # Random numbers that all rows share: rows that are equal round alike.
    noisy = integer(4, rounding=Rounding.STOCHASTIC, noise=Noise(shared_axes=(0,), bits=16))
    spec = TrainingSpec(GemmSpec(), GemmSpec(noisy, integer(8)))
    x, w = torch.randn(6, 32, requires_grad=True), torch.randn(48, 32)
    contraction(x, w, spec).backward(torch.randn(1, 48).expand(6, 48))
    assert torch.equal(x.grad, x.grad[:1].expand(6, 32))
    side = replace(integer(4, preserve_zero=False), granularity=PerGroup(32))
    spec = TrainingSpec(GemmSpec(side, side), GemmSpec(), GemmSpec(side, side))
    x, w = torch.randn(33, 64), torch.randn(48, 64, requires_grad=True)
    y = contraction(x, w, spec)  # 64 features are whole blocks
    refuses(r"midrise4 has no code for zero, so the contracted axis, of 33 elements", lambda: y.sum().backward())
    x, w = torch.randn(5, 32), torch.randn(8, 32)
    spec = TrainingSpec(GemmSpec(integer(8), integer(8), mid_alpha=(0.5, 0.5)))
    wanted = contraction(x[1:], w, spec)
    x[0, 3] = torch.nan
    y = contraction(x, w, spec)
    assert y[0].isnan().all()
    assert torch.equal(y[1:], wanted)


def test_the_mlp_of_the_readme() -> None:
    """Bit widths and `preserve_max_val` as `config.fully_quantized` sets them; gradients as well."""
    spec = fully_quantized(8, 8, preserve_max_val=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16, bias=False), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    for layer, kernel in zip((model[0], model[2]), README["kernels"], strict=True):
        layer.weight.data = torch.tensor(kernel).t().contiguous()
    x = gen_matrix(3, 4)
    torch.testing.assert_close(model(x), torch.tensor(README["float"]), rtol=1e-6, atol=1e-6)
    quantize_(model, mixed_precision_training(spec))
    y = model(x)
    torch.testing.assert_close(y, torch.tensor(README["int8"]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y, torch.tensor(README_INT8), rtol=1e-6, atol=1e-6)
    y.square().sum().backward()
    for layer, wanted in zip((model[0], model[2]), README["gradients"], strict=True):
        torch.testing.assert_close(torch.as_tensor(layer.weight.grad), torch.tensor(wanted).t(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        trained = model(x)
        quantize_(model, convert())
        assert torch.equal(model(x), trained)


BITS = [1, 2, 3, 4, 8, 12, 16, 22]


@pytest.mark.parametrize("preserve_zero", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_products_of_every_width(bits: int, preserve_zero: bool) -> None:
    """Against fp64 on the values of the codes, forward and both gradients; 6 dB a bit from the float product."""
    if bits == 1 and preserve_zero:
        return
    side = integer(bits, preserve_zero=preserve_zero, preserve_max_val=False)
    spec = TrainingSpec(GemmSpec(side, side), GemmSpec(side, side), GemmSpec(side, side))
    assert from_json(to_json(spec)) == spec
    x, w, g = torch.randn(33, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(33, 48)
    y = contraction(x, w, spec)
    y.backward(g)
    fake = side.fake_quantize
    wanted = (
        (y, fake(x).double() @ fake(w).double().t(), x @ w.t()),
        (x.grad, fake(g).double() @ fake(w.t().contiguous()).double().t(), g @ w),
        (w.grad, fake(g.t().contiguous()).double() @ fake(x.t().contiguous()).double().t(), g.t() @ x),
    )
    for got, exact, floats in wanted:
        assert compute_error(exact, got.double()) > 110
        lowest = 6 * bits - 10
        assert min(lowest, 90) < compute_error(floats.double(), got.double()) < 6.1 * bits + 12 or bits > 16


@pytest.mark.parametrize("bits", [1, 4])
def test_half_integers_convert(bits: int) -> None:
    """Codes at their true size, one bit in one bit; the converted layer computes the same numbers."""
    layer = torch.nn.Linear(64, 32)
    quantize_(layer, mixed_precision_training(fully_quantized(1, 8) if bits == 1 else _half_integers(bits)))
    x = torch.randn(5, 64)
    with torch.no_grad():
        trained = layer(x)
        quantize_(layer, convert())
        with record_kernels() as kernels:
            assert torch.equal(layer(x), trained)
    assert kernels[0] == "linear:emulated_scaled_mm"
    assert layer.weight.inner_tensors["qdata"].nbytes == 64 * 32 * bits // 8


def _half_integers(bits: int) -> TrainingSpec:
    side = integer(bits, preserve_zero=False)
    return TrainingSpec(GemmSpec(side, side))


# --- mid_quant ---
@pytest.mark.parametrize("alphas", [(0.5, 0.5), (1.0, 0.0), (0.25, 0.75)])
def test_balanced_operands(alphas: tuple[float, float]) -> None:
    """The product is the same, the maxima along the contracted axis are shared."""
    x, w = torch.randn(20, 32), torch.randn(24, 32)
    x[:, 3] *= 100
    x[:, 5] = 0
    a, b = balanced(x.double(), w.double(), alphas)
    torch.testing.assert_close(a @ b.t(), x.double() @ w.double().t(), rtol=1e-6, atol=1e-6)
    other = [i for i in range(32) if i != 5]
    factor = x.abs().amax(0) ** alphas[0] / w.abs().amax(0) ** alphas[1]
    torch.testing.assert_close((x / a)[0, other].float(), factor[other], rtol=1e-5, atol=0)
    exact = x.double() @ w.double().t()
    gemm = GemmSpec(integer(8), integer(8))
    plain = compute_error(exact, contraction(x, w, TrainingSpec(gemm)).double())
    better = compute_error(exact, contraction(x, w, TrainingSpec(replace(gemm, mid_alpha=alphas))).double())
    assert plain < better < 60


def test_balanced_folded_and_clipped_gradients() -> None:
    gemm = GemmSpec(integer(8), integer(8), mid_alpha=(0.5, 0.5))
    spec = TrainingSpec(gemm, gemm, gemm)
    x, w, g = torch.randn(33, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(33, 48)
    contraction(x, w, spec).backward(g)
    for got, lhs, rhs in ((x.grad, g, w.detach().t()), (w.grad, g.t(), x.detach().t())):
        a, b = (integer(8).fake_quantize(side.contiguous()).double() for side in balanced(lhs, rhs, (0.5, 0.5)))
        assert compute_error(a @ b.t(), got.double()) > 110
        assert 30 < compute_error((lhs @ rhs.t()).double(), got.double()) < 60
    gemm = GemmSpec(integer(8), integer(8, PerAxis(1)), fold="rhs")
    x, w, g = torch.randn(33, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(33, 48)
    contraction(x, w, TrainingSpec(GemmSpec(), gemm, gemm)).backward(g)
    for got, exact in ((x.grad, g @ w), (w.grad, g.t() @ x)):
        assert 30 < compute_error(exact.double(), got.double()) < 60
    clipping = QuantSpec("int4", quant_min=-7, scale_rule=AbsMaxRule(0.5))
    spec = TrainingSpec(GemmSpec(clipping, clipping), clip_gradient=True)
    x, w, g = torch.randn(9, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True), torch.randn(9, 8)
    contraction(x, w, spec).backward(g)
    for tensor, exact in ((x, g @ w), (w, g.t() @ x)):
        scale, _ = clipping.choose_qparams(tensor.detach())
        inside = (tensor.detach() / scale).round().abs() <= 7
        assert 0 < inside.float().mean() < 1
        torch.testing.assert_close(tensor.grad, torch.where(inside, exact, 0).detach())
    x2, w2 = x.detach().requires_grad_(), w.detach().requires_grad_()
    contraction(x2, w2, replace(spec, clip_gradient=False)).backward(g)
    torch.testing.assert_close(x2.grad, (g @ w).detach())


# --- the scale of one operand in the other one ---
@pytest.mark.parametrize("fold", ["lhs", "rhs"])
def test_folded_scales(fold: str) -> None:
    """A scale for each contracted index (AQT: REMAINING_AXIS, OTHER_INPUT)."""
    of_index, of_row = integer(8, PerAxis(1)), integer(8)
    gemm = GemmSpec(of_index, of_row, fold="lhs") if fold == "lhs" else GemmSpec(of_row, of_index, fold="rhs")
    x, w = torch.randn(20, 32), torch.randn(24, 32)
    y = contraction(x, w, TrainingSpec(gemm))
    folded, other = (x, w) if fold == "lhs" else (w, x)
    scale, _ = of_index.choose_qparams(folded)
    codes = of_index.quantize(folded, scale, None).double()
    other = of_row.fake_quantize(other * scale).double()
    exact = codes @ other.t() if fold == "lhs" else other @ codes.t()
    assert compute_error(exact, y.double()) > 110
    assert 30 < compute_error((x @ w.t()).double(), y.double()) < 60
    with record_kernels() as kernels:
        contraction(x, w, TrainingSpec(gemm))
    assert not any("weight_only" in kernel for kernel in kernels)


def test_what_does_not_convert_and_accumulators() -> None:
    layer = torch.nn.Linear(64, 32)
    spec = TrainingSpec(GemmSpec(integer(8), integer(8), mid_alpha=(0.5, 0.5)))
    quantize_(layer, mixed_precision_training(spec))
    layer(torch.randn(2, 64)).sum().backward()
    refuses(r"varies by call \(GemmSpec.fold, mid_alpha, hadamard\)", lambda: quantize_(layer, convert()))
    four = GemmSpec(integer(4), integer(4), accumulator_dtype=torch.int16)
    wide = replace(four, accumulator_dtype=torch.int32)
    x, w = torch.randn(6, 668), torch.randn(7, 668)
    assert torch.equal(contraction(x, w, TrainingSpec(four)), contraction(x, w, TrainingSpec(wide)))
    with pytest.raises(ValueError, match=r"int16 holds sums of 668 products of these codes, this one has 669"):
        contraction(torch.randn(6, 669), torch.randn(7, 669), TrainingSpec(four))
