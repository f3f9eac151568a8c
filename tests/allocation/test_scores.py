"""A score is the quadratic form it says it is, whatever way the model multiplies; its sum predicts the divergence."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import gptq
from qtorch.calibration.allocation.items import Item, find_items
from qtorch.calibration.allocation.scores import Rows, Scores, score_weights
from qtorch.calibration.data import Data
from qtorch.calibration.rounding import Gptq, Grid
from tests.calibration.test_in_order import ByGroupedMm, Experts

INT2, INT4 = (qtorch.intx_weight_only(f"int{bits}", 8) for bits in (2, 4))


def batches(*shape: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def scores_of(
    model: nn.Module, data: list, names: dict | None = None, **options: object
) -> tuple[list[Item], list[Scores]]:
    items = find_items(model, names or [INT2, INT4, None], None)
    return items, score_weights(items, model, Data(data), **options)  # type: ignore[arg-type]


def form(error: Tensor, moment: Tensor, importance: Tensor) -> float:
    """1/2 tr(G D H D^T), written out."""
    return float(torch.trace(torch.diag(importance) @ error @ moment @ error.t())) / 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_without_gradients_it_is_the_relative_error_of_the_output_of_the_layer() -> None:
    model, data = Mlp(), batches(5, 16)
    items, found = scores_of(model, data, gradients=False)
    x = torch.cat(data)
    inputs = {"a": x, "b": torch.tanh(model.a(x)).detach()}
    for item, scores in zip(items, found):
        weight, rows = item.matrix, inputs[item.name]
        for candidate, value in zip((INT2, INT4), scores.values):
            error = weight - candidate.apply(weight).dequantize()
            direct = (rows @ error.t()).square().sum() / (rows @ weight.t()).square().sum() / 2
            moment, ones = rows.t() @ rows / len(rows), torch.ones(len(weight))
            assert value == pytest.approx(form(error, moment, ones) / form(weight, moment, ones) / 2, rel=1e-4)
            assert value == pytest.approx(float(direct), rel=1e-4)
        assert 0 == scores.values[2] < scores.values[1] < scores.values[0]
        assert scores.tokens == 15


def test_with_gradients_rows_have_the_weight_of_their_gradients() -> None:
    """Against autograd's own gradients of the outputs of both layers."""
    model, data = Mlp(), batches(5, 16)
    loss = lambda output, batch: (output**3).sum()  # noqa: E731
    items, found = scores_of(model, data, loss=loss)
    x = torch.cat(data)
    before = model.a(x).detach().requires_grad_()
    hidden = torch.tanh(before)
    after = model.b(hidden)
    gradients = dict(zip("ab", torch.autograd.grad(loss(after, None), (before, after))))
    inputs = {"a": x, "b": hidden.detach()}
    for item, scores in zip(items, found):
        rows, importance = inputs[item.name], gradients[item.name].square().sum(0) / len(x)
        error = item.matrix - INT2.apply(item.matrix).dequantize()
        assert scores.values[0] == pytest.approx(form(error, rows.t() @ rows / len(x), importance), rel=1e-4)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.training


def test_rounding_by_gptq_and_quantized_activations() -> None:
    model, data = Mlp(), batches(40, 16)
    items, found = scores_of(model, data, gradients=False, rounding=gptq())
    _, nearest = scores_of(model, data, gradients=False)
    x = torch.cat(data)
    moment = x.t() @ x / len(x)
    grid = Grid.of(items[0].matrix, INT2.linear_spec().weight, torch.float32)
    Gptq().round(items[0].matrix, moment, grid)
    error = items[0].matrix - grid.values()
    ones = torch.ones(24)
    size = 2 * form(items[0].matrix, moment, ones)
    assert found[0].values[0] == pytest.approx(form(error, moment, ones) / size, rel=1e-3)
    assert all(0 < a.values[0] < b.values[0] for a, b in zip(found, nearest))
    model, data = Mlp(), batches(50, 16)
    both, weight_only = qtorch.int8_dynamic_activation_int8_weight(), qtorch.int8_weight_only()
    static = qtorch.int8_static_activation_int8_weight(4 / 127)
    items, found = scores_of(model, data, {"a": [weight_only, both, static]}, gradients=False)
    for candidate, value in zip(items[0].candidates, found[0].values):
        quantized = copy.deepcopy(model)
        qtorch.quantize_(quantized, {"a": candidate})
        x = torch.cat(data)
        direct = (model.a(x) - quantized.a(x)).detach().square().sum() / 2
        direct /= nn.functional.linear(x, items[0].matrix).square().sum()
        # Errors of weight and input are taken as uncorrelated.
        assert value == pytest.approx(float(direct), rel=0.1)
    assert found[0].values[1] > 1.2 * found[0].values[0]


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))


