"""Observers of the ranges of activations, and static scales from them."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
import qtorch.calibration
from qtorch.calibration import Nearest, Transform, auto, awq, calibrated, gptq, observers, smooth
from qtorch.calibration.data import Data
from qtorch.calibration.statistics import Histogram
from qtorch.calibration.transforms import scaling, work
from qtorch.primitives import MappingType, MSERule, PercentileRule, PerTensor, QuantSpec, ZeroPointDomain
from qtorch.primitives.jsonable import from_json, to_json
from tests.calibration.transform_models import PreNorm, of_transformers, tokens
from tests.fast_part import slow_but

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


def test_averages_entropy_and_what_is_refused() -> None:
    batches = [data("normal", seed) * (1 + seed) for seed in range(5)]
    for momentum in (0.01, 0.5, 1.0):
        low, high = observe(observers.moving_average(momentum), *batches)
        weights = [(1 - momentum) ** (4 - b) for b in range(5)]
        for got, ends in ((low, [float(b.min()) for b in batches]), (high, [float(b.max()) for b in batches])):
            wanted = sum(w * e for w, e in zip(weights, ends, strict=True)) / sum(weights)
            assert math.isclose(float(got), wanted, rel_tol=1e-6)
    memory = torch.zeros(2, 1)
    for largest in (4.0, 1.0):
        memory, _ = observers.delayed_scaling(history=2).follow_measured(memory, torch.tensor([[largest]]))
    assert memory.flatten().tolist() == [1.0, 4.0]
    x, spec = data("outliers"), replace(SPECS["int4"], scale_rule=MSERule(steps=25, smallest=0.2))
    got = error(x, *observe_with(observers.mse(steps=25, smallest=0.2), spec, x), spec)
    assert abs(got / error(x, *spec.choose_range(x), spec) - 1) < 0.01
    x, seen, spec = data("relu")[::2], Histogram(), SPECS["int8 asymmetric"]
    seen.update(x)
    high = x.max()
    candidates = [float(high * f) for f in torch.linspace(1, 0.1, 12)]
    by_hand = [divergence_by_hand(x, seen.width, 0.0, each, spec) for each in candidates]
    low, chosen = observe_with(observers.entropy(steps=12, smallest=0.1), spec, x)
    assert float(low) == 0
    assert math.isclose(candidates[by_hand.index(min(by_hand))], float(chosen), rel_tol=1e-6)
    assert repr(observers.percentile(99.0)) == "percentile(percentile=99.0)"
    for wrong in ("mean", None, 3, observers.mse):
        with pytest.raises(
            ValueError, match=r"f: observer is an observer such as mse\(\), or a word of delayed_scaling, entropy"
        ):
            observers.observer_of(wrong, "f")
    with pytest.raises(ValueError, match=r"call it: mse\(\)$"):
        observers.observer_of(observers.mse, "f")
    with pytest.raises(ValueError, match="'mse' is taken"):
        qtorch.calibration.observers.register_observer("mse")(type("Other", (observers.Observer,), {}))
    # The check computes in fp32, so that rounding does not hide what is wrong, nor a right fold looks wrong.
    model, batch = of_transformers("gemma3")
    model = model.bfloat16()
    report = qtorch.quantize_(model, rounded(W8A8, [batch], QUICK, awq(ratios=3)))
    assert {item.action for item in report.transforms} <= {"scaled", "unchanged", "not done"}
    assert sum(item.action == "scaled" for item in report.transforms) >= 3


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


W8A8 = qtorch.int8_dynamic_activation_int8_weight()
INT3 = qtorch.intx_weight_only("int3", group_size=16)
QUICK = smooth(alphas=(0.4, 0.6))


def rounded(recipe: Any, data: Any, *transforms: Transform, **options: Any) -> Any:
    return calibrated(recipe, data, target=None, rounding=Nearest(), transforms=transforms, **options)


def planted(model: PreNorm, factor: float = 100.0) -> PreNorm:
    """The same function with some channels of the inputs of each linear layer times `factor`."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        readers = [[block.attention.q, block.attention.k, block.attention.v], [block.mlp.gate, block.mlp.up]]
        for norm, linears in zip((block.norm1, block.norm2), readers, strict=True):
            norm.weight.data[3::8] *= factor
            for linear in linears:
                linear.weight.data[:, 3::8] /= factor
        block.mlp.up.weight.data[5::8] *= factor
        block.mlp.up.bias.data[5::8] *= factor
        block.mlp.down.weight.data[:, 5::8] /= factor
    return model


