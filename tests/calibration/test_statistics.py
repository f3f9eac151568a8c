"""Statistics of the inputs of weights: equal to those of the whole data, however it is cut, merged or reached."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch.calibration.data import Data, collect, run_batches
from qtorch.calibration.statistics import BatchRanges, Histogram, Inputs, MeanSquare, Range, SecondMoment, Statistic
from qtorch.kernels.conv import to_matrix
from tests.rounding import gamma

KINDS = [MeanSquare, SecondMoment, Range, Inputs]

VALUES: dict[type[Statistic], Callable[[Tensor], list[Tensor]]] = {
    MeanSquare: lambda x: [x.square().mean(0)],
    SecondMoment: lambda x: [x.t() @ x / len(x)],
    Range: lambda x: [x.min(), x.max()],
    Inputs: lambda x: [x],
}


def values(statistic: Statistic) -> list[Tensor]:
    if isinstance(statistic, Range):
        return [statistic.low, statistic.high]
    return [statistic.value] if isinstance(statistic, Inputs) else [statistic.mean]  # type: ignore[attr-defined]


def check(statistic: Statistic, rows: Tensor) -> None:
    assert statistic.rows == len(rows)
    for got, wanted in zip(values(statistic), VALUES[type(statistic)](rows.double()), strict=True):
        bound = gamma(len(rows) + 2) * float(rows.double().square().mean(0).amax().clamp(min=1))
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_add_up_to_the_whole(kind: type[Statistic]) -> None:
    x, statistic, other = torch.randn(57, 8), kind(), kind()
    for part in x[:40].split([1, 0, 29, 10]):
        statistic.update(part)
    other.update(x[40:])
    statistic.merge(other)
    check(statistic, x)


@pytest.mark.parametrize("kind", [MeanSquare, SecondMoment])
def test_a_mean_of_nothing_is_an_error(kind: type[MeanSquare]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: no row"):
        _ = kind().mean


def counts_by_hand(x: Tensor, histogram: Histogram) -> Tensor:
    edges = (torch.arange(8193, dtype=torch.float64) - 4096) * histogram.width
    return torch.tensor(torch.histogram(x.double().flatten(), edges).hist.tolist()).long()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-42, 0.0])
def test_a_histogram_is_that_of_all_rows_together(scale: float) -> None:
    """Its range doubles as larger values come; parts in any order, merged, and one pass give the same bits."""
    x = torch.randn(60, 8) * torch.logspace(0, 3, 60).unsqueeze(1) * scale
    whole = Histogram()
    whole.update(x)
    assert whole.counts is not None
    assert int(whole.counts.sum()) == x.numel()
    assert torch.equal(whole.counts, counts_by_hand(x, whole))
    if scale >= 1e-3:
        assert 2048 * whole.width <= x.abs().max() < 4096 * whole.width
    for order in (torch.arange(60), torch.arange(59, -1, -1)):
        one, other = Histogram(), Histogram()
        for part in x[order[:40]].split([1, 0, 29, 10]):
            one.update(part)
        other.update(x[order[40:]])
        for a, b in ((one, other), (other, one)):
            merged = copy.deepcopy(a)
            merged.merge(b)
            assert torch.equal(merged.counts, whole.counts)
            assert (merged.rows, merged.width) == (60, whole.width)
            assert (merged.low, merged.high) == (x.min(), x.max())


def test_a_histogram_has_the_values_to_half_a_bin() -> None:
    x = torch.randn(300, 8).clamp(min=-0.5)
    histogram = Histogram()
    histogram.merge(Histogram())
    with pytest.raises(ValueError, match="Histogram: no row was seen"):
        histogram.occupied()
    histogram.update(x.bfloat16())
    histogram.merge(Histogram())
    values, counts = histogram.occupied()
    assert bool((counts > 0).all())
    again = values.repeat_interleave(counts.long())
    assert (again - x.bfloat16().float().flatten().sort().values).abs().max() <= histogram.width / 2
    assert histogram.low <= values[0] <= values[-1] <= histogram.high


@pytest.mark.parametrize("kind", [Range, BatchRanges, Histogram])
def test_rows_that_are_not_finite_do_not_count(kind: type[Range]) -> None:
    x, statistic = torch.randn(5, 4), kind()
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        x[row, 2] = value
    statistic.update(x)
    statistic.update(x[1:2])
    statistic.end_batch()
    assert statistic.rows == 2
    low, high = (statistic.lows[0], statistic.highs[0]) if kind is BatchRanges else (statistic.low, statistic.high)
    assert (low, high) == (x[[0, 2]].min(), x[[0, 2]].max())


def test_ranges_are_those_of_batches_not_of_calls() -> None:
    model = Looped()
    batches = [torch.randn(3, 5, 8) * scale for scale in (1, 5, 2)]
    found = collect(model, Data(batches), {model.layer.weight: [BatchRanges]})[model.layer.weight][BatchRanges]
    assert isinstance(found, BatchRanges)
    assert len(found.highs) == 3
    with torch.no_grad():
        for x, high in zip(batches, found.highs, strict=True):
            y = model.layer(x)
            assert high == torch.cat([x, y, model.other(y)]).max()
    other = BatchRanges()
    other.update(torch.ones(2, 3))
    other.end_batch()
    other.end_batch()
    rows = found.rows
    found.merge(other)
    assert (len(found.lows), found.lows[-1], found.rows) == (4, 1, rows + 2)


class Looped(nn.Module):
    """A layer that is called three times, once by the function, and one that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.other(self.layer(x)), self.layer.weight)


