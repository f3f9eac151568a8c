"""Observers: each against a slow, direct computation on the raw values, for integers and low-bit floats."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import qtorch.calibration
from qtorch.calibration import observers
from qtorch.calibration.statistics import Histogram
from qtorch.primitives import MappingType, MSERule, PercentileRule, PerTensor, QuantSpec, ZeroPointDomain
from qtorch.primitives.jsonable import from_json, to_json

SPECS = {
    "int8": QuantSpec("int8", PerTensor(), quant_min=-127),
    "int8 asymmetric": QuantSpec("int8", PerTensor(), MappingType.ASYMMETRIC),
    "int4": QuantSpec("int4", PerTensor()),
    "uint4 asymmetric": QuantSpec("uint4", PerTensor(), MappingType.ASYMMETRIC),
    "float8": QuantSpec(torch.float8_e4m3fn, PerTensor(), zero_point_domain=ZeroPointDomain.NONE),
}

DATA = {
    "normal": lambda g: torch.randn(40, 100, generator=g),
    "outliers": lambda g: torch.randn(40, 100, generator=g) * torch.logspace(0, 1.3, 40).unsqueeze(1),
    "relu": lambda g: torch.randn(40, 100, generator=g).clamp(min=0),
    "shifted": lambda g: torch.rand(40, 100, generator=g) * 3 + 1,
}

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_data = pytest.mark.parametrize("name", DATA)


def data(name: str, seed: int = 0) -> Tensor:
    return DATA[name](torch.Generator().manual_seed(seed))


def observe(observer: observers.Observer, *batches: Tensor) -> tuple[Tensor, Tensor]:
    return observe_with(observer, SPECS["int8"], *batches)


def observe_with(observer: observers.Observer, spec: QuantSpec, *batches: Tensor) -> tuple[Tensor, Tensor]:
    seen = observer.statistic()
    for batch in batches:
        for part in batch.split([len(batch) // 3, len(batch) - len(batch) // 3]):
            seen.update(part)
        seen.end_batch()
    return observer.range(seen, spec)


def error(x: Tensor, low: Tensor, high: Tensor, spec: QuantSpec) -> float:
    """Mean squared error of `x` with this range, by the spec itself."""
    scale, zero_point = spec.choose_qparams_from_range(low.reshape(1, 1), high.reshape(1, 1))
    return float((spec.dequantize(spec.quantize(x, scale, zero_point), scale, zero_point) - x).double().square().mean())


@every_data
def test_min_max(name: str) -> None:
    batches = [data(name, seed) for seed in range(3)]
    whole = torch.cat(batches)
    assert observe(observers.min_max(), *batches) == (whole.min(), whole.max())


def test_moving_average() -> None:
    batches = [data("normal", seed) * (1 + seed) for seed in range(5)]
    for momentum in (0.01, 0.5, 1.0):
        low, high = observe(observers.moving_average(momentum), *batches)
        weights = [(1 - momentum) ** (4 - b) for b in range(5)]
        for got, ends in ((low, [float(b.min()) for b in batches]), (high, [float(b.max()) for b in batches])):
            wanted = sum(w * e for w, e in zip(weights, ends, strict=True)) / sum(weights)
            assert math.isclose(float(got), wanted, rel_tol=1e-6)


@every_data
@pytest.mark.parametrize("p", [99.99, 99.0, 50.0, 1e-6, 100.0])
def test_percentile(name: str, p: float) -> None:
    batches = [data(name, seed) for seed in range(2)]
    whole, seen = torch.cat(batches), Histogram()
    seen.update(whole)
    got = observe(observers.percentile(p), *batches)
    wanted = PercentileRule(p).min_max(whole, SPECS["int8"])
    for end, exact, outwards in zip(got, wanted, (-1, 1), strict=True):
        assert 0 <= outwards * float(end - exact) <= seen.width


@every_spec
@every_data
def test_mse(name: str, spec: QuantSpec) -> None:
    """Its error on the values themselves is that of the best of all candidates, up to the width of bins."""
    x = data(name)
    observer = observers.mse(steps=25, smallest=0.2)
    got = error(x, *observe_with(observer, spec, x), spec)
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    factors = torch.linspace(1, 0.2, 25)
    best = min(error(x, low * f, high * f, spec) for f in factors)
    if spec.mapping is MappingType.ASYMMETRIC:
        assert 0 < got <= 1.01 * best
        ends = observe_with(observer, spec, x)
        for f in factors:
            assert got <= 1.01 * min(error(x, low * f, ends[1], spec), error(x, ends[0], high * f, spec))
    else:
        assert 0.99 * best <= got <= 1.01 * best
    assert got <= 1.01 * error(x, low, high, spec)


def test_mse_is_the_rule_of_weights_on_activations() -> None:
    x, spec = data("outliers"), replace(SPECS["int4"], scale_rule=MSERule(steps=25, smallest=0.2))
    got = error(x, *observe_with(observers.mse(steps=25, smallest=0.2), spec, x), spec)
    assert abs(got / error(x, *spec.choose_range(x), spec) - 1) < 0.01


def divergence_by_hand(x: Tensor, width: float, low: float, high: float, spec: QuantSpec) -> float:
    """KL(P || Q), element by element."""
    scale, zero_point = spec.choose_qparams_from_range(torch.tensor([[low]]), torch.tensor([[high]]))
    counts = Counter((x.double() / width).floor().long().flatten().tolist())
    near, further = [0, -1], [b for b in (1, -2) if b in counts]
    for b in near:
        if b in counts and further:
            counts[b] = sum(counts[f] for f in further) / len(further)
    extremes = float(x.min()), float(x.max())
    middles = {b: min(max((b + 0.5) * width, extremes[0]), extremes[1]) for b in sorted(counts)}
    in_fp32 = dict(zip(middles, torch.tensor(list(middles.values())), strict=True))
    inside = [b for b, middle in in_fp32.items() if low <= middle <= high]
    if not inside:
        return math.inf
    p = {b: float(counts[b]) for b in inside}
    p[inside[0]] += sum(count for b, count in counts.items() if b < inside[0])
    p[inside[-1]] += sum(count for b, count in counts.items() if b > inside[-1])
    codes = spec.quantize(torch.stack([in_fp32[b] for b in inside])[None], scale, zero_point)[0]
    code = dict(zip(inside, codes.tolist(), strict=True))
    sizes, sums = Counter(code.values()), Counter()
    for b in inside:
        sums[code[b]] += counts[b]
    q = {b: sums[code[b]] / sizes[code[b]] for b in inside}
    total_p, total_q = sum(p.values()), sum(q.values())
    return sum(p[b] / total_p * math.log(p[b] / total_p * total_q / q[b]) for b in inside)


@pytest.mark.parametrize("spec", [SPECS["int8"], SPECS["int4"], SPECS["float8"]], ids=["int8", "int4", "float8"])
@pytest.mark.parametrize("name", ["outliers", "relu"])
def test_entropy(name: str, spec: QuantSpec) -> None:
    x, seen = data(name)[::2], Histogram()
    seen.update(x)
    largest = x.abs().max()
    candidates = [float(largest * f) for f in torch.linspace(1, 0.1, 12)]
    by_hand = [divergence_by_hand(x.abs(), seen.width, -high, high, spec) for high in candidates]
    low, high = observe_with(observers.entropy(steps=12, smallest=0.1), spec, x)
    chosen = min(range(12), key=lambda i: abs(candidates[i] - float(high)))
    assert math.isclose(candidates[chosen], float(high), rel_tol=1e-6)
    assert float(low) == -float(high)
    assert by_hand[chosen] <= min(by_hand) * (1 + 1e-4) + 1e-9
    assert max(by_hand) > 1.01 * min(by_hand)


def test_entropy_of_an_asymmetric_range() -> None:
    x, seen, spec = data("relu")[::2], Histogram(), SPECS["int8 asymmetric"]
    seen.update(x)
    high = x.max()
    candidates = [float(high * f) for f in torch.linspace(1, 0.1, 12)]
    by_hand = [divergence_by_hand(x, seen.width, 0.0, each, spec) for each in candidates]
    low, chosen = observe_with(observers.entropy(steps=12, smallest=0.1), spec, x)
    assert float(low) == 0
    assert math.isclose(candidates[by_hand.index(min(by_hand))], float(chosen), rel_tol=1e-6)


@every_spec
@pytest.mark.parametrize("name", sorted(observers.OBSERVERS))
def test_nothing_but_zeros_or_one_value(name: str, spec: QuantSpec) -> None:
    for value in (0.0, 3.0, -2.0, 1e-30):
        low, high = observe_with(observers.OBSERVERS[name](), spec, torch.full((6, 4), value))
        assert low <= high
        got = error(torch.full((6, 4), value), low, high, spec)
        # Half a step of int4, whose symmetric scale is max |x| / 7.5.
        assert got <= (value / 15) ** 2 * 1.0001 + 1e-20


@pytest.mark.parametrize("name", sorted(observers.OBSERVERS))
def test_an_observer_is_a_value(name: str) -> None:
    observer = observers.OBSERVERS[name]()
    assert repr(observer) == f"{name}()"
    assert observers.observer_of(name, "f") == observer == observers.observer_of(observer, "f")
    assert from_json(json.loads(json.dumps(to_json(observer)))) == observer
    assert getattr(qtorch.calibration, name) is getattr(qtorch.calibration.observers, name) is observers.OBSERVERS[name]


def test_what_is_refused() -> None:
    assert repr(observers.percentile(99.0)) == "percentile(percentile=99.0)"
    for wrong in ("mean", None, 3, observers.mse):
        with pytest.raises(
            ValueError,
            match=r"f: observer is an observer such as mse\(\), or a word of delayed_scaling, entropy",
        ):
            observers.observer_of(wrong, "f")
    with pytest.raises(ValueError, match=r"call it: mse\(\)$"):
        observers.observer_of(observers.mse, "f")
    with pytest.raises(ValueError, match="'mse' is taken"):
        qtorch.calibration.observers.register_observer("mse")(type("Other", (observers.Observer,), {}))
