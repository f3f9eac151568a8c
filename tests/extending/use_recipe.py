"""What docs/extending/recipe.md promises, with its file loaded by `test_pages.py`."""

from pathlib import Path

import pytest
import torch
from my_recipe import int6_weight_training, int8_dynamic_activation_int6_weight

import qtorch
from tests.extending.pages import layers, reloaded


@pytest.mark.parametrize("group_size", [64, 32, -1])
@torch.no_grad()
def test_inference(group_size: int, tmp_path: Path) -> None:
    in_float, quantized = layers(int8_dynamic_activation_int6_weight(group_size), 128, 48)
    x = torch.randn(7, 128)
    with qtorch.kernels.record_kernels() as ran:
        y = quantized(x)
    (explained,) = qtorch.explain(quantized, x)
    assert ran[0] == f"linear:{explained.kernel}"
    assert explained.kernel in ("cpu_int8_mm", "packed_int8_scaled_mm", "cuda_int8_mm")
    # Integers are summed exactly: the same bits as the reference.
    assert torch.equal(y, qtorch.kernels.linear.reference.linear(x, quantized.weight, quantized.bias))
    assert 27 < qtorch.compute_error(in_float(x), y) < 40
    assert quantized.weight.nbytes == 48 * 128 * 6 // 8 + 4 * 48 * (1 if group_size == -1 else 128 // group_size)

    assert torch.equal(reloaded(quantized, tmp_path)(x), y)


def test_training_by_hand() -> None:
    """The three products, from the fake-quantized operands."""
    _, layer = layers(int6_weight_training(), 128, 48)
    spec = int6_weight_training().training_spec()
    x, g = torch.randn(9, 128, requires_grad=True), torch.randn(9, 48)
    y = layer(x)
    y.backward(g)
    master = layer.weight.master.detach()
    x_hat, w_hat = spec.output.lhs.fake_quantize(x.detach()), spec.output.rhs.fake_quantize(master)
    assert qtorch.compute_error(x_hat @ w_hat.t() + layer.bias, y) > 110
    assert qtorch.compute_error(g.t() @ x.detach(), layer.weight.grad) > 110, "in full precision"
    # The scales of the forward's weight are multiplied into g before g is quantized.
    scale = spec.output.rhs.choose_qparams(master)[0]
    codes = w_hat / scale
    assert qtorch.compute_error(spec.grad_input.lhs.fake_quantize(g * scale.t()) @ codes, x.grad) > 100
    assert 27 < qtorch.compute_error(g @ w_hat, x.grad) < 60


def test_it_learns_and_converts_without_loss() -> None:
    x = torch.randn(256, 64)
    wanted = x.roll(1, 1)
    model = torch.nn.Linear(64, 64)
    qtorch.quantize_(model, int6_weight_training())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        losses.append(torch.nn.functional.mse_loss(model(x), wanted))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 20
    trained = model(x)
    qtorch.quantize_(model, qtorch.training.convert())
    assert qtorch.compute_error(trained, model(x)) > 110
    served = int8_dynamic_activation_int6_weight(group_size=-1).linear_spec()
    assert model.weight.scheme.spec == served
