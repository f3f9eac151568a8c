"""QGaLoreAdamW8bit: the subspace, when it is computed anew, and training of weights in INT8."""

import itertools
from typing import Any

import pytest
import torch

from qtorch import quantize_
from qtorch.dtypes.blocked_tensor import BlockedTensor
from qtorch.training import AdamW8bit, CodesWeight, QGaLoreAdamW8bit, int8_weight_only_quantized_training
from qtorch.training.optim.qgalore import orthonormal, rotated, stored, top_directions
from tests.training.small_model import cosine, make_model, parameters_of, train


def basis(rank: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, rank, generator=generator))[0].T.contiguous()


def test_directions_and_updates() -> None:
    grad = torch.randn(60, 40) @ torch.diag(torch.linspace(3, 0.1, 40))
    found = top_directions(grad.T @ grad, 5)
    expected = torch.linalg.svd(grad).Vh[:5]
    assert torch.allclose((found * expected).sum(1).abs(), torch.ones(5), atol=1e-4)
    for _ in range(30):  # units that are dead, whose directions fp32 does not find
        some = torch.randn(256, 128) * (torch.rand(128) < 0.2)
        dead = top_directions(some.T @ some, 32)
        torch.testing.assert_close(dead @ dead.T, torch.eye(32), rtol=0, atol=1e-5)
    exact = basis(8, 100)
    held = stored(exact)
    raw, found = held.dequantize(), orthonormal(held)
    assert (raw @ raw.T - torch.eye(8)).abs().max() > 1e-2
    torch.testing.assert_close(found @ found.T, torch.eye(8), rtol=0, atol=1e-5)
    cosine_of_first = (found[0] @ raw[0]) / raw[0].norm()
    assert cosine_of_first == pytest.approx(1, abs=1e-5)
    # With scale 1 and all directions of the gradient, the first update has Adam's size along each.
    weight = torch.nn.Parameter(torch.zeros(80, 64))
    optimizer = QGaLoreAdamW8bit([weight], lr=1e-2, rank=1, scale=1.0, weight_decay=0)
    left, right = torch.randn(80, 1), torch.randn(1, 64)
    weight.grad = left @ right
    optimizer.step()
    expected = -1e-2 * left.sign() @ (right / right.norm())
    assert (weight.detach() - expected).norm() <= 0.15 * expected.norm()


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_stored_in_4_bits(offset: float) -> None:
    """Also where all values of a block have one sign, at the full resolution."""
    values = basis(8, 128) + offset
    held = stored(values)
    assert held.nbytes <= values.numel() * 0.6
    step = (values.amax() - values.amin()) / 15
    error = (held.dequantize() - values).abs().max()
    assert 0 < error <= step * 0.51


def test_moments_turn_and_arguments() -> None:
    """A gradient that lies in both subspaces has one mean in both."""
    old, turn = basis(6, 50), torch.linalg.qr(torch.randn(6, 6))[0]
    new, gradient = turn @ old, torch.randn(10, 6) @ old
    torch.testing.assert_close(rotated(gradient @ old.T, False, old, new), gradient @ new.T, rtol=1e-4, atol=1e-5)
    same = (gradient @ old.T).square()
    torch.testing.assert_close(rotated(same, True, old, old), same, rtol=1e-4, atol=1e-5)
    assert (rotated(same, True, old, new) >= 0).all()
    for name in ("update_proj_gap", "queue_size", "gamma_proj", "rank"):
        with pytest.raises(ValueError, match=f"{name} is at least 1"):
            QGaLoreAdamW8bit([torch.nn.Parameter(torch.ones(8, 8))], **{name: 0})
    model = make_model()
    before = parameters_of(model)
    optimizer = QGaLoreAdamW8bit(model.parameters(), rank=64)
    train(model, optimizer, range(1))
    assert all("projector" not in state for state in optimizer.state.values()), "64 is a whole side"
    assert not any(map(torch.equal, before, parameters_of(model)))


def groups(model: torch.nn.Module, rank: int = 16, **more: Any) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices, "rank": rank, **more}, {"params": [p for p in model.parameters() if p.dim() != 2]}]


def test_states_and_int8() -> None:
    model = make_model()
    optimizer = QGaLoreAdamW8bit(groups(model, 40, update_proj_gap=2), lr=1e-2)
    train(model, optimizer, range(3))
    tall, wide = model[0].weight, model[2].weight
    assert optimizer.state[tall]["exp_avg"].shape == (130, 40)
    assert optimizer.state[tall]["projector"].shape == (40, 64)
    assert optimizer.state[wide]["exp_avg"].shape == (130, 40), "the long side is not projected"
    for state in optimizer.state.values():
        assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert isinstance(optimizer.state[tall]["exp_avg"], BlockedTensor)
    assert not isinstance(optimizer.state[model[0].bias]["exp_avg"], BlockedTensor)
    assert "projector" not in optimizer.state[model[0].bias]
    reference = torch.optim.AdamW([tall])
    reference.step()
    held = sum(t.nbytes for name, t in optimizer.state[tall].items() if isinstance(t, BlockedTensor))
    assert held < 8 * tall.numel() / 4
    losses = {}
    for name, make in {
        "AdamW8bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2),
        "Q-GaLore": lambda model: QGaLoreAdamW8bit(groups(model, 32, update_proj_gap=10, scale=1.0), lr=1e-2),
    }.items():
        model = make_model()
        quantize_(model, int8_weight_only_quantized_training())
        assert isinstance(model[0].weight, CodesWeight)
        optimizer = make(model)
        first = train(model, optimizer, range(1))
        losses[name] = train(model, optimizer, range(1, 120), cosine(optimizer, 120))
        assert losses[name] < 0.5 * first
    assert losses["Q-GaLore"] < 1.3 * losses["AdamW8bit"]


def test_gaps() -> None:
    """The same gradient each time: the direction stays, whatever its sign, and the gap doubles with a full queue."""
    weight = torch.nn.Parameter(torch.randn(64, 80))
    optimizer = QGaLoreAdamW8bit([{"params": [weight], "rank": 4}], update_proj_gap=2, queue_size=3)
    grad = torch.randn(64, 1) @ torch.randn(1, 80) + 0.01 * torch.randn(64, 80)
    seen = []
    for step in range(20):
        weight.grad = grad * (-1) ** step
        optimizer.step()
        state = optimizer.state[weight]
        seen.append((step + 1, int(state["gap"]), len(state["similarity"])))
    changes = [b for a, b in itertools.pairwise(seen) if a[1:] != b[1:]]
    # Projections at steps 1, 3, 5, 7 (the third comparison: the gap is 4, the queue empty), 11, 15, 19.
    assert changes == [(3, 2, 1), (5, 2, 2), (7, 4, 0), (11, 4, 1), (15, 4, 2), (19, 8, 0)]
    weight = torch.nn.Parameter(torch.randn(64, 80))
    optimizer = QGaLoreAdamW8bit([weight], rank=4, update_proj_gap=1, queue_size=3)
    for _ in range(12):
        weight.grad = torch.randn(64, 80)
        optimizer.step()
    assert optimizer.state[weight]["gap"] == 1
    assert len(optimizer.state[weight]["similarity"]) == 3
