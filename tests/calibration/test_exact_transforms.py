"""Exact changes of the float model before it is rounded: scales folded into norms, and rotations."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import Nearest, Transform, calibrated, rotate, smooth
from qtorch.calibration.data import Data
from qtorch.calibration.transforms import propagation, rules
from qtorch.calibration.transforms.folds import Fold, Parameters, find_folds
from qtorch.calibration.transforms.rotate import hadamard, random_orthogonal
from qtorch.calibration.transforms.work import Work, difference, find_wrong, outputs
from qtorch.model.report import TransformReport
from tests.calibration import transform_models
from tests.calibration.transform_models import HIDDEN, WIDTH, PreNorm, RmsNorm, of_transformers, randomize, tokens
from tests.fast_part import slow_but

KV = transform_models.KV_HEADS * 8


def folds_of(model: nn.Module, batch: Any) -> tuple[dict[str, Fold], dict[str, str]]:
    folds, refusals = find_folds(propagation.ModelGraph(model, Data([batch]), batch))
    return {fold.name: fold for fold in folds}, {item.name: item.reason for item in refusals}


def change(model: nn.Module, batch: Any, folds: list[Fold]) -> float:
    """The relative change of the outputs by random scales in all folds, and that they do change the parameters."""
    data, generator = Data([batch]), torch.Generator().manual_seed(0)
    before = outputs(model, data, batch)
    parameters = Parameters(model)
    for fold in folds:
        scales = torch.rand(fold.scales, generator=generator, dtype=torch.float64) * 3 + 0.2
        values = fold.values(parameters, scales)
        for name, value in values.items():
            assert not torch.equal(value, parameters[name].to(value.dtype)), name
        parameters.replace(values)
    return difference(before, outputs(model, data, batch))


PRE_NORMS = pytest.mark.parametrize(
    "options",
    [{}, {"shift": 1.0}, {"repeat": True}, {"gated": True}, {"fused": True}],
    ids=["plain", "1 + w", "repeated k, v", "q and gate in one", "gate and up in one"],
)


@PRE_NORMS
def test_folds_of_a_pre_norm_model_are_exact(options: dict[str, Any]) -> None:
    model, (batch, _) = PreNorm(**options).double().eval(), tokens()
    folds, refusals = folds_of(model, batch)
    up = "mlp.gate_up" if options.get("fused") else "mlp.up"
    wanted = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("norm1", "norm2", "attention.v", up)}
    assert folds.keys() == wanted | {"norm.weight"}
    assert refusals == {}
    for name, fold in folds.items():
        free = {"v": KV, "up": HIDDEN, "gate_up": HIDDEN}.get(name.split(".")[-2], WIDTH)
        assert int(fold.free.sum()) == free
    if options.get("fused"):
        assert not folds["blocks.0.mlp.gate_up.weight"].free[:HIDDEN].any()  # the gate passes silu
    assert set(folds["blocks.0.norm1.weight"].consumers) == {f"blocks.0.attention.{n}.weight" for n in "qkv"}
    assert change(model, batch, list(folds.values())) < 1e-10


MODELS = {
    "llama": (5, []),
    "qwen2_moe": (6, []),
    "gemma3": (4, ["model.norm.weight"]),  # the head is tied to the embedding
    "gpt2": (3, ["transformer.ln_f.weight"]),
    "t5": (10, ["encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"]),
    "vit": (4, []),
}


@pytest.mark.parametrize("name", slow_but(["llama"], MODELS))
def test_models_of_transformers(name: str) -> None:
    model, batch = of_transformers(name)
    if name != "qwen2_moe":  # torch's grouped_mm does not take fp64
        model = model.double()
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    folds, refusals = folds_of(model, batch)
    assert (len(folds), list(refusals)) == MODELS[name]
    # Norms of Llama, Qwen, Gemma and T5 compute in fp32.
    assert change(model, batch, list(folds.values())) < (1e-10 if name in ("gpt2", "vit") else 5e-6)


def test_what_is_divided_and_what_keeps_its_scale() -> None:
    model, batch = of_transformers("qwen2_moe")
    folds, _ = folds_of(model, batch)
    consumers = folds["model.layers.0.post_attention_layernorm.weight"].consumers
    names = {name.removeprefix("model.layers.0.mlp.") for name in consumers}
    shared = {f"shared_expert.{name}_proj.weight" for name in ("gate", "up")} | {"shared_expert_gate.weight"}
    assert names == shared | {"gate.weight", "experts.gate_up_proj"}
    assert "model.layers.0.mlp.experts.gate_up_proj" in folds
    model, x = randomize(OneNorm("some channels")).double(), torch.randn(3, 5, WIDTH).double()
    folds, _ = folds_of(model, x)
    assert folds["norm.weight"].free.tolist() == [False] + [True] * (WIDTH - 1)
    assert change(model, x, list(folds.values())) < 1e-10
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 8), nn.GELU()).double()
    x = torch.randn(5, 8).double()
    folds, _ = folds_of(model.eval(), x)
    assert list(folds) == ["0.weight"]
    assert set(folds["0.weight"].labels) == {"0.weight", "0.bias", "3.weight"}
    assert change(model, x, list(folds.values())) < 1e-10
    folds, _ = folds_of(nn.Sequential(ByExp(), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH))
    assert folds == {}


class OneNorm(nn.Module):
    """A norm, a linear layer, and what else a test wants to do with the output of the norm."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(8, WIDTH)
        self.register_buffer("matrix", torch.randn(WIDTH, WIDTH))
        if how == "tied to an embedding":
            self.first.weight = nn.Parameter(torch.randn(8, WIDTH))
            self.first.bias = None
            self.embed.weight = self.first.weight
        if how == "tied to another input":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        match self.how:
            case "residual":
                return y + self.first(y)
            case "tied to an embedding":
                return self.first(y) + self.embed(x[..., 0].long().abs() % 8).sum()
            case "tied to another input":
                return self.first(y) + self.second(x)
            case "a buffer":
                return self.first(y) + y @ self.matrix
            case "an output":
                return torch.cat([self.first(y), y], -1)
            case "a norm":
                return self.first(y) + self.second(nn.functional.normalize(y, dim=-1))
            case "in place":
                total = torch.zeros_like(x)
                total += y
                return self.first(y) + total
            case "some channels":
                return self.first(y) + torch.tanh(y[..., :1])
            case _:
                return self.first(y) + self.second(y)


