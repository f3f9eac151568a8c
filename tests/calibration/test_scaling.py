"""smooth and awq: scales searched on data, never worse than none, and the model around them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import quantize_
from qtorch.calibration import Nearest, Transform, auto, awq, calibrated, gptq, smooth
from qtorch.calibration.data import Data
from qtorch.calibration.transforms.scaling import collect_inputs
from qtorch.calibration.transforms.work import difference, outputs
from tests.calibration.transform_models import PreNorm, of_transformers, tokens
from tests.fast_part import slow_but

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


def error(model: nn.Module, quantized: nn.Module) -> float:
    x = torch.cat(tokens(8, seed=5))
    with torch.no_grad():
        return float((model(x) - quantized(x)).norm() / model(x).norm())


def test_smoothing_undoes_planted_outliers() -> None:
    model, data = PreNorm().eval(), tokens(4)
    hard = planted(model)
    assert difference(outputs(model, Data(data), data[0]), outputs(hard, Data(data), data[0])) < 1e-5
    errors = {}
    for name, float_model, transforms in (
        ("easy", model, ()),
        ("hard", hard, ()),
        ("smoothed", hard, (smooth(alphas=(0.4, 0.5, 0.6)),)),
    ):
        quantized = copy.deepcopy(float_model)
        report = quantize_(quantized, rounded(W8A8, data, *transforms))
        errors[name] = error(float_model, quantized)
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
    report = quantize_(model, {r".*head": None, r".*": rounded(recipe, data, transform)})
    assert len(report.transforms) == 4
    for item in report.transforms:
        assert 0 < item.error_after <= item.error_before
        assert (item.error_after < item.error_before) == (item.action == "scaled")
    assert any(item.action == "scaled" for item in report.transforms)
    assert 0 < error(before, model) < 1


@pytest.mark.parametrize(("calibrate", "least"), slow_but([(rounded, 0.97)], [(rounded, 0.97), (gptq, 1), (auto, 1)]))
def test_awq_goes_before_any_rounding_and_lessens_its_error(calibrate: Callable[..., Any], least: float) -> None:
    model, data = planted(PreNorm(1), 8.0).eval(), tokens(2)
    errors = []
    for transforms in ((), (awq(ratios=5),)):
        quantized = copy.deepcopy(model)
        quantize_(quantized, replace(calibrate(INT3, data), transforms=transforms))
        errors.append(error(model, quantized))
    assert 0 < errors[1] < least * errors[0]


def test_float_parameters_change_with_the_weights() -> None:
    """The norms are new, the model computes what it did but for rounding, and a second call has nothing to do."""
    model, data = planted(PreNorm(1)).eval(), tokens(2)
    norm = model.blocks[0].norm1.weight
    norm.note = "mine"  # type: ignore[attr-defined]
    old, before = norm.detach().clone(), copy.deepcopy(model)
    quantize_(model, rounded(W8A8, data, QUICK))
    new = model.blocks[0].norm1.weight
    assert new is not norm
    assert torch.equal(norm, old)
    assert not torch.allclose(new, old)
    assert new.requires_grad
    assert new.note == "mine"  # type: ignore[attr-defined]
    assert 0 < error(before, model) < 0.05


class Stop(BaseException):
    pass


@pytest.mark.parametrize("how", ["an error", "a dry run"])
def test_the_model_is_whole_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = planted(PreNorm(1)).train(), tokens(2)
    before = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    if how == "a dry run":
        report = quantize_(model, rounded(W8A8, data, QUICK), dry_run=True)
        assert any(item.action == "scaled" for item in report.transforms)
    else:
        seen = []

        def failing(self: Any, target: Any, weight: Tensor, statistics: Any) -> Any:
            seen.append(model.blocks[0].norm1.weight is not before["blocks.0.norm1.weight"])
            raise Stop

        monkeypatch.setattr(type(rounded(W8A8, data)), "make_in_order", failing)
        with pytest.raises(Stop):
            quantize_(model, rounded(W8A8, data, QUICK))
        assert seen == [True]  # the transforms were in place
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])


def test_weights_without_a_recipe_are_divided_but_not_searched_for() -> None:
    model, data = planted(PreNorm(1)).eval(), tokens(2)
    before = copy.deepcopy(model)
    report = quantize_(model, {"blocks.0.attention.k": rounded(W8A8, data, QUICK)})
    (item,) = report.transforms
    assert (item.name, item.action) == ("blocks.0.norm1.weight", "scaled")
    assert isinstance(model.blocks[0].attention.q.weight, nn.Parameter)
    assert not torch.equal(model.blocks[0].attention.q.weight, before.blocks[0].attention.q.weight)
    assert 0 < error(before, model) < 0.05


def test_a_model_that_cannot_be_exported_is_reported() -> None:
    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) > 0 else -x)

    model, data = Branches(nn.LayerNorm(16), nn.Linear(16, 16)), [torch.randn(4, 16)]
    with pytest.raises(ValueError, match=r"smooth: torch\.export does not take the model"):
        quantize_(model, rounded(W8A8, data, QUICK, strict=True))
    report = quantize_(model, rounded(W8A8, data, QUICK))
    (item,) = report.transforms
    assert (item.name, item.action) == ("", "not done")
    assert "torch.export does not take the model" in item.detail
    assert len(report.quantized) == 1


def test_recipes_with_different_transforms_are_refused() -> None:
    model, data = PreNorm(1), tokens(1)
    with pytest.raises(ValueError, match="all recipes that have any take the same ones"):
        quantize_(model, {"head": rounded(W8A8, data, smooth()), r".*": rounded(W8A8, data, awq())})


def test_batches_that_can_be_read_once_are_kept() -> None:
    report = quantize_(planted(PreNorm(1)), rounded(W8A8, iter(tokens(2)), QUICK))
    assert {layer.calibration.tokens for layer in report.quantized if layer.calibration} == {2 * 4 * 16}


def test_inputs_without_padding() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    model, x = Masked(4, 3), torch.randn(2, 6, 4)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    batches = [{"x": x.masked_fill(~mask.unsqueeze(-1), 1e6), "attention_mask": mask.long()}]
    (found,) = collect_inputs(model, Data(batches), batches, [model.weight], tokens=8).values()
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
    report = quantize_(model, {**experts, **matrices, r".*": recipe})
    actions = {item.action for item in report.transforms}
    assert "scaled" in actions
    assert "reverted" not in actions
    if experts:
        down = "model.layers.0.mlp.experts.gate_up_proj"
        assert next(item for item in report.transforms if item.name == down).error_before is not None
    with torch.no_grad():
        assert 25 < qtorch.compute_error(before(**batch).logits, model(**batch).logits) < 60


def test_sixteen_bits() -> None:
    """The check computes in fp32, so that rounding does not hide what is wrong, nor a right fold looks wrong."""
    model, batch = of_transformers("gemma3")
    model = model.bfloat16()
    report = quantize_(model, rounded(W8A8, [batch], QUICK, awq(ratios=3)))
    assert {item.action for item in report.transforms} <= {"scaled", "unchanged", "not done"}
    assert sum(item.action == "scaled" for item in report.transforms) >= 3