def error_of_scaling(model: nn.Module, quantized: nn.Module) -> float:
    x = torch.cat(tokens(8, seed=5))
    with torch.no_grad():
        return float((model(x) - quantized(x)).norm() / model(x).norm())


def test_smoothing_undoes_planted_outliers() -> None:
    model, data = PreNorm().eval(), tokens(4)
    hard = planted(model)
    assert work.difference(work.outputs(model, Data(data), data[0]), work.outputs(hard, Data(data), data[0])) < 1e-5
    errors = {}
    for name, float_model, transforms in (
        ("easy", model, ()),
        ("hard", hard, ()),
        ("smoothed", hard, (smooth(alphas=(0.4, 0.5, 0.6)),)),
    ):
        quantized = copy.deepcopy(float_model)
        report = qtorch.quantize_(quantized, rounded(W8A8, data, *transforms))
        errors[name] = error_of_scaling(float_model, quantized)
    assert errors["hard"] > 5 * errors["easy"]
    assert 0 < errors["smoothed"] < 1.01 * errors["easy"]
    scaled = [item for item in report.transforms if item.action == "scaled"]
    assert len(scaled) >= 6
    assert all(item.transform == "smooth" and "alpha" in item.detail for item in scaled)


@pytest.mark.parametrize("recipe", [W8A8, INT3, qtorch.mxfp4_dynamic_activation_mxfp4_weight()], ids=str)
@pytest.mark.parametrize("transform", [smooth(alphas=(0.3, 0.5, 0.7)), awq(ratios=4)], ids=["smooth", "awq"])
def test_no_place_gets_worse(transform: Transform, recipe: Any) -> None:
    torch.manual_seed(1)
    model, data = planted(PreNorm(1), 8.0).eval(), tokens(2)
    before = copy.deepcopy(model)
    report = qtorch.quantize_(model, {r".*head": None, r".*": rounded(recipe, data, transform)})
    assert len(report.transforms) == 4
    for item in report.transforms:
        assert 0 < item.error_after <= item.error_before
        assert (item.error_after < item.error_before) == (item.action == "scaled")
    assert any(item.action == "scaled" for item in report.transforms)
    assert 0 < error_of_scaling(before, model) < 1


@pytest.mark.parametrize(("calibrate", "least"), slow_but([(rounded, 0.97)], [(rounded, 0.97), (gptq, 1), (auto, 1)]))
def test_awq_goes_before_any_rounding_and_lessens_its_error(calibrate: Callable[..., Any], least: float) -> None:
    model, data = planted(PreNorm(1), 8.0).eval(), tokens(2)
    errors = []
    for transforms in ((), (awq(ratios=5),)):
        quantized = copy.deepcopy(model)
        qtorch.quantize_(quantized, replace(calibrate(INT3, data), transforms=transforms))
        errors.append(error_of_scaling(model, quantized))
    assert 0 < errors[1] < least * errors[0]