class ByMatmul(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class FromTheLeft(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.t()).t()


class ByAddmm(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(torch.ones(self.weight.shape[0]), x, self.weight.t())


class ByLinear(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("kind", [ByMatmul, FromTheLeft, ByAddmm])
def test_other_products_than_linear_layers(kind: Callable[..., nn.Module]) -> None:
    model = kind(24, 16)
    same = ByLinear(24, 16)
    same.weight = model.weight
    found = [scores_of(each, batches(7, 16), {"weight": [INT2, INT4]})[1][0] for each in (model, same)]
    assert found[0].values == pytest.approx(found[1].values, rel=1e-4)
    assert found[0].tokens == found[1].tokens == 21


class Batched(Experts):
    def forward(self, x: Tensor) -> Tensor:
        by_expert = torch.stack([x[e::3] for e in range(3)])
        return torch.bmm(by_expert, self.weight[:3].transpose(1, 2)).flatten(0, 1)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("kind", [Experts, Batched, ByGroupedMm])
def test_experts_are_one_item_with_inputs_of_their_own(kind: Callable[..., nn.Module], gradients: bool) -> None:
    model, data = kind(3, 16), batches(12, 16)
    _, found = scores_of(model, data, {"weight": [INT2]}, gradients=gradients)
    error = model.weight.detach() - INT2.apply(model.weight.detach()).dequantize()
    x, direct, size = torch.stack(data), 0.0, 0.0
    for expert in range(3):
        rows = x[:, expert::3].flatten(0, 1)
        # Signs as gradients: the sum of squares is the number of rows.
        moment, thirds = rows.t() @ rows / len(rows), torch.full((24,), 1 / 3)
        direct += form(error[expert], moment, thirds)
        size += 2 * form(model.weight[expert].detach(), moment, thirds)
    direct = direct if gradients else direct / size
    assert found[0].values[0] == pytest.approx(direct, rel=1e-4)
    assert found[0].tokens == 36


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1, groups=groups))
    recipe = qtorch.intx_weight_only("int3", -1)
    items, found = scores_of(model, batches(2, 8, 5, 5), {"0": [recipe]})
    quantized = copy.deepcopy(model)
    qtorch.quantize_(quantized, {"0": recipe})
    x = torch.cat(batches(2, 8, 5, 5))
    squares = (model(x) - quantized(x)).square().mean((0, 2, 3)).detach()
    if groups == 1:
        # Outputs (2, 12, 5, 5) have 2 * 12 * 5 rows of 5; signs as gradients.
        assert found[0].values[0] == pytest.approx(float(squares.sum()) / 2 * 6 * 25 / (6 * 12 * 5), rel=1e-2)
    assert found[0].values[0] > 0
    assert items[0].matrix.shape == qtorch.kernels.conv.to_matrix(model[0].weight).shape


class TiedModel(nn.Module):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.in_place = in_place

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.relu_(x) if self.in_place else torch.relu(x)
        return self.head(self.mix(x))


def test_a_tied_table_has_the_errors_of_both_uses_also_where_outputs_change() -> None:
    tied, data = TiedModel(), [torch.randint(20, (3, 9)) for _ in range(4)]
    apart = copy.deepcopy(tied)
    apart.head.weight = nn.Parameter(tied.head.weight.detach().clone())
    names = {"embed": [INT2], "head": [INT2]}
    _, of_parts = scores_of(apart, data, names, loss="logits")
    items, (both,) = scores_of(tied, data, {"head": [INT2]}, loss="logits")
    assert [slot.name for slot in items[0].target.slots] == ["embed.weight", "head.weight"]
    assert both.values[0] == pytest.approx(sum(part.values[0] for part in of_parts), rel=1e-4)
    error = tied.embed.weight.detach() - INT2.apply(tied.embed.weight.detach()).dequantize()
    counts = torch.bincount(torch.cat(data).flatten(), minlength=20).float()
    items = find_items(apart, {"embed": [INT2]}, None)
    (plain,) = score_weights(items, apart, Data(data), gradients=False)
    squares, sizes = (each.detach().square().sum(1) for each in (error, apart.embed.weight))
    assert plain.values[0] == pytest.approx(float(counts @ squares / (counts @ sizes)) / 2, rel=1e-4)
    plain, in_place = TiedModel(), TiedModel(in_place=True)
    in_place.load_state_dict(plain.state_dict())
    data = [torch.randint(20, (3, 9))]
    names = {"mix": [INT2], "head": [INT2]}
    found = [[s.values for s in scores_of(model, data, names, loss="logits")[1]] for model in (plain, in_place)]
    assert found[0] == found[1]
    assert all(value > 0 for (value,) in found[0])


def test_frozen_parameters_and_padding_change_nothing() -> None:

    class Masked(Mlp):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    model, data = Masked(), batches(2, 6, 16)
    loss = lambda output, batch: (output[:, :6] ** 2).sum()  # noqa: E731
    _, found = scores_of(model, data, loss=loss)
    mask = torch.cat([torch.ones(2, 6), torch.zeros(2, 3)], 1).long()
    padded = [{"x": torch.cat([x, 50 * torch.ones(2, 3, 16)], 1), "attention_mask": mask} for x in data]
    model.requires_grad_(False)
    _, other = scores_of(model, padded, loss=loss)
    for a, b in zip(found, other):
        assert a.values == pytest.approx(b.values, rel=1e-4)
        assert a.tokens == b.tokens == 36


def test_labels_are_sampled_and_unused_weights_count_as_average() -> None:
    model = Mlp()
    model.unused = nn.Linear(16, 8)
    items, found = scores_of(model, batches(5, 16))
    unused = found[[item.name for item in items].index("unused")]
    assert unused.tokens == 0
    assert 0 == unused.values[2] < unused.values[1] < unused.values[0]
    used = [scores.values[0] for scores in found if scores.tokens]
    assert 0.1 * min(used) < unused.values[0] < 10 * max(used)
    logits = torch.tensor([2.0, 0.0, -1.0]).repeat(20000, 1).requires_grad_()
    Rows.of(logits, None, logits=True).sampled_loss(torch.Generator().manual_seed(0)).backward()
    p = torch.tensor([2.0, 0.0, -1.0]).softmax(-1)
    # The gradient is p - onehot(label).
    torch.testing.assert_close(logits.grad.mean(0), torch.zeros(3), atol=0.015, rtol=0)
    torch.testing.assert_close(logits.grad.square().mean(0), p * (1 - p), atol=0.015, rtol=0)
