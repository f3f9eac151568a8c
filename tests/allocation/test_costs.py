"""Bytes and times of choices, the fastest one of each layer, and the best choices within a budget."""

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import allocate
from qtorch.calibration.allocation import fastest, items
from qtorch.calibration.allocation import items as timing
from qtorch.calibration.allocation.allocate import Budget, Frontier, swaps
from qtorch.calibration.allocation.items import find_items, nbytes_under
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.integrations import torchao
from tests.every_recipe import NAMES, make
from tests.refusals import refuses

MORE = {
    "tiled": qtorch.int4_weight_only(32, qtorch.ZeroPointDomain.FLOAT, layout=qtorch.TensorCoreTiledLayout()),
    "hqq": qtorch.intx_weight_only("int3", 32, scale_rule=qtorch.primitives.HQQRule()),
    "mse": qtorch.uintx_weight_only("uint2", 32, scale_rule=qtorch.primitives.MSERule()),
}


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_bytes_are_those_of_the_quantized_weight(name: str) -> None:
    recipe, checked = MORE.get(name) or make(name, 32), 0
    for shape, dtype in (((24, 64), torch.float32), ((24, 64), torch.bfloat16), ((3, 20, 96), torch.bfloat16)):
        weight = torch.randn(shape, dtype=dtype)
        assert nbytes_under(None, weight) == weight.nbytes
        with contextlib.suppress(ValueError):  # does not take this shape
            recipe.check(weight)
            checked += 1
            assert nbytes_under(recipe, weight) == recipe.apply(weight).nbytes
    assert checked


@pytest.mark.parametrize(("text", "kind", "amount", "of_model"), [
    ("3.5 bits", "bits", 3.5, False), ("4 bits a weight", "bits", 4, False), (1_000_000, "bytes", 10**6, False),
    ("1.2 GB", "bytes", 1.2e9, False), ("1.5GiB", "bytes", 1.5 * 2**30, False), ("300 kB model", "bytes", 3e5, True),
    ("12 ms a token", "time", 12e6, False), ("250 us", "time", 250e3, False),
])  # fmt: skip
def test_budgets(text: str | int, kind: str, amount: float, of_model: bool) -> None:
    found = Budget.of(text)
    assert (found.kind, found.amount, found.of_model) == (kind, pytest.approx(amount), of_model)


SYNTAX = r'allocate: budget is "3\.5 bits"'


@pytest.mark.parametrize(("budget", "error", "words"), [
    *(
        (text, ValueError, SYNTAX)
        for text in ("3.5", "bits", "-3 bits", "0 bits", "3 bit s", "1.2 gigs", "nan ms", "")
    ),
    (3.5, ValueError, r'write "3\.5 bits"'),
    (0, ValueError, "counts bytes, got 0"),
    (None, TypeError, "got None"),
    (True, TypeError, "got True"),
])  # fmt: skip
def test_what_is_no_budget(budget: object, error: type[Exception], words: str) -> None:
    refuses(words, lambda: Budget.of(budget), error)


@pytest.mark.parametrize("bits", ["5.15 bits", "5.5 bits", "5.9999 bits", "6.03 bits"])
def test_the_budget_is_kept(bits: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(40, 24))
    candidates = [qtorch.intx_weight_only(f"int{b}", 8) for b in (1, 2, 3)] + [qtorch.int8_weight_only()]
    allocation = allocate(model, candidates, bits)
    limit = float(bits.split()[0])
    # The finest step is that of the smallest weight from one number of bits to the next.
    assert limit - 8 * 24 * 40 / 8 / 7616 <= allocation.bits <= limit
    report = qtorch.quantize_(model, allocation)
    assert report.bytes_after == allocation.nbytes <= limit * sum(m.weight.numel() for m in model) / 8
    assert qtorch.get_model_size_in_bytes(model) == allocation.model_bytes


def test_bytes_and_errors() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(100, 64))
    rest = 4 * (64 + 64 + 100 * 64)
    candidates = [qtorch.int4_weight_only(32), qtorch.int8_weight_only(), None]
    sizes = [nbytes_under(candidate, model[0].weight) for candidate in candidates]
    for wanted in (2 * sizes[0], sizes[0] + sizes[1], 2 * sizes[1], sizes[1] + sizes[2], 2 * sizes[2]):
        assert allocate(model, candidates, wanted).nbytes == wanted
        assert allocate(model, candidates, f"{wanted + rest} B model").model_bytes == wanted + rest
        if wanted > 2 * sizes[0]:
            assert allocate(model, candidates, wanted - 1).nbytes < wanted
    with pytest.raises(ValueError, match=rf"take: {2 * sizes[0]:,} bytes, 5\.25 bits an element, scales included$"):
        allocate(model, candidates, 2 * sizes[0] - 1)
    with pytest.raises(ValueError, match=r"the rest of the model leaves 0 bytes for these weights$"):
        allocate(model, candidates, f"{rest} B model")
    refuses("the example does not use unused", lambda: fastest(Model(), [INT8], torch.randn(2, 32)))
    with pytest.raises(ValueError, match="takes linear layers, got 0"):
        fastest(nn.Sequential(nn.Conv1d(8, 8, 3)), {"0": [INT8]}, torch.randn(1, 8, 9))
    for arguments, match in [
        ({}, "example_input=None has no equivalent"),
        ({"example_input": torch.randn(2, 32), "manual": True}, "manual=True"),
        ({"example_input": torch.randn(2, 32), "mode": ["relu", None]}, "mode="),
        ({"example_input": torch.randn(2, 32), "qtensor_class_list": [int]}, "qtensor_class_list="),
    ]:
        with pytest.raises(ValueError, match=match):
            torchao.autoquant(Model(), **arguments)  # type: ignore[arg-type]


