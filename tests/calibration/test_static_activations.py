"""Static activations from data: each layer, or each group of layers with one input, gets a scale of its own."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import FloatTarget, Nearest, auto, calibrated, gptq, min_max, moving_average, mse, observed
from qtorch.calibration.observers import OBSERVERS
from qtorch.primitives import LinearSpec, MappingType, PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.recipes.base import WeightRecipe
from qtorch.training import calibrate, convert, qat
from tests.calibration.test_in_order import ByGroupedMm, ByMatmul, Experts, Model, batches
from tests.refusals import refuses

# The compiled kernels are tested in tests/kernels/cpu.
pytestmark = pytest.mark.usefixtures("torch_kernels")

INT8, FLOAT8 = qtorch.int8_static_activation_int8_weight(), qtorch.float8_static_activation_float8_weight()
LARGEST = {INT8: 127, FLOAT8: 448}
both = pytest.mark.parametrize("recipe", [INT8, FLOAT8], ids=["int8", "float8"])


@dataclass(frozen=True)
class Own(WeightRecipe):
    """A recipe of a user, not registered."""

    name: ClassVar[str] = "own"
    activation: QuantSpec

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(QuantSpec("int8", PerRow(), quant_min=-127), self.activation, static=True)


class PreNorm(nn.Module):
    """An attention block as in a transformer: norms in front, residuals, q, k and v from one input."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), PreNorm(), nn.Linear(32, 16)).requires_grad_(False)


def quantized(make: Callable[[], nn.Module], recipe: Any) -> nn.Module:
    model = make()
    qtorch.quantize_(model, recipe)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.dim() >= 2}


@both
def test_three_lines_are_what_one_does_by_hand(recipe: WeightRecipe) -> None:
    """Layer by layer, each with the largest input that it meets in the model as quantized so far."""
    data = batches()
    torch.manual_seed(0)
    model = Model()
    ours, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    report = qtorch.quantize_(ours, observed(recipe, data, observer=min_max()))
    stages = [["front"], *([f"blocks.{i}.gate", f"blocks.{i}.up"] for i in range(3)), ["head"]]
    stages[1:4] = [part for i, stage in enumerate(stages[1:4]) for part in (stage, [f"blocks.{i}.down"])]
    for names in stages:
        seen: list[Tensor] = []
        hook = by_hand.get_submodule(names[0]).register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0]))
        with torch.no_grad():
            for x in data:
                by_hand(x)
        hook.remove()
        scale = torch.cat(seen).abs().max() / LARGEST[recipe]
        qtorch.quantize_(by_hand, dict.fromkeys(names, type(recipe)(scale)))
    for name, weight in weights_of(ours).items():
        wanted = by_hand.get_parameter(name)
        assert weight.scheme == wanted.scheme
        assert torch.equal(weight.act_scale, wanted.act_scale), name
        assert torch.equal(weight.dequantize(), wanted.dequantize())
    assert len({float(weight.act_scale) for weight in weights_of(ours).values()}) == 8
    for layer in report.quantized:
        assert (layer.calibration.method, layer.calibration.tokens) == ("nearest", 3 * 4 * 9)
        assert layer.calibration.input_range is not None
    assert json.loads(json.dumps(report.to_json()))["layers"][0]["calibration"]["error"] is None


def test_static_scales_and_given_ones() -> None:
    data, floats, x = batches(8), transformer(), torch.cat(batches(4, seed=9))
    errors = {}
    for recipe in (
        qtorch.int8_dynamic_activation_int8_weight(),
        *(observed(INT8, data, observer=o) for o in ("mse", "min_max")),
    ):
        errors[str(recipe)] = qtorch.compute_error(floats(x), quantized(transformer, recipe)(x))
    dynamic, *static = errors.values()
    for error in static:
        assert dynamic - 6 < error < dynamic + 3, errors
    clipped = quantized(transformer, qtorch.int8_static_activation_int8_weight(0.005))
    assert qtorch.compute_error(floats(x), clipped(x)) < min(static) - 6
    for recipe in (gptq(qtorch.int8_static_activation_int8_weight(0.04), batches()), auto(type(INT8)(0.04), batches())):
        model = quantized(transformer, recipe)
        assert {weight.act_scale.item() for weight in weights_of(model).values()} == {torch.tensor(0.04).item()}
    model = transformer()
    before = dict(model.named_parameters())
    for recipe in (INT8, {"0": FLOAT8}, qat(INT8)):
        words = r"^quantize_: .*_weight\(\) has no scale of the activation. Let data"
        with pytest.raises(ValueError, match=words) as got:
            qtorch.quantize_(model, recipe)
        assert str(got.value).count("has no scale") == 1
        assert "observed(" in str(got.value)
    refuses("has no scale of the activation", lambda: INT8.apply(model[0].weight))
    with pytest.raises(ValueError, match=r"observers choose one scale for the input of a layer, .* has 2"):
        qtorch.quantize_(model, observed(Own(QuantSpec("int8", PerGroup(8))), batches()))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@both
