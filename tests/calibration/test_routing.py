"""Experts, and models of many kinds, calibrated."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import auto, gptq
from qtorch.calibration.data import Data
from qtorch.calibration.engine import in_order, streams
from qtorch.calibration.statistics import BLENDED, Moments
from tests.calibration import test_in_order, test_resume
from tests.fast_part import slow_but
from tests.zoo import architectures

pytest.importorskip("transformers")


INT3 = qtorch.uintx_weight_only("uint3", group_size=16)
MIXTURES = ["qwen3_moe", "mixtral"]


def built(name: str) -> tuple[Any, list[dict[str, Tensor]]]:
    sizes = {"num_experts": 16} if name == "qwen3_moe" else {"num_local_experts": 16}
    model, batch = architectures.built(name, **sizes)
    with torch.no_grad():  # so that routers choose, and errors of quantization change what they choose
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 3 else 1)
    return model, [batch, *(architectures.ARCHITECTURES[name].batch() for _ in range(2))]


def inputs_of_experts(model: nn.Module, block: int, batch: Any) -> tuple[Any, Tensor, Tensor]:
    """(the module of experts, tokens (T, H), experts of each (T, R)) in one block, as they are called."""
    experts = next(m for m in model.model.layers[block].modules() if hasattr(m, "down_proj") and m.down_proj.dim() == 3)
    found: list[Any] = []
    hook = experts.register_forward_pre_hook(lambda module, args: found.extend(args))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return experts, found[0], found[1]


def moments(model: nn.Module, data: Any, recipe: Any) -> dict[str, dict[int, Moments]]:
    """The statistics of all experts, collected while weights stay in floating point but for those of attention."""
    targets = [target for target in qtorch.model.targets.find_targets(model, recipe, None) if target.recipe is not None]
    found: dict[str, dict[int, Moments]] = {}
    with in_order.InOrder[Any](model, targets, Data(data)) as run:
        for target, statistics in run:
            made: Any = (target.parameter.detach(),)
            if target.parameter.dim() == 3:
                found[target.slot.name] = {key: of[Moments] for key, of in statistics.items()}  # type: ignore[misc, index]
            else:
                made = (INT3.apply(target.parameter.detach()),)
            run.install(target, made)
    return found


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("all_experts", [False, True])
def test_statistics_are_those_of_the_equations(name: str, all_experts: bool) -> None:
    """Of the first block, whose experts see their own tokens of the quantized model, and the same of the float one."""
    model, data = built(name)
    found = moments(model, data, auto(INT3, data, all_experts=all_experts))
    of_first = next(of for key, of in found.items() if ".layers.0." in key and "gate_up" in key)
    quantized = copy.deepcopy(model)
    qtorch.quantize_(quantized, {r".*\.layers\.0\.self_attn\..*": INT3})
    rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
    every, differ = [], False
    for batch in data:
        _, hidden, index = inputs_of_experts(quantized, 0, batch)
        _, of_float, other = inputs_of_experts(model, 0, batch)
        differ |= not torch.equal(index.sort(-1).values, other.sort(-1).values)
        every.append((hidden, of_float))
        for expert in range(16):
            at = (index == expert).any(-1)
            rows.setdefault(expert, []).append((hidden[at], of_float[at]))
    assert differ  # or else this would test nothing
    for expert, parts in rows.items():
        own = sum(len(part) for part, _ in parts)
        of = of_first.get(expert)
        if of is None:
            assert not own
            continue
        assert of.rows == own
        assert all_experts or own or not of.count
        if not of.count:
            continue
        weighted = [(part, 1.0) for part in parts] + [(part, BLENDED) for part in every if all_experts]
        count = sum(weight * len(a) for (a, _), weight in weighted)
        assert of.count == pytest.approx(count)
        torch.testing.assert_close(of.mean, sum(w * a.t() @ a for (a, _), w in weighted) / count)
        torch.testing.assert_close(of.cross, sum(w * b.t() @ a for (a, b), w in weighted) / count)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.filterwarnings("ignore:quantize_")
def test_every_expert_is_calibrated_and_the_report_says_what_was_short(name: str) -> None:
    model, data = built(name)
    few = [{key: value[:1, :5] for key, value in data[0].items()}]
    rows = {}
    for all_experts in (False, True):
        quantized = copy.deepcopy(model)
        report = qtorch.quantize_(quantized, gptq(INT3, few, all_experts=all_experts))
        rows[all_experts] = next(row.calibration for row in report.quantized if "experts.down_proj" in row.name)
    plain, blended = rows[False], rows[True]
    assert plain is not None
    assert blended is not None
    assert "experts to nearest: not used by the data" in plain.method
    assert "to nearest" not in blended.method
    assert blended.method.endswith("16 of 16 experts saw fewer tokens than they have inputs")
    assert blended.tokens == 0
    assert 0 < blended.error < blended.nearest_error  # type: ignore[operator]


@pytest.mark.parametrize("all_experts", [False, True])
def test_auto_on_a_mixture_is_no_worse_than_nearest(all_experts: bool) -> None:
    """Tokens of other experts, taken for pairs, made it many times worse."""
    model, data = built("qwen3_moe")
    with torch.no_grad():
        wanted = [model(**batch).logits for batch in data]
    errors = []
    for recipe in (INT3, auto(INT3, data, all_experts=all_experts)):
        quantized = copy.deepcopy(model)
        with test_in_order.expected_warning("fewer tokens than they have inputs", recipe is not INT3):
            qtorch.quantize_(quantized, recipe)
        with torch.no_grad():
            errors.append(sum(float((quantized(**b).logits - y).square().sum()) for b, y in zip(data, wanted)))
    assert 0 < errors[1] < errors[0]


def test_forwards_of_modules_and_unknown_experts() -> None:
    a, other = torch.randn(6, 8), torch.randn(6, 8)
    near = a + 0.1 * other
    for parts, of_float, wanted in [
        ([a], [near], [near]),
        ([a], [other], [a]),
        ([a, near], [near, other], [near, near]),
        ([a], [near[:4]], [a]),
        ([a], [], [a]),
    ]:
        assert all(x is y for (_, x), y in zip(in_order.paired(parts, of_float), wanted, strict=True))
    module = nn.Linear(2, 2)
    own = module.forward
    vars(module)["forward"] = own
    with streams.replaced_forwards({module: lambda x: x}):
        assert module(3) == 3
    assert vars(module)["forward"] is own
    model = Transposed()
    weight = model.weight.detach().clone()
    data = [torch.randn(20, 32)]
    with pytest.raises(ValueError, match="products sum over another axis"):
        qtorch.quantize_(model, {"weight": gptq(INT4, data, strict=True)})
    report = qtorch.quantize_(model, {"weight": auto(INT4, data)})
    (row,) = report.quantized
    assert "products sum over another axis" in row.calibration.method
    assert torch.equal(model.weight.dequantize(), INT4.apply(weight).dequantize())
    model = Transposed()
    x = torch.randn(200, 32)
    wanted = model(x).detach()
    report = qtorch.quantize_(model, auto(INT4, [x]), targets=qtorch.find_uses(model, x))
    (row,) = report.quantized
    assert row.calibration.tokens == 200
    assert 0 < row.calibration.error < row.calibration.nearest_error
    assert 0 < float((model(x) - wanted).norm() / wanted.norm()) < 0.15


INT4 = qtorch.intx_weight_only("int4", group_size=16)

LEFT: dict[str, str] = {
    "mixtral": r".*embed.*",
    "qwen2_moe": r".*embed.*",
    "gpt2": r".*\.wpe\.weight",
    "t5": r".*\.relative_attention_bias\.weight",
    "vit": r".*(cls_token|position_embeddings)",
    # Its convolution reads the memory of the weight: no quantized one can take its place.
    "mamba": r".*(A_log|conv1d\.weight)",
    "whisper": r".*embed.*",
}
"""Name of an architecture -> its weights of two or more axes that no product has."""


def built_of_zoo(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, batch = architectures.built(name)
    return model, [batch, *(architectures.ARCHITECTURES[name].batch() for _ in range(2))]


def recipes(name: str, model: nn.Module, recipe: Any) -> dict[str, Any]:
    """Ask for every weight but those that no product has."""
    targets = qtorch.model.targets.find_targets(model, recipe, None)
    slots = [target.slot for target in targets if not any(_is_left(name, slot.name) for slot in target.slots)]
    return {slot.name: recipe for slot in slots}


def _is_left(name: str, weight: str) -> bool:
    return re.fullmatch(LEFT[name], weight) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(["gpt2"], LEFT))
def test_every_weight_is_calibrated_or_its_row_says_why(name: str) -> None:
    model, data = built_of_zoo(name)
    with torch.no_grad():
        wanted = model(**data[0]).logits
    asked = recipes(name, model, auto(INT4, data))
    report = qtorch.quantize_(model, asked)
    assert len(report.quantized) == len(asked)
    for row in report.skipped:
        assert _is_left(name, row.name), row.name
    for row in report.quantized:
        of = row.calibration
        assert of is not None, row.name
        assert of.method.startswith("gptq + descent"), (row.name, of.method)
        assert of.tokens > 0, row.name
        assert 0 < of.error < of.nearest_error, row.name
    with torch.no_grad():
        error = (model(**data[0]).logits - wanted).norm() / wanted.norm()
    assert 0 < float(error) < 0.5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_weights_of_a_model_are_calibrated_without_their_names(name: str) -> None:
    model, data = built_of_zoo(name)
    report = qtorch.quantize_(model, gptq(INT4, data, strict=True))
    assert all(row.calibration and row.calibration.tokens for row in report.quantized)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(["t5"], ["t5", "mixtral"]))
def test_outputs_of_its_blocks_are_kept_on_disk(name: str, tmp_path: Path) -> None:
    """Blocks that return biases of positions beside hidden states, a decoder that reads an encoder, fused experts."""
    model, data = built_of_zoo(name)
    other, _ = built_of_zoo(name)
    recipe = gptq(INT4, data)
    qtorch.quantize_(model, recipes(name, model, recipe))
    asked = recipes(name, other, recipe)
    calls = 0

    def dying(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise ZeroDivisionError
        return model(**batch)

    dies = {key: gptq(INT4, data, forward=dying) for key in asked}
    with pytest.raises(ZeroDivisionError):
        qtorch.quantize_(other, dies, resume=tmp_path / "kept")
    assert list((tmp_path / "kept").glob("unit-*"))
    qtorch.quantize_(other, dies, resume=tmp_path / "kept")
    test_resume.assert_same(test_resume.bits(other), test_resume.bits(model))


class Transposed(nn.Module):
    """Experts as (experts, inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.weight[0], x @ self.weight[1]])
