"""Statistics of the inputs of products, and tables of codes that are weighted by them."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import importance_weighted
from qtorch.calibration.data import Data, collect, run_batches
from qtorch.calibration.statistics import BatchRanges, Histogram, MeanSquare, Range, SecondMoment, Statistic
from qtorch.kernels.conv import to_matrix
from tests.refusals import refuses
from tests.rounding import gamma


class Rows(Statistic):
    """The rows themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.empty(0)

    def update(self, rows: Tensor) -> None:
        self.value = torch.cat([self.value.reshape(-1, rows.shape[1]), rows])
        self.rows += rows.shape[0]


KINDS = [MeanSquare, SecondMoment, Range, Rows]


def check(found: dict[type[Statistic], Statistic], rows: Tensor) -> None:
    assert {statistic.rows for statistic in found.values()} == {len(rows)}
    x = rows.double()
    bound = gamma(len(rows) + 2) * float(x.square().mean(0).amax().clamp(min=1))
    torch.testing.assert_close(found[MeanSquare].mean.double(), x.square().mean(0), rtol=0, atol=bound)
    torch.testing.assert_close(found[SecondMoment].mean.double(), x.t() @ x / len(x), rtol=0, atol=bound)
    torch.testing.assert_close(found[Rows].value, rows)
    assert (found[Range].low, found[Range].high) == (found[Rows].value.min(), found[Rows].value.max())


def test_parts_add_up_to_the_whole_and_what_is_closed_stays() -> None:
    x, found = torch.randn(57, 8), {kind: kind() for kind in KINDS}
    for part in x.split([1, 0, 39, 17]):
        for statistic in found.values():
            statistic.update(part)
    check(found, x)
    for kind in (MeanSquare, SecondMoment):
        with pytest.raises(ValueError, match=f"{kind.__name__}: no row"):
            _ = kind().mean
        mean = found[kind].mean.clone()
        for _ in range(2):
            found[kind].close()
            assert torch.equal(found[kind].mean, mean)
            assert found[kind].mean is found[kind].total
        refuses("is closed", lambda kind=kind: found[kind].update(x))


def counts_by_hand(x: Tensor, histogram: Histogram) -> Tensor:
    edges = (torch.arange(8193, dtype=torch.float64) - 4096) * histogram.width
    return torch.tensor(torch.histogram(x.double().flatten(), edges).hist.tolist()).long()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-42, 0.0])
def test_a_histogram_is_that_of_all_rows_together(scale: float) -> None:
    """Its range doubles as larger values come; parts in any order, merged, and one pass give the same bits."""
    x = torch.randn(60, 8) * torch.logspace(0, 3, 60).unsqueeze(1) * scale
    whole = Histogram()
    whole.update(x)
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
            assert (merged.rows, merged.width, merged.low, merged.high) == (60, whole.width, x.min(), x.max())


def test_histograms_and_weighted_tables() -> None:
    x = torch.randn(300, 8).clamp(min=-0.5)
    histogram = Histogram()
    histogram.merge(Histogram())
    refuses("Histogram: no row was seen", lambda: histogram.occupied())
    histogram.update(x.bfloat16())
    histogram.merge(Histogram())
    values, counts = histogram.occupied()
    assert bool((counts > 0).all())
    again = values.repeat_interleave(counts.long())
    assert (again - x.bfloat16().float().flatten().sort().values).abs().max() <= histogram.width / 2
    assert histogram.low <= values[0] <= values[-1] <= histogram.high
    quantized, batches = model(), [inputs(3, 5), inputs(4, 11)]
    weight = quantized[0].weight.detach().clone()
    report = qtorch.quantize_(quantized, importance_weighted(qtorch.lut_weight_only(3), batches))
    importance = torch.cat(batches).square().mean(0).expand_as(weight)
    wanted = qtorch.LUTQuantizedTensor.from_float(weight, qtorch.lut_weight_only(3).linear_spec(), importance)
    torch.testing.assert_close(quantized[0].weight.dequantize(), wanted.dequantize(), rtol=1e-3, atol=1e-3)
    assert str(report.layers[0].detail) == "importance_weighted(recipe=lut_weight_only(bits=3))"
    quantized = nn.Sequential(nn.Conv2d(4, 8, 3))
    qtorch.quantize_(quantized, {"0": importance_weighted(qtorch.lut_weight_only(4), [torch.randn(2, 4, 6, 6)])})
    assert qtorch.explain(quantized[0].weight).kernel


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