@pytest.mark.parametrize("observer", sorted(OBSERVERS))
def test_every_observer_serves(recipe: WeightRecipe, observer: str) -> None:
    floats, x = transformer(), torch.cat(batches(4, seed=9))
    model = quantized(transformer, observed(recipe, batches(4), observer=observer))
    assert 15 < qtorch.compute_error(floats(x), model(x)) < 50
    block = model[1]
    assert block.q.weight.act_scale.item() == block.k.weight.act_scale.item() == block.v.weight.act_scale.item()
    assert block.o.weight.act_scale.item() != block.q.weight.act_scale.item()


@pytest.mark.parametrize("target", [None, FloatTarget()], ids=["gptq", "target"])
def test_gptq_and_static_activations_are_one_pass(target: FloatTarget | None) -> None:
    """The codes and the scale of a first layer are those of both alone; later ones meet what both have changed."""
    data, reads = batches(2), []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        reads.append(1)
        return model(batch)

    recipe = calibrated(INT8, data, target=target, observer="min_max", forward=forward)
    together = quantized(transformer, recipe)
    passes = len(reads)
    scale, codes = observed(INT8, data, observer="min_max"), calibrated(qtorch.int8_weight_only(), data, target=target)
    by_observer = quantized(transformer, scale)[0].weight
    by_gptq = quantized(transformer, codes)[0].weight
    assert torch.equal(together[0].weight.act_scale, by_observer.act_scale)
    assert not torch.equal(together[0].weight.dequantize(), by_observer.dequantize())
    # The int8 of the recipe has codes in [-127, 127], as int8_weight_only.
    assert torch.equal(together[0].weight.dequantize(), by_gptq.dequantize())
    reads.clear()
    quantized(transformer, calibrated(qtorch.int8_weight_only(), data, target=target, forward=forward))
    assert len(reads) == passes
    floats, x = transformer(), torch.cat(batches(4, seed=9))
    assert 20 < qtorch.compute_error(floats(x), together(x)) < 60


@pytest.mark.parametrize("kind", [Experts, ByMatmul, ByGroupedMm])
@both
def test_experts_of_one_parameter_have_one_scale(kind: Callable[[], Experts], recipe: WeightRecipe) -> None:
    floats, x = kind(), torch.randn(80, 32)
    x[1::2] *= 5
    wanted = floats(x)
    for observer, made in (("min_max", observed), ("moving_average", calibrated)):
        model = copy.deepcopy(floats)
        qtorch.quantize_(model, {"weight": made(recipe, [x], observer=observer)})
        assert model.weight.act_scale.shape == (1, 1)
        torch.testing.assert_close(model.weight.act_scale.item(), float(x.abs().max()) / LARGEST[recipe])
        assert 20 < qtorch.compute_error(wanted, model(x)) < 50
        plain = copy.deepcopy(floats)
        qtorch.quantize_(plain, {"weight": type(recipe)(model.weight.act_scale)})
        if made is observed:
            assert torch.equal(model.weight.dequantize(), plain.weight.dequantize())
            assert torch.equal(model(x), plain(x))


@both
def test_a_convolution(recipe: WeightRecipe) -> None:
    floats = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU())
    data, x = [torch.randn(2, 4, 8, 8) for _ in range(3)], torch.randn(2, 4, 8, 8)
    for observer in ("min_max", "mse"):
        model = copy.deepcopy(floats)
        qtorch.quantize_(model, {"0|2": observed(recipe, data, observer=observer)})
        if observer == "min_max":
            largest = max(float(batch.abs().max()) for batch in data)
            torch.testing.assert_close(model[0].weight.act_scale.item(), largest / LARGEST[recipe])
        with torch.no_grad():
            assert 20 < qtorch.compute_error(floats(x), model(x)) < 55


