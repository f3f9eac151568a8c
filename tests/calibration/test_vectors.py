"""GPTQ and coordinate descent on vectors of four columns."""

import itertools

import pytest
import torch

import qtorch
from qtorch.calibration import auto, calibrated, gptq
from qtorch.calibration.rounding import Descent, Gptq, Grid, Nearest, ScaleRefit
from qtorch.calibration.rounding.gptq import order_of_vectors
from qtorch.calibration.rounding.grid import damped, factor, loss
from qtorch.primitives.vector_spec import ENTRIES, VectorSpec, codebook_arguments, pack_vectors


def spec(granularity=qtorch.primitives.PerRow()):
    return VectorSpec(granularity=granularity, scale_dtype=torch.bfloat16, **codebook_arguments())


def inputs(columns, rows=512):
    """Correlated, and of sizes that differ."""
    mix = torch.randn(columns, columns) * torch.logspace(0, -1, columns)
    return torch.randn(rows, columns) @ mix.t() + 0.1 * torch.randn(rows, columns)


def problem(rows=24, columns=64, granularity=qtorch.primitives.PerRow()):
    weight, x = torch.randn(rows, columns), inputs(columns)
    return weight, (x.t() @ x / len(x)), Grid.of(weight, spec(granularity), torch.float32)


def total(weight, moment, grid, damping=0.01):
    return float(loss(weight - grid.values(), damped(moment, damping)).sum())


@pytest.mark.parametrize("granularity", [qtorch.primitives.PerRow(), qtorch.primitives.PerGroup(16)], ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_each_step_is_no_worse(act_order, granularity):
    weight, moment, grid = problem(granularity=granularity)
    nearest = total(weight, moment, grid)
    Gptq(act_order=act_order).round(weight, moment, grid)
    losses = [nearest, total(weight, moment, grid)]
    for step in (Descent(), ScaleRefit(), Descent()):
        grid = step.refine(weight, damped(moment, 0.01), grid)
        losses.append(total(weight, moment, grid))
    assert losses[1] < 0.6 * losses[0]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(losses[1:]))
    assert losses[-1] < 0.9 * losses[1]
    pack_vectors(grid.codes)  # all are entries


def test_equals_the_definition():
    """Vector by vector: the best entry given all before, the rest of the weight at its optimum, by brute force."""
    weight, moment, grid = problem(rows=3, columns=12)
    damping = Gptq(act_order=False, block_size=8).round(weight, moment, grid)
    h, scale = damped(moment, damping).double(), grid.scale.double()
    entries, found = ENTRIES.double(), []
    rest = weight.double()
    for start in range(0, 12, 4):
        own, behind = slice(start, start + 4), slice(start + 4, 12)
        inverse = torch.linalg.inv(h[start:, start:])
        metric = torch.linalg.inv(inverse[:4, :4])
        apart = rest[:, own].unsqueeze(1) - scale.unsqueeze(2) * entries
        best = torch.einsum("nei,ij,nej->ne", apart, metric, apart).argmin(1)
        error = apart[torch.arange(3), best]
        rest[:, behind] -= error @ metric @ inverse[:4, 4:]
        found.append(ENTRIES[best])
    assert torch.equal(grid.codes, torch.cat(found, 1))


def test_inputs_without_correlation_round_to_nearest():
    weight, _, grid = problem()
    nearest = grid.codes.clone()
    Gptq().round(weight, torch.eye(64), grid)
    assert torch.equal(grid.codes, nearest)
    assert torch.equal(Descent().refine(weight, torch.eye(64), grid).codes, nearest)


def test_descent_finds_what_no_single_vector_improves():
    weight, moment, grid = problem(rows=4, columns=16)
    moment = damped(moment, 0.01)
    grid = Descent(sweeps=50).refine(weight, moment, grid)
    best = float(loss(weight - grid.values(), moment).sum())
    for row in range(4):
        for start in range(0, 16, 4):
            values = grid.values().expand(256, 4, 16).clone()
            values[:, row, start : start + 4] = ENTRIES * grid.scale[row].float()
            others = torch.stack([loss(weight - each, moment).sum() for each in values])
            assert others.min() >= best * (1 - 1e-5)


def test_order_keeps_vectors_whole():
    order = order_of_vectors(torch.diag(torch.rand(32)), True).view(-1, 4)
    assert torch.equal(order, order[:, :1] // 4 * 4 + torch.arange(4))
    assert sorted(order.flatten().tolist()) == list(range(32))
    assert factor(torch.eye(8), 0.0)[1] == 0.0


def test_two_bits_of_vectors_lose_less_than_three_of_integers():
    """2.06 bits a weight against 3.25, with scales and zero points, by the same algorithms on the same data."""
    x = inputs(128, 1024)
    batches, fresh = [x[:768]], x[768:]
    weight = torch.randn(64, 128)

    def error(recipe) -> float:
        model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False))
        model[0].weight.data = weight.clone()
        wanted = model(fresh)
        qtorch.quantize_(model, recipe)
        return float((model(fresh) - wanted).square().mean() / wanted.square().mean())

    vectors, integers = qtorch.vector_codebook_weight_only(), qtorch.uintx_weight_only("uint2", group_size=32)
    rounded = error(calibrated(vectors, batches, target=None, rounding=Nearest()))
    by_gptq, by_auto = error(gptq(vectors, batches)), error(auto(vectors, batches))
    assert by_auto < by_gptq < rounded
    assert by_gptq < error(gptq(integers, batches))
    assert 0.001 < by_auto < error(auto(integers, batches))