def test_times_are_measured_once_and_autoquant_measures_for_real() -> None:
    small, large = nn.Linear(32, 32), nn.Linear(1024, 1024)
    items = find_items(nn.Sequential(small, large, nn.Linear(32, 32)), [None, qtorch.int8_weight_only()], None)
    times = timing.measure(items, 1)
    assert times[0] is times[2]
    assert all(time > 0 for of_item in times for time in of_item)
    with pytest.raises(ValueError, match="a budget of time is for linear layers, got 0"):
        timing.measure(find_items(nn.Sequential(nn.Conv1d(8, 8, 3)), {"0": [None]}, None), 1)
    order: list[int] = []
    medians = timing.interleaved_medians([lambda: order.append(0), lambda: order.append(1)], turns=3, seconds=0)
    assert len(medians) == 2
    assert order == [0] * 3 + [1] * 3 + [0, 1] * 3
    model, x = Model(), torch.randn(5, 7, 32)
    before = model(x)
    only_int8 = [qtorch.int8_weight_only(), qtorch.int8_dynamic_activation_int8_weight()]
    assert torchao.autoquant(model, x, only_int8, used) is model
    assert isinstance(model.a.weight, AffineQuantizedTensor)
    assert isinstance(model.b.weight, AffineQuantizedTensor)
    assert not isinstance(model.unused.weight, AffineQuantizedTensor)
    assert 20 < qtorch.compute_error(before, model(x)) < 80
    # With floating point among the candidates it may stay as it is, but not break.
    other = torchao.autoquant(nn.Sequential(nn.Linear(32, 32)), (x,), torchao.DEFAULT_INT4_AUTOQUANT_CLASS_LIST)
    assert other(x).isfinite().all()
    assert None in torchao.ALL_AUTOQUANT_CLASS_LIST
    assert len(torchao.ALL_AUTOQUANT_CLASS_LIST) == 7