@pytest.mark.parametrize("mapping", MappingType)
def test_a_recipe_of_ones_own_with_a_zero_point(mapping: MappingType, tmp_path: Path) -> None:
    own = Own(QuantSpec("int8", PerTensor(), mapping))
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
    data, x = [torch.randn(64, 16) for _ in range(4)], torch.randn(50, 16)
    refuses(r"own\(.* has no scale of the activation", lambda: qtorch.quantize_(copy.deepcopy(floats), own))
    for observer in ("min_max", "mse"):
        model = copy.deepcopy(floats)
        qtorch.quantize_(model, {"2": observed(own, data, observer=observer)})
        if mapping is MappingType.ASYMMETRIC:
            # Nothing is negative behind the ReLU: all codes are for what is.
            assert model[2].weight.act_zero_point.item() == -128
        least = 42 if mapping is MappingType.ASYMMETRIC else 36  # one bit more
        assert least < qtorch.compute_error(floats(x), model(x)) < least + 9
        qtorch.save_quantized(model, tmp_path / "model.safetensors")
        again = qtorch.load_quantized(copy.deepcopy(floats), tmp_path / "model.safetensors")
        assert torch.equal(again(x), model(x))


GIVEN = qtorch.int8_static_activation_int8_weight(0.1)
NOTHING_LEFT = "leaves no scale of a static activation to an observer"


@pytest.mark.parametrize(("call", "words"), [
    *(
        (lambda recipe=recipe: observed(recipe, batches()), NOTHING_LEFT)
        for recipe in (qtorch.int8_weight_only(), GIVEN, qtorch.int8_dynamic_activation_int8_weight())
    ),
    (lambda: type(INT8)(0.1, act_mapping_type=MappingType.ASYMMETRIC), "an asymmetric activation has a zero point"),
    (lambda: calibrated(INT8, batches(), observer="mean"), "observer is an observer such as"),
])  # fmt: skip
def test_what_has_no_scale_to_observe(call: Callable[[], object], words: str) -> None:
    refuses(words, call)


def test_weights_that_no_batch_reaches_and_targets() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Embedding(5, 16))
    before = dict(model.named_parameters())
    data = batches()
    for recipe in (observed(INT8, data, forward=lambda m, x: m[0](x)), gptq(INT8, data, forward=lambda m, x: m[0](x))):
        with pytest.raises(ValueError, match=r"quantize_: 1: .*no batch has used this weight.*nothing is changed"):
            qtorch.quantize_(model, recipe)
    with pytest.raises(ValueError, match=r"quantize_: 2: .*no batch has used this weight"):
        qtorch.quantize_(model, {"2": observed(INT8, [torch.tensor([1, 2])], forward=lambda m, x: m[2](x))})
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    recipe = calibrated(INT8, batches(), rounding=Nearest())
    model = transformer()
    report = qtorch.quantize_(model, recipe)
    assert all(layer.calibration.error is not None for layer in report.quantized if layer.calibration)
    assert str(recipe).startswith("calibrated(recipe=int8_static_activation_int8_weight(), rounding=Nearest()")
    assert str(observed(INT8, [], observer=mse(steps=7))).endswith("observer=mse(steps=7))")
    learn = qtorch.calibration.AutoRound(scale_lr=0.1)
    steps = "refine=(Descent(), ScaleRefit(), Descent()), scales=ScaleSearch(tokens=32), learn=AutoRound(scale_lr=0.1))"
    assert str(auto(qtorch.int4_weight_only(), [], learn=learn)).endswith(steps)


def test_training_uses_the_same_observers_whose_range_follows_or_stays() -> None:
    """`qat`, `calibrate` and `convert` give what `observed` gives for a layer that meets the same inputs."""
    data, floats = [torch.randn(32, 64) * (1 + i) for i in range(4)], nn.Linear(64, 32)
    for observer in ("min_max", moving_average(0.3), "percentile", mse(steps=30), "entropy"):
        for recipe in (INT8, FLOAT8):
            served, trained = nn.Sequential(copy.deepcopy(floats)), nn.Sequential(copy.deepcopy(floats))
            qtorch.quantize_(served, observed(recipe, data, observer=observer))
            qtorch.quantize_(trained, qat(recipe, observer=observer))
            assert calibrate(trained, data) == 1
            qtorch.quantize_(trained, convert())
            assert torch.equal(trained[0].weight.act_scale, served[0].weight.act_scale)
            assert torch.equal(trained[0].weight.dequantize(), served[0].weight.dequantize())
    x = torch.randn(32, 64)
    for observer, follows in (("min_max", True), ("moving_average", True), ("percentile", False), ("mse", False)):
        layer = nn.Linear(64, 32)
        qtorch.quantize_(layer, qat(INT8, observer=observer))
        if not follows:
            with pytest.raises(ValueError, match="no scale yet"):
                layer(x)
        calibrate(layer, [x])
        before = layer.input_quantizer.max_val.clone()
        layer.train()(10 * x)
        assert bool(layer.input_quantizer.max_val > before) is follows