@pytest.mark.parametrize(
    "how", ["residual", "tied to an embedding", "tied to another input", "a buffer", "an output", "a norm", "in place"]
)
def test_a_norm_with_a_reader_that_is_not_divided_is_not_folded(how: str) -> None:
    model, x = OneNorm(how), torch.randn(3, 5, WIDTH)
    folds, refusals = folds_of(model, x)
    assert folds == {}
    assert "norm.weight" in refusals
    whole, _ = folds_of(OneNorm("two layers"), x)
    assert set(whole["norm.weight"].consumers) == {"first.weight", "second.weight"}


class Looped(nn.Module):
    """One layer twice, and a head with the same input as the second time."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.tanh(self.layer(self.norm(x)))
        return self.head(self.norm(x))


@pytest.mark.parametrize("tied", [False, True])
def test_a_shared_norm_is_folded_where_all_its_uses_agree(tied: bool) -> None:
    model, x = randomize(Looped(tied)).double(), torch.randn(3, WIDTH).double()
    folds, _ = folds_of(model, x)
    assert set(folds["norm.weight"].consumers) == ({"layer.weight"} if tied else {"layer.weight", "head.weight"})
    assert change(model, x, list(folds.values())) < 1e-10


class ByExp(RmsNorm):
    """The weight is not a factor: scales cannot go into it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * self.weight.exp()