def test_float_parameters_and_what_is_divided() -> None:
    """The norms are new, the model computes what it did but for rounding, and a second call has nothing to do."""
    model, data = planted(PreNorm(1)).eval(), tokens(2)
    norm = model.blocks[0].norm1.weight
    norm.note = "mine"  # type: ignore[attr-defined]
    old, before = norm.detach().clone(), copy.deepcopy(model)
    qtorch.quantize_(model, rounded(W8A8, data, QUICK))
    new = model.blocks[0].norm1.weight
    assert new is not norm
    assert torch.equal(norm, old)
    assert not torch.allclose(new, old)
    assert new.requires_grad
    assert new.note == "mine"  # type: ignore[attr-defined]
    assert 0 < error_of_scaling(before, model) < 0.05
    model, data = planted(PreNorm(1)).eval(), tokens(2)
    before = copy.deepcopy(model)
    report = qtorch.quantize_(model, {"blocks.0.attention.k": rounded(W8A8, data, QUICK)})
    (item,) = report.transforms
    assert (item.name, item.action) == ("blocks.0.norm1.weight", "scaled")
    assert isinstance(model.blocks[0].attention.q.weight, nn.Parameter)
    assert not torch.equal(model.blocks[0].attention.q.weight, before.blocks[0].attention.q.weight)
    assert 0 < error_of_scaling(before, model) < 0.05
    model, data = PreNorm(1), tokens(1)
    with pytest.raises(ValueError, match="all recipes that have any take the same ones"):
        qtorch.quantize_(model, {"head": rounded(W8A8, data, smooth()), r".*": rounded(W8A8, data, awq())})
    report = qtorch.quantize_(planted(PreNorm(1)), rounded(W8A8, iter(tokens(2)), QUICK))
    assert {layer.calibration.tokens for layer in report.quantized if layer.calibration} == {2 * 4 * 16}


class Stop(BaseException):
    pass


@pytest.mark.parametrize("how", ["an error", "a dry run"])
def test_the_model_is_whole_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = planted(PreNorm(1)).train(), tokens(2)
    before = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    if how == "a dry run":
        report = qtorch.quantize_(model, rounded(W8A8, data, QUICK), dry_run=True)
        assert any(item.action == "scaled" for item in report.transforms)
    else:
        seen = []

        def failing(self: Any, target: Any, weight: Tensor, statistics: Any) -> Any:
            seen.append(model.blocks[0].norm1.weight is not before["blocks.0.norm1.weight"])
            raise Stop

        monkeypatch.setattr(type(rounded(W8A8, data)), "make_in_order", failing)
        with pytest.raises(Stop):
            qtorch.quantize_(model, rounded(W8A8, data, QUICK))
        assert seen == [True]  # the transforms were in place
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])


def test_what_cannot_be_exported_and_inputs_without_padding(capsys: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model, data = Branches(nn.LayerNorm(16), nn.Linear(16, 16)), [torch.randn(4, 16)]
    with pytest.raises(ValueError, match=r"smooth: torch\.export does not take the model"):
        qtorch.quantize_(model, rounded(W8A8, data, QUICK, strict=True))
    report = qtorch.quantize_(model, rounded(W8A8, data, QUICK))
    (item,) = report.transforms
    assert (item.name, item.action) == ("", "not done")
    assert "torch.export does not take the model" in item.detail
    assert len(report.quantized) == 1
    assert capsys.readouterr().err == ""

    class Masked(nn.Linear):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    model, x = Masked(4, 3), torch.randn(2, 6, 4)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    batches = [{"x": x.masked_fill(~mask.unsqueeze(-1), 1e6), "attention_mask": mask.long()}]
    (found,) = scaling.collect_inputs(model, Data(batches), batches, [model.weight], tokens=8).values()
    rows = x[mask]
    assert found.count == 10
    assert torch.equal(found.largest, rows.abs().amax(0))
    torch.testing.assert_close(found.mean, rows.abs().mean(0))
    assert found.rows.shape == (8, 4)
    assert (found.rows.unsqueeze(1) == rows).all(-1).any(1).all()


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "qwen2_moe", "gemma3", "gpt2", "vit"]))
def test_models_of_transformers(name: str) -> None:
    model, batch = of_transformers(name)
    before = copy.deepcopy(model)
    recipe = rounded(W8A8, [batch], smooth(alphas=(0.3, 0.7)), awq(ratios=4))
    experts = {r".*\.experts\.(gate_up_proj|down_proj)": recipe} if "moe" in name else {}
    matrices = {r".*\.(c_attn|c_proj|c_fc)\.weight": recipe} if name == "gpt2" else {}
    report = qtorch.quantize_(model, {**experts, **matrices, r".*": recipe})
    actions = {item.action for item in report.transforms}
    assert "scaled" in actions
    assert "reverted" not in actions
    if experts:
        down = "model.layers.0.mlp.experts.gate_up_proj"
        assert next(item for item in report.transforms if item.name == down).error_before is not None
    with torch.no_grad():
        assert 25 < qtorch.compute_error(before(**batch).logits, model(**batch).logits) < 60
