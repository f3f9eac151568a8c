"""Bytes are those of the real thing, budgets mean what they say, and times are in the order of the work."""

import contextlib

import pytest
import torch
from torch import nn

import qtorch
from qtorch import TensorCoreTiledLayout, ZeroPointDomain, int4_weight_only, int8_weight_only
from qtorch.calibration import allocate
from qtorch.calibration.allocation import items as timing
from qtorch.calibration.allocation.allocate import Budget
from qtorch.calibration.allocation.items import find_items, nbytes_under
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.primitives import HQQRule, MSERule
from tests.every_recipe import NAMES, make

MORE = {
    "tiled": int4_weight_only(32, ZeroPointDomain.FLOAT, layout=TensorCoreTiledLayout()),
    "hqq": qtorch.intx_weight_only("int3", 32, scale_rule=HQQRule()),
    "mse": qtorch.uintx_weight_only("uint2", 32, scale_rule=MSERule()),
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


@pytest.mark.parametrize(
    ("text", "kind", "amount", "of_model"),
    [
        ("3.5 bits", "bits", 3.5, False),
        ("4 bits a weight", "bits", 4, False),
        (1_000_000, "bytes", 10**6, False),
        ("1.2 GB", "bytes", 1.2e9, False),
        ("1.5GiB", "bytes", 1.5 * 2**30, False),
        ("300 kB model", "bytes", 3e5, True),
        ("12 ms a token", "time", 12e6, False),
        ("250 us", "time", 250e3, False),
    ],
)
def test_budgets(text: str | int, kind: str, amount: float, of_model: bool) -> None:
    found = Budget.of(text)
    assert (found.kind, found.amount, found.of_model) == (kind, pytest.approx(amount), of_model)


SYNTAX = r'allocate: budget is "3\.5 bits"'


@pytest.mark.parametrize(
    ("budget", "error", "words"),
    [
        *(
            (text, ValueError, SYNTAX)
            for text in ("3.5", "bits", "-3 bits", "0 bits", "3 bit s", "1.2 gigs", "nan ms", "")
        ),
        (3.5, ValueError, r'write "3\.5 bits"'),
        (0, ValueError, "positive"),
        (None, TypeError, "got None"),
        (True, TypeError, "got True"),
    ],
)
def test_what_is_no_budget(budget: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Budget.of(budget)


@pytest.mark.parametrize("bits", ["5.15 bits", "5.5 bits", "5.9999 bits", "6.03 bits"])
def test_the_budget_is_kept(bits: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(40, 24))
    candidates = [qtorch.intx_weight_only(f"int{b}", 8) for b in (1, 2, 3)] + [int8_weight_only()]
    allocation = allocate(model, candidates, bits)
    limit = float(bits.split()[0])
    # The finest step is that of the smallest weight from one number of bits to the next.
    assert limit - 8 * 24 * 40 / 8 / 7616 <= allocation.bits <= limit
    report = qtorch.quantize_(model, allocation)
    assert report.bytes_after == allocation.nbytes <= limit * sum(m.weight.numel() for m in model) / 8
    assert qtorch.get_model_size_in_bytes(model) == allocation.model_bytes


def test_bytes_of_weights_and_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(100, 64))
    rest = 4 * (64 + 64 + 100 * 64)
    candidates = [int4_weight_only(32), int8_weight_only(), None]
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


def test_times_are_measured_for_each_shape_once() -> None:
    small, large = nn.Linear(32, 32), nn.Linear(1024, 1024)
    items = find_items(nn.Sequential(small, large, nn.Linear(32, 32)), [None, int8_weight_only()], None)
    times = timing.measure(items, 1)
    assert times[0] is times[2]
    assert all(time > 0 for of_item in times for time in of_item)
    with pytest.raises(ValueError, match="a budget of time is for linear layers, got 0"):
        timing.measure(find_items(nn.Sequential(nn.Conv1d(8, 8, 3)), {"0": [None]}, None), 1)


def test_medians_take_turns() -> None:
    order: list[int] = []
    medians = timing.interleaved_medians([lambda: order.append(0), lambda: order.append(1)], turns=3, seconds=0)
    assert len(medians) == 2
    assert order == [0] * 3 + [1] * 3 + [0, 1] * 3


def test_a_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are known: as many weights as the time allows stay in floating point."""
    product = lambda x, weight: len(x) * (1000 if isinstance(weight, AffineQuantizedTensor) else 3000)  # noqa: E731
    monkeypatch.setattr(timing, "product", product)
    monkeypatch.setattr(timing, "interleaved_medians", list)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    allocation = allocate(model, [int8_weight_only(), None], "8 us a token")
    assert [recipe is None for recipe in allocation.values()].count(True) == 2
    assert allocation.milliseconds == pytest.approx(8e-3)
    assert "us" in str(allocation)
    assert allocate(model, [int8_weight_only(), None], "8 us", rows=2).milliseconds == pytest.approx(8e-3)
    # A layer that runs twice for each token takes twice the time.
    twice = nn.Sequential(model[0], model[0], model[1])
    allocation = allocate(twice, [int8_weight_only(), None], "9 us a token", [torch.randn(3, 32)])
    assert sum(row.nanoseconds[0] for row in allocation.rows) == 3000
    with pytest.raises(ValueError, match=r"less than the cheapest candidates take: 0\.004 ms$"):
        allocate(model, [int8_weight_only(), None], "3 us a token")
