"""binary_training and int4_training: their equations, what they convert to, and the edges."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import quantize_
from qtorch.kernels import record_kernels
from qtorch.training import binary_training, convert, int4_training


def layer_in(recipe: object, inputs: int = 32, outputs: int = 16) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    quantize_(nn.Sequential(layer), recipe)
    return layer


def test_binary() -> None:
    """The equations at the top of its file."""
    layer, x = layer_in(binary_training(1.5, edge_bits=None)), torch.randn(20, 32, requires_grad=True)
    w = layer.weight.master.detach().clone()
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    w_hat = w.abs().amax(1, keepdim=True) * torch.where(w < 0, -1.0, 1.0)
    x_hat = 1.5 * torch.where(x.detach() < 0, -1.0, 1.0)
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.T)
    torch.testing.assert_close(x.grad, (g @ w_hat) * (x.detach().abs() <= 1.5))
    torch.testing.assert_close(torch.as_tensor(layer.weight.grad), g.T @ x_hat)
    with torch.no_grad():
        trained = layer(x)
        quantize_(layer, convert())
        assert torch.equal(layer(x), trained)
    assert layer.weight.inner_tensors["qdata"].nbytes == 32 * 16 // 8


def test_int4() -> None:
    layer, x = layer_in(int4_training(edge_bits=None)), torch.randn(20, 32).relu().requires_grad_()
    with record_kernels() as kernels:
        y = layer(x)
    assert "int_matmul" in kernels
    scale = x.detach().amax(1, keepdim=True) / 15
    x_hat = (x.detach() / scale).round() * scale
    w = layer.weight.master.detach()
    step = w.abs().amax(1, keepdim=True) / 7
    w_hat = (w / step).round() * step
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.T, rtol=1e-4, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(x.grad, g @ w_hat)
    torch.testing.assert_close(torch.as_tensor(layer.weight.grad), g.T @ x.detach())
    with torch.no_grad():
        trained = layer(x)
        quantize_(layer, convert())
        assert torch.equal(layer(x), trained)
    assert layer.weight.inner_tensors["qdata"].nbytes == 32 * 16 // 2


@pytest.mark.parametrize("recipe", [binary_training(), int4_training()], ids=str)
def test_edges(recipe: object) -> None:
    """The first and the last weight have 8 bits, and so do their activations."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    quantize_(model, recipe)
    forwards = [module.weight.training_spec.output for module in model]
    codes = [(f.lhs.code_range[1] - f.lhs.code_range[0], f.rhs.dtype.bits) for f in forwards]
    inner = 1 if recipe.name == "binary_training" else 4
    assert codes == [(254, 8), *[(2**inner - 1, inner)] * 2, (254, 8)]
    model(torch.randn(3, 8)).sum().backward()
    quantize_(model, convert())
    assert [m.weight.scheme.weight.dtype.bits for m in model] == [8, inner, inner, 8]


def test_binary_learns_a_function_of_signs() -> None:
    torch.manual_seed(0)
    teacher = torch.sign(torch.randn(1, 32))
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    quantize_(model, {"0": binary_training(edge_bits=None), "2": None})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(80):
        x: Tensor = torch.sign(torch.randn(128, 32))
        loss = functional.cross_entropy(model(x), ((x * teacher).sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_errors() -> None:
    with pytest.raises(ValueError, match="bound is positive, got 0"):
        binary_training(0)