def test_all_calls_of_a_looped_and_tied_weight_count() -> None:
    model = Looped()
    batches = [torch.randn(3, 5, 8), torch.randn(2, 8)]
    found = collect(model, Data(batches), {model.layer.weight: KINDS})[model.layer.weight]
    with torch.no_grad():
        first = [batch.reshape(-1, 8) for batch in batches]
        second = [model.layer(x) for x in first]
        rows = torch.cat([part for x, y in zip(first, second, strict=True) for part in (x, y, model.other(y))])
    for statistic in found.values():
        check(statistic, rows)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), bias=False), (2, 4, 9, 7)),
        (nn.Conv2d(4, 6, 3, padding="same"), (4, 8, 8)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    ],
)
def test_windows_are_in_the_order_of_the_weight_as_a_matrix(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = collect(nn.Sequential(layer), Data([x]), {layer.weight: [Inputs]})[layer.weight][Inputs]
    assert isinstance(found, Inputs)
    y = found.value @ to_matrix(layer.weight.detach()).t() + (0 if layer.bias is None else layer.bias.detach())
    wanted = layer(x).detach()
    wanted = wanted if wanted.dim() == layer.weight.dim() else wanted.unsqueeze(0)
    torch.testing.assert_close(y.sort(0).values, wanted.movedim(1, -1).reshape(-1, y.shape[1]).sort(0).values)


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    collect(model, Data([torch.randn(4, 8)]), {model[0].weight: [MeanSquare]})
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ZeroDivisionError):
        run_batches(model, Data(1 / 0 for _ in range(1)))
    assert model.training


def test_batches_of_every_kind() -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> None:
            seen.append((tuple(x.shape), scale))

    x = torch.randn(2, 3)
    assert run_batches(Model(), Data([x, (x, 2.0), [x], {"x": x, "scale": 3.0}])) == 4
    assert run_batches(Model(), Data([x], lambda model, batch: model(batch, 4.0))) == 1
    assert seen == [((2, 3), s) for s in (1.0, 2.0, 1.0, 3.0, 4.0)]


def test_what_was_not_seen_is_an_error_that_names_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wanted = {layer.weight: [MeanSquare] for layer in model}
    with pytest.raises(ValueError, match=r"no input of 1\.weight was seen"):
        collect(model, Data([torch.randn(1, 8)], lambda model, batch: model[0](batch)), wanted)
    with pytest.raises(ValueError, match="at least one batch"):
        collect(model, Data([]), wanted)


@pytest.mark.parametrize("kind", [MeanSquare, SecondMoment])
def test_a_closed_statistic_has_the_same_mean_and_takes_no_more_rows(kind: type[MeanSquare]) -> None:
    statistic, x = kind(), torch.randn(12, 8)
    statistic.update(x)
    mean = statistic.mean.clone()
    for _ in range(2):
        statistic.close()
        assert torch.equal(statistic.mean, mean)
        assert statistic.mean is statistic.total
    with pytest.raises(ValueError, match="is closed"):
        statistic.update(x)
    with pytest.raises(ValueError, match="is closed"):
        kind().merge(statistic)