class Looped(nn.Module):
    """A layer that is called three times, once by the function, and one that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.other(self.layer(x)), self.layer.weight)


@torch.no_grad()
def test_all_calls_of_a_looped_and_tied_weight_count_and_ranges_are_those_of_batches() -> None:
    model = Looped()
    batches = [torch.randn(*shape, 8) * scale for scale, shape in ((1, (3, 5)), (5, (3, 5)), (2, (2,)))]
    found = collect(model, Data(batches), {model.layer.weight: [*KINDS, BatchRanges]})[model.layer.weight]
    seen = [[x.reshape(-1, 8), model.layer(x).reshape(-1, 8)] for x in batches]
    seen = [torch.cat([x, y, model.other(y)]) for x, y in seen]
    check(found, torch.cat(seen))
    ranges = found[BatchRanges]
    assert ranges.highs == [rows.max() for rows in seen]
    other = BatchRanges()
    other.update(torch.ones(2, 3))
    other.end_batch()
    other.end_batch()
    rows = ranges.rows
    ranges.merge(other)
    assert (len(ranges.lows), ranges.lows[-1], ranges.rows) == (4, 1, rows + 2)


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    (nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), bias=False), (2, 4, 9, 7)),
    (nn.Conv2d(4, 6, 3, padding="same"), (4, 8, 8)),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
])  # fmt: skip
def test_windows_are_in_the_order_of_the_weight_as_a_matrix(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = collect(nn.Sequential(layer), Data([x]), {layer.weight: [Rows]})[layer.weight][Rows]
    y = found.value @ to_matrix(layer.weight.detach()).t() + (0 if layer.bias is None else layer.bias.detach())
    wanted = layer(x).detach()
    wanted = wanted if wanted.dim() == layer.weight.dim() else wanted.unsqueeze(0)
    torch.testing.assert_close(y.sort(0).values, wanted.movedim(1, -1).reshape(-1, y.shape[1]).sort(0).values)


def test_batches_of_every_kind_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    collect(model, Data([torch.randn(4, 8)]), {model[0].weight: [MeanSquare]})
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ZeroDivisionError):
        run_batches(model, Data(1 / 0 for _ in range(1)))
    assert model.training
    seen = []

    class Model(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> None:
            seen.append((tuple(x.shape), scale))

    x = torch.randn(2, 3)
    assert run_batches(Model(), Data([x, (x, 2.0), [x], {"x": x, "scale": 3.0}])) == 4
    assert run_batches(Model(), Data([x], lambda model, batch: model(batch, 4.0))) == 1
    assert seen == [((2, 3), s) for s in (1.0, 2.0, 1.0, 3.0, 4.0)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wanted = {layer.weight: [MeanSquare] for layer in model}
    with pytest.raises(ValueError, match=r"1\.weight: no input was seen"):
        collect(model, Data([torch.randn(1, 8)], lambda model, batch: model[0](batch)), wanted)
    refuses("at least one batch", lambda: collect(model, Data([]), wanted))
    for value in (float("nan"), 1e30):
        x = torch.full((4, 8), value)
        refuses(
            r"0\.weight: its inputs have NaN, or infinite squares, 1\.weight",
            lambda x=x: collect(model, Data([x]), wanted),
        )


# Inputs of which a few are far larger than the others: the columns that matter.
SIZES = torch.logspace(-2, 1, 64)


def inputs(seed: int, rows: int = 256) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * SIZES


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_are_nearer_than_without_data(bits: int) -> None:
    x, floats = inputs(1), model()
    errors = []
    for recipe in (qtorch.lut_weight_only(bits), importance_weighted(qtorch.lut_weight_only(bits), [inputs(2)])):
        quantized = model()
        qtorch.quantize_(quantized[0], recipe)
        with torch.no_grad():
            wanted, got = floats[0](x), quantized[0](x)
        errors.append(float((got - wanted).norm() / wanted.norm()))
    plain, weighted = errors
    assert 0 < weighted < 0.95 * plain


def test_products_by_keyword_and_inside_vmap() -> None:
    class Other(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.vmap(self[0])(x).relu()
            return torch.addmm(self[2].bias, mat2=self[2].weight.t(), mat1=y)

    plain, other = model(), Other(*model())
    for each in (plain, other):
        qtorch.quantize_(each, qtorch.calibration.gptq(qtorch.int4_weight_only(group_size=16), [inputs(2)]))
    assert torch.equal(plain[0].weight.qdata, other[0].weight.qdata)
    assert torch.equal(plain[2].weight.qdata, other[2].weight.qdata)
    nearest = model()
    qtorch.quantize_(nearest, qtorch.int4_weight_only(group_size=16))
    assert not torch.equal(plain[0].weight.qdata, nearest[0].weight.qdata)


def test_one_pass_and_errors() -> None:
    reads = []

    def batches():
        for seed in range(3):
            reads.append(seed)
            yield (inputs(seed),)

    quantized = model()
    qtorch.quantize_(quantized, importance_weighted(qtorch.lut_weight_only(2), batches()))
    assert reads == [0, 1, 2]
    assert all(isinstance(layer.weight, qtorch.LUTQuantizedTensor) for layer in (quantized[0], quantized[2]))
    for recipe in (qtorch.int4_weight_only(), qtorch.nf4_weight_only()):
        with pytest.raises(ValueError, match="importance_weighted takes a recipe whose tables are fitted by k-means"):
            importance_weighted(recipe, [])
    floats = model()
    refuses("at least one batch", lambda: qtorch.quantize_(floats, importance_weighted(qtorch.lut_weight_only(3), [])))
    with pytest.raises(RuntimeError):
        qtorch.quantize_(floats, importance_weighted(qtorch.lut_weight_only(3), [torch.randn(2, 63)]))
    assert type(floats[0].weight) is nn.Parameter
    assert floats.training