def test_a_wrong_fold_is_undone_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that takes GELU for a homogeneous function: the numbers say otherwise."""
    monkeypatch.setitem(rules.RULES, "aten.gelu.default", rules.RULES["aten.relu.default"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    x = torch.randn(64, 8) * torch.linspace(0.1, 10, 8)
    before, weight = copy.deepcopy(model), model[1].weight
    recipe = qtorch.int8_dynamic_activation_int8_weight()
    options = {"target": None, "rounding": Nearest(), "transforms": [smooth()]}
    with pytest.raises(ValueError, match=r"1\.weight: the outputs of the model change"):
        qtorch.quantize_(model, calibrated(recipe, [x], strict=True, **options))
    assert model[1].weight is weight
    report = qtorch.quantize_(model, calibrated(recipe, [x], **options))
    actions = {item.name: item.action for item in report.transforms}
    assert actions["1.weight"] == "reverted"
    assert actions["0.weight"] in ("scaled", "unchanged")
    assert "reverted: the outputs of the model change" in str(report)
    # With the fold, scales from 1/4 to 4 would have changed the output by more than that of int8.
    assert 30 < qtorch.compute_error(before(x), model(x)) < 60


def test_bisection_and_a_wrong_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ([], [3], [0, 9], list(range(10))):
        assert find_wrong(range(10), lambda some, wrong=wrong: any(item in wrong for item in some)) == wrong
    together = find_wrong(range(4), lambda some: {1, 2} <= set(some))
    assert together == [0, 1, 2, 3]
    module = importlib.import_module("qtorch.calibration.transforms.rotate")
    monkeypatch.setattr(module, "_without_weight", lambda work, fold: {})
    model = PreNorm(1).double().eval()
    before = dict(model.named_parameters())
    reports, change = apply(model, tokens()[0], rotate(values=False))
    assert reports[0].action == "reverted"
    assert "change by" in reports[0].detail
    assert change == 0
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def apply(model: nn.Module, batch: Any, transform: Transform) -> tuple[list[TransformReport], float]:
    """The reports, and the change of the outputs."""
    work = Work(model, Data([batch]), {})
    assert work.reference
    return transform.apply(work), work.difference()


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 24, 28, 32, 36, 44, 56, 96, 128, 160])
def test_hadamard_matrices(size: int) -> None:
    matrix = hadamard(size)
    assert torch.equal(matrix.abs(), torch.ones(size, size, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.t(), size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 6, 10, 32, 48, 50, 92])
def test_orthogonal_matrices_of_all_sizes(size: int) -> None:
    q, kind = random_orthogonal(size, torch.Generator().manual_seed(0))
    torch.testing.assert_close(q @ q.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert kind == ("random orthogonal" if hadamard(size) is None else "randomized Hadamard")
    assert not torch.allclose(q, random_orthogonal(size, torch.Generator().manual_seed(1))[0])


@PRE_NORMS
def test_rotations_are_exact(options: dict[str, Any]) -> None:
    model = PreNorm(**options).double().eval()
    model.blocks[0].norm1.weight.data[0] = -options.get("shift", 0.0)  # a channel that the norm multiplies by 0
    model.blocks[0].norm2.weight.data[1] = -0.5
    before = copy.deepcopy(model)
    reports, change = apply(model, tokens()[0], rotate())
    assert change < 1e-10
    names = ["residual stream", "blocks.0.attention.v.weight", "blocks.1.attention.v.weight"]
    gated = options.get("gated", False)  # the gate is multiplied channel by channel
    assert [(item.name, item.action) for item in reports] == [(n, "rotated") for n in (names[:1] if gated else names)]
    for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        if ".norm" in name or name == "norm.weight":
            assert torch.equal(new, torch.full_like(new, 1 - options.get("shift", 0.0)))
        elif "bias" not in name or name.rpartition(".")[0].endswith((".o", ".down")):
            assert not torch.allclose(new, old), name


ROTATED = {
    "llama": ("rotated", 1),
    "qwen2_moe": ("rotated", 1),
    "gemma3": ("writes into it", 1),  # norms behind the layers
    "gpt2": ("layer_norm", 1),
    "t5": ("output", 3),
    "vit": ("no embedding", 1),
}


@pytest.mark.parametrize("name", slow_but(["llama"], ROTATED))
def test_models_of_transformers_of_rotate(name: str) -> None:
    model, batch = of_transformers(name)
    reports, change = apply(model, batch, rotate())
    residual, *heads = reports
    reason, count = ROTATED[name]
    assert reason in (residual.action if reason == "rotated" else residual.detail)
    assert [item.action for item in heads] == ["rotated"] * count
    assert change < 5e-6


@pytest.mark.parametrize(
    ("what", "reason"),
    [("a tied head", "norm.weight cannot be folded"), ("a reader", "tanh"), ("a layer norm", "layer_norm")],
)
def test_a_model_that_cannot_be_rotated_is_left_alone(what: str, reason: str) -> None:
    model = PreNorm(1, tied=what == "a tied head").double().eval()
    if what == "a reader":
        model.blocks.append(nn.Tanh())
    if what == "a layer norm":
        model.norm = nn.LayerNorm(32).double()
    before = dict(model.named_parameters())
    reports, change = apply(model, tokens()[0], rotate(values=False))
    assert [item.action for item in reports] == ["not done"]
    assert reason in reports[0].detail
    assert change == 0
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.slow
def test_rotation_spreads_outliers_of_the_residual_stream() -> None:
    model, data = PreNorm(1).eval(), tokens(2)
    model.embed.weight.data[:, 5] *= 30
    recipe = qtorch.mxfp4_dynamic_activation_mxfp4_weight()
    errors = []
    for transforms in ((), (rotate(),), (rotate(), smooth(alphas=(0.5,)))):
        quantized = copy.deepcopy(model)
        report = qtorch.quantize_(quantized, calibrated(recipe, data, None, Nearest(), transforms=transforms))
        assert [item for item in report.transforms if item.action == "reverted"] == []
        with torch.no_grad():
            x = torch.cat(tokens(4, seed=3))
            errors.append(float((quantized(x) - model(x)).norm() / model(x).norm()))
    assert 0 < errors[1] < 0.9 * errors[0]
    assert 0 < errors[2] < 0.9 * errors[0]


def test_smooth_divides_by_its_equation() -> None:
    """s = max |x|^alpha / max |w|^(1 - alpha), up to a factor (SmoothQuant, arXiv 2211.10438, equation 4)."""
    model = nn.Sequential(nn.LayerNorm(16, bias=False), nn.Linear(16, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.logspace(0, 2, 16))
    before, data = copy.deepcopy(model), [torch.randn(32, 16) for _ in range(2)]
    recipe = qtorch.int8_dynamic_activation_int8_weight()
    report = qtorch.quantize_(model, calibrated(recipe, data, transforms=[smooth(alphas=(0.25,))]))
    assert report.transforms[0].action == "scaled"
    x = torch.cat([before[0](batch) for batch in data]).abs().amax(0)
    equation = x**0.25 / before[1].weight.abs().amax(0) ** 0.75
    quotient = before[0].weight / model[0].weight / equation
    torch.testing.assert_close(quotient, quotient.mean().expand(16), rtol=1e-5, atol=0)
