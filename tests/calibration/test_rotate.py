"""rotate: exact where it is done, refused with a reason where it is not."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import qtorch
from qtorch import quantize_
from qtorch.calibration import Nearest, Transform, calibrated, rotate, smooth
from qtorch.calibration.data import Data
from qtorch.calibration.transforms.rotate import hadamard, random_orthogonal
from qtorch.calibration.transforms.work import Work
from qtorch.model.report import TransformReport
from tests.calibration.transform_models import PreNorm, of_transformers, tokens
from tests.fast_part import slow_but


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


@pytest.mark.parametrize(
    "options",
    [{}, {"shift": 1.0}, {"repeat": True}, {"gated": True}, {"fused": True}],
    ids=["plain", "1 + w", "repeated k, v", "q and gate in one", "gate and up in one"],
)
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
def test_models_of_transformers(name: str) -> None:
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


def test_a_wrong_rotation_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("qtorch.calibration.transforms.rotate")
    monkeypatch.setattr(module, "_without_weight", lambda work, fold: {})
    model = PreNorm(1).double().eval()
    before = dict(model.named_parameters())
    reports, change = apply(model, tokens()[0], rotate(values=False))
    assert reports[0].action == "reverted"
    assert "change by" in reports[0].detail
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
        report = quantize_(quantized, calibrated(recipe, data, None, Nearest(), transforms=transforms))
        assert [item for item in report.transforms if item.action == "reverted"] == []
        with torch.no_grad():
            x = torch.cat(tokens(4, seed=3))
            errors.append(float((quantized(x) - model(x)).norm() / model(x).norm()))
    assert 0 < errors[1] < 0.9 * errors[0]
    assert 0 < errors[2] < 0.9 * errors[0]