def test_a_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are known: as many weights as the time allows stay in floating point."""
    product = lambda x, weight: len(x) * (1000 if isinstance(weight, AffineQuantizedTensor) else 3000)  # noqa: E731
    monkeypatch.setattr(timing, "product", product)
    monkeypatch.setattr(timing, "interleaved_medians", list)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    allocation = allocate(model, [qtorch.int8_weight_only(), None], "8 us a token")
    assert [recipe is None for recipe in allocation.values()].count(True) == 2
    assert allocation.milliseconds == pytest.approx(8e-3)
    assert "us" in str(allocation)
    assert allocate(model, [qtorch.int8_weight_only(), None], "8 us", rows=2).milliseconds == pytest.approx(8e-3)
    # A layer that runs twice for each token takes twice the time.
    twice = nn.Sequential(model[0], model[0], model[1])
    allocation = allocate(twice, [qtorch.int8_weight_only(), None], "9 us a token", [torch.randn(3, 32)])
    assert sum(row.nanoseconds[0] for row in allocation.rows) == 3000
    with pytest.raises(ValueError, match=r"less than the cheapest candidates take: 0\.004 ms$"):
        allocate(model, [qtorch.int8_weight_only(), None], "3 us a token")


INT4, INT8 = qtorch.int4_weight_only(32), qtorch.int8_weight_only()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for _ in range(3):
            x = self.b(x.relu())
        return x


def used(module: nn.Module, name: str) -> bool:
    return name != "unused"


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """int4 takes least for `b`, int8 for `a`, whatever the machine; what was measured."""
    measured: list[tuple[int, ...]] = []

    def product(x: Tensor, weight: Tensor) -> int:
        measured.append((*x.shape, len(weight)))
        kind = weight.scheme.weight.dtype.name if isinstance(weight, AffineQuantizedTensor) else None
        order = ["int8", "uint4", None] if weight.shape[1] == 32 else ["uint4", "int8", None]
        return 100 * (1 + order.index(kind)) * len(x)

    monkeypatch.setattr(items, "product", product)
    monkeypatch.setattr(items, "interleaved_medians", list)
    return measured


def test_each_layer_gets_the_fastest_of_a_least_sqnr(known_times: list[tuple[int, ...]]) -> None:
    model, x = Model(), torch.randn(5, 7, 32)
    found = fastest(model, [None, INT4, INT8], x, filter_fn=used)
    assert dict(found) == {"a": INT8, "b": INT4}
    assert [row.nanoseconds for row in found.rows] == [(10500, 7000, 3500), (31500, 10500, 21000)]
    assert [row.tokens for row in found.rows] == [35, 105]
    # One measurement for each shape.
    assert known_times == [(35, 32, 64)] * 3 + [(35, 64, 64)] * 3
    before = model(x)
    assert qtorch.quantize_(model, found).bytes_after == found.nbytes
    assert 10 < qtorch.compute_error(before, model(x)) < 60
    model, x = Model(), torch.randn(5, 7, 32)
    found = fastest(model, [None, INT4, INT8], x, filter_fn=used, min_sqnr=35)
    assert dict(found) == {"a": INT8, "b": INT8}
    score = found.rows[0].scores[found.rows[0].candidates.index(str(INT8))]
    wanted, got = (nn.functional.linear(x, w).detach() for w in (model.a.weight, INT8.apply(model.a.weight.detach())))
    assert 0 < score == pytest.approx(float((got - wanted).square().sum() / wanted.square().sum()), rel=1e-2)
    assert dict(fastest(model, [None, INT4], x, filter_fn=used, min_sqnr=80)) == {"a": None, "b": None}
    with pytest.raises(ValueError, match=r"a: no candidate has an SQNR of min_sqnr=80 dB, the best has [\d.]+;"):
        fastest(model, [INT4, INT8], x, filter_fn=used, min_sqnr=80)


def brute_force(costs: list[list[int]], values: list[list[float]], limit: int) -> float:
    return min(
        sum(value[option] for value, option in zip(values, options))
        for options in itertools.product(*(range(len(of_item)) for of_item in costs))
        if sum(cost[option] for cost, option in zip(costs, options)) <= limit
    )


def problem(seed: int, items: int, options: int, largest: int) -> tuple[list[list[int]], list[list[float]]]:
    generator = random.Random(seed)
    costs = [[generator.randint(1, largest) for _ in range(options)] for _ in range(items)]
    return costs, [[generator.random() for _ in range(options)] for _ in range(items)]


@pytest.mark.parametrize("largest", [3, 10**6])
def test_it_equals_brute_force_on_6_layers_of_3_choices(largest: int) -> None:
    for seed in range(10):
        costs, values = problem(seed, 6, 3, largest)
        least, most = sum(map(min, costs)), sum(map(max, costs))
        for limit in (least, (3 * least + most) // 4, most):
            found = Frontier(costs, values, limit).solution()
            assert found.value == pytest.approx(brute_force(costs, values, limit), rel=1e-12)
            assert found.cost == sum(cost[option] for cost, option in zip(costs, found.options)) <= limit
            assert found.value == pytest.approx(sum(value[o] for value, o in zip(values, found.options)), rel=1e-12)


def test_numbers_of_choices_curves_and_swaps() -> None:
    costs, values = [[4], [1, 2, 3, 9], [5, 5]], [[0.5], [0.9, 0.5, 0.1, 0.0], [0.2, 0.1]]
    for limit in (10, 11, 12, 18):
        assert Frontier(costs, values, limit).solution().value == pytest.approx(brute_force(costs, values, limit))
    with pytest.raises(ValueError, match="no choice of options is within the limit"):
        Frontier([[3, 4], [5]], [[1.0, 0.5], [0.0]], 7).solution()
    costs, values = problem(1, 60, 4, 10**9)
    limit = (sum(map(min, costs)) + sum(map(max, costs))) // 2
    exact = Frontier(costs, values, limit, states=1 << 15).solution()
    for states in (16, 256, 4096):
        found = Frontier(costs, values, limit, states).solution()
        assert found.cost <= limit
        # The loss of an item is about what an interval of costs is worth.
        assert exact.value <= found.value + 1e-12
        assert found.value <= exact.value * (1 + 60 / states)
    tight = Frontier(costs, values, sum(map(min, costs)), states=16).solution()
    assert tight.cost == sum(map(min, costs))
    costs, values = problem(3, 6, 3, 50)
    curve = Frontier(costs, values)
    assert (np.diff(curve.cost) > 0).all()
    assert (np.diff(curve.value) < 0).all()
    for limit in range(int(curve.cost[0]), int(curve.cost[-1]) + 1, 7):
        within = curve.value[curve.cost <= limit]
        assert within[-1] == pytest.approx(brute_force(costs, values, limit), rel=1e-12)
    for index in (0, len(curve) // 2, -1):
        found = curve.solution(index)
        assert (found.cost, found.value) == (curve.cost[index], curve.value[index])
    costs, scores = [[1, 2], [1, 2], [1, 2]], [[5.0, 1.0], [3.0, 2.0], [9.0, 2.0]]
    found = swaps([0, 0, 1], costs, scores, 4)
    assert [(swap.options, swap.change) for swap in found] == [({0: 1, 2: 0}, 3.0), ({1: 1, 2: 0}, 6.0), ({2: 0}, 7.0)]
    assert [swap.options for swap in swaps([0, 0, 0], costs, scores, 4)] == [{2: 1}, {0: 1}, {1: 1}]
