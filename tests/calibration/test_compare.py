"""compare_models finds the module at fault, in models of many kinds."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import compute_error, quantize_
from qtorch.calibration import compare_models, observed
from qtorch.dtypes import QuantizedTensor
from qtorch.kv_cache import KVCacheSpec, quantized_cache
from qtorch.training import qat
from tests.fast_part import slow_but
from tests.zoo import architectures

INT8 = qtorch.int8_weight_only()
STATIC = qtorch.int8_static_activation_int8_weight()


def wrong_scales(module: nn.Module) -> None:
    """The scales of a weight are those of its rows in reverse."""
    for name, weight in quantized_weights(module).items():
        codes, scale, zero_point = weight.plain()
        axis = -2 if weight.dim() > 2 else 0
        other = weight.with_plain((codes, scale.flip(axis) * 1.5, zero_point))
        module._parameters[name] = nn.Parameter(other, False)


def swapped_channels(module: nn.Module) -> None:
    """Input channels of a weight change places in pairs."""
    for name, weight in quantized_weights(module).items():
        codes, scale, zero_point = weight.plain()
        order = torch.arange(codes.shape[-1]).reshape(-1, 2).flip(1).reshape(-1)
        module._parameters[name] = nn.Parameter(weight.with_plain((codes[..., order], scale, zero_point)), False)


def saturated(module: nn.Module) -> None:
    """The range of a static activation is a tenth of what it should be."""
    for weight in quantized_weights(module).values():
        weight.act_scale.div_(10)


def quantized_weights(module: nn.Module) -> dict[str, Any]:
    return {name: weight for name, weight in module._parameters.items() if isinstance(weight, QuantizedTensor)}


FAULTS: dict[str, tuple[Callable[[nn.Module], None], bool]] = {
    "wrong scales": (wrong_scales, False),
    "swapped channels": (swapped_channels, False),
    "saturating range": (saturated, True),
}
"""Name -> (what plants it, whether activations are static)."""

MODELS = ["llama", "gpt2", "qwen3_moe", "bert", "t5", "vit", "whisper", "mamba2"]


def built(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, batch = architectures.built(name)
    return model, [batch, architectures.ARCHITECTURES[name].batch()]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", slow_but(["llama", "qwen3_moe"], MODELS))
def test_a_planted_fault_is_at_rank_one_and_the_advice_names_it(name: str, fault: str) -> None:
    model, data = built(name)
    plant, static = FAULTS[fault]
    quantized = copy.deepcopy(model)
    quantize_(quantized, observed(STATIC, data) if static else INT8)
    sound = compare_models(quantized, model, data)
    names = [name for name, module in quantized.named_modules() if quantized_weights(module)]
    assert [module.name for module in sound.modules] == names
    assert all(20 < module.own.sqnr < 80 for module in sound.modules if module.own)
    used = [module.name for module in sound.modules if module.own]  # all but the table that two parts of T5 share
    assert len(names) - len(used) <= 1
    for at in (used[1], used[len(used) // 2]):
        faulty = copy.deepcopy(quantized)
        plant(faulty.get_submodule(at))
        found = compare_models(faulty, model, data)
        assert found.ranked[0].name == at
        assert found.advice[0].startswith(f"{at}: ")
        assert ("static range" in found.advice[0]) == static
        # No other module has a larger error of its own than before.
        own = {module.name: module.own.sqnr for module in found.modules if module.own}
        assert all(own[m.name] == pytest.approx(m.own.sqnr, abs=1e-3) for m in sound.modules if m.own and m.name != at)


def two_layers() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)).eval()
    quantized = copy.deepcopy(model)
    quantize_(quantized, qtorch.intx_weight_only("int4", group_size=16))
    return quantized, model, torch.randn(2, 7, 32)


def test_the_figures_are_those_of_their_definitions() -> None:
    quantized, model, x = two_layers()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 3:] = False
    found = compare_models(quantized, model, [x[:1], x[1:]], mask=lambda b: mask[:1] if b is x else torch.ones(1, 7))
    assert found.tokens == 14
    found = compare_models(quantized, model, [x], mask=lambda batch: mask, shares=True)
    first, last = found.modules
    with torch.no_grad():
        hidden, later = model[:2](x)[mask], quantized[:2](x)[mask]
        wanted = {"own": quantized[2](hidden), "accumulated": quantized[2](later)}
        y = model(x)[mask]
    for name, other in wanted.items():
        error = getattr(last, name)
        squares = (y - other).square()
        assert error.sqnr == pytest.approx(float(10 * (y.square().sum() / squares.sum()).log10()), abs=1e-4)
        assert error.cosine == pytest.approx(float(torch.cosine_similarity(y, other, dim=-1).mean()), abs=1e-6)
        shares = squares.sum(0) / squares.sum()
        assert [channel for channel, _ in error.channels] == shares.topk(3).indices.tolist()
        assert [share for *_, share in error.channels] == pytest.approx(shares.topk(3).values.tolist(), abs=1e-5)
        worst = squares.sum(1).topk(3).indices
        assert [row for _, row, _ in error.tokens] == mask.reshape(-1).nonzero().squeeze(1)[worst].tolist()
    assert first.own == first.accumulated
    assert first.weight_sqnr == pytest.approx(float(compute_error(model[0].weight, quantized[0].weight.dequantize())))
    largest = x.abs().amax((0, 1))
    assert first.outliers == pytest.approx(float(largest.max() / largest.median()))

    # Shares: by hand, with one layer in floating point.
    def divergence(outputs: Tensor) -> float:
        return float(1 - torch.cosine_similarity(y, outputs[mask], dim=-1).mean())

    with torch.no_grad():
        whole, without = divergence(quantized(x)), divergence(quantized[1:](model[0](x)))
    assert found.divergence == pytest.approx(whole, rel=1e-4)
    assert first.share == pytest.approx(1 - without / whole, abs=1e-3)
    assert found.rest == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "recipe",
    [qtorch.int8_dynamic_activation_int8_weight(), qat(INT8), qtorch.training.int8_mixed_precision_training()],
    ids=["dynamic", "qat", "training"],
)
def test_dynamic_activations_and_training(recipe: Any) -> None:
    model, data = built("llama")
    quantized = copy.deepcopy(model)
    quantize_(quantized, recipe)
    quantized.train()
    found = compare_models(quantized, model, data)
    assert quantized.training
    assert all(module.own is not None and 25 < module.own.sqnr < 60 for module in found.modules)


def test_quantized_caches_attention_and_unused_modules() -> None:
    model, data = built("llama")
    quantized = copy.deepcopy(model)
    quantize_(quantized, INT8)

    def forward(of: nn.Module, batch: dict[str, Tensor]) -> Any:
        # The first tokens of an empty cache attend to themselves in floating point, later ones read codes.
        spec = KVCacheSpec("int4", keys="token", recent=0, rotate_keys=False)
        floats = architectures.hf.DynamicCache(config=model.config)
        cache = quantized_cache(of, spec) if of is quantized else floats
        first, later = batch["input_ids"].split(6, dim=1)
        of(first, past_key_values=cache, use_cache=True)
        return of(later, past_key_values=cache, use_cache=True)

    found = compare_models(quantized, model, data, forward=forward, shares=True)
    assert found.rest is not None
    assert 0.3 < found.rest < 1.1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.unused = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model = Model().eval()
    quantized = copy.deepcopy(model)
    quantize_(quantized, INT8, targets="all")
    found = compare_models(quantized, model, [torch.randn(2, 5, 32)], shares=True)
    attention, unused = found.modules
    assert attention.name == "attention"
    assert attention.own is not None
    assert attention.share == pytest.approx(1, abs=0.01)
    assert unused.own is None
    assert unused.share == pytest.approx(0, abs=1e-6)
    assert found.ranked[-1] is unused


def test_advice_on_outliers_concentration_and_spread() -> None:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*layers).eval()
    x = torch.randn(4, 64)
    quantized = copy.deepcopy(model)
    quantize_(quantized, INT8)
    assert "spread over all modules" in compare_models(quantized, model, [x]).advice[-1]
    mixed = copy.deepcopy(model)
    quantize_(mixed, {"2": qtorch.intx_weight_only("int3", group_size=32), ".*": INT8})
    assert compare_models(mixed, model, [x]).advice[-1].endswith("of 1 of 4 modules: 8 bits for 2")
    quantized = copy.deepcopy(model)
    quantize_(quantized, qtorch.int8_dynamic_activation_int8_weight())
    x[:, 5] *= 1000
    assert "0 and " in compare_models(quantized, model, [x]).advice[0]
    assert "smooth()" in compare_models(quantized, model, [x]).advice[0]


def test_what_is_not_finite_is_the_worst_and_all_is_printed(tmp_path: Path) -> None:
    quantized, model, x = two_layers()
    quantized[2].weight.scale[0].fill_(math.nan)
    found = compare_models(quantized, model, [x])
    assert found.ranked[0].own is not None
    assert found.ranked[0].own.sqnr == -math.inf
    assert found.advice[0].startswith("2: its output holds a NaN")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["modules"][1]["own"]["sqnr"] is None
    quantized, model, x = two_layers()
    found = compare_models(quantized, model, [x])
    assert str(found).splitlines()[0].startswith("1 - cosine of the outputs ")
    assert found.save(tmp_path / "report", png=False) == tmp_path / "report"
    stored = json.loads((tmp_path / "report" / "comparison.json").read_text())
    assert [module["name"] for module in stored["modules"]] == ["0", "2"]
    pytest.importorskip("matplotlib")
    found.save(tmp_path / "report")
    assert (tmp_path / "report" / "errors.png").stat().st_size > 5000


@pytest.mark.parametrize(("change", "message"), [
    (lambda quantized, model: (model, model), "no weight of this Sequential is quantized"),
    (lambda quantized, model: (quantized, model[0]), "the reference has no module 0"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(change: Any, message: str) -> None:
    quantized, model, x = two_layers()
    with pytest.raises(ValueError, match=f"compare_models: {message}"):
        compare_models(*change(quantized, model), [x])


@pytest.mark.parametrize("shares", [False, True])
def test_each_model_runs_once_on_a_batch_and_once_more_for_each_share(shares: bool) -> None:
    quantized, model, x = two_layers()
    calls: list[nn.Module] = []

    def forward(of: nn.Module, batch: Tensor) -> Tensor:
        calls.append(of)
        return of(batch)

    found = compare_models(quantized, model, [x, x], forward=forward, shares=shares)
    assert calls.count(model) == 2
    assert calls.count(quantized) == 2 * (1 + (len(found.modules) + 1) * shares)
