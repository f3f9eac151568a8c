"""Models of transformers of many kinds: `auto` calibrates every weight that is multiplied, or says why it does not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import qtorch
from qtorch import quantize_
from qtorch.calibration import auto, gptq
from qtorch.model.targets import find_targets
from tests.calibration.test_resume import assert_same, bits
from tests.fast_part import slow_but
from tests.zoo import architectures

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


def built(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, batch = architectures.built(name)
    return model, [batch, *(architectures.ARCHITECTURES[name].batch() for _ in range(2))]


def recipes(name: str, model: nn.Module, recipe: Any) -> dict[str, Any]:
    """Ask for every weight but those that no product has."""
    targets = find_targets(model, recipe, None)
    slots = [target.slot for target in targets if not any(_is_left(name, slot.name) for slot in target.slots)]
    return {slot.name: recipe for slot in slots}


def _is_left(name: str, weight: str) -> bool:
    return re.fullmatch(LEFT[name], weight) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(["gpt2"], LEFT))
def test_every_weight_is_calibrated_or_its_row_says_why(name: str) -> None:
    model, data = built(name)
    with torch.no_grad():
        wanted = model(**data[0]).logits
    asked = recipes(name, model, auto(INT4, data))
    report = quantize_(model, asked)
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
    model, data = built(name)
    report = quantize_(model, gptq(INT4, data, strict=True))
    assert all(row.calibration and row.calibration.tokens for row in report.quantized)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(["t5"], ["t5", "mixtral"]))
def test_outputs_of_its_blocks_are_kept_on_disk(name: str, tmp_path: Path) -> None:
    """Blocks that return biases of positions beside hidden states, a decoder that reads an encoder, fused experts."""
    model, data = built(name)
    other, _ = built(name)
    recipe = gptq(INT4, data)
    quantize_(model, recipes(name, model, recipe))
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
        quantize_(other, dies, resume=tmp_path / "kept")
    assert list((tmp_path / "kept").glob("unit-*"))
    quantize_(other, dies, resume=tmp_path / "kept")
    assert_same(bits(other), bits(model))


class Transposed(nn.Module):
    """Experts as (experts, inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.weight[0], x @ self.weight[1]])


def test_experts_of_an_unknown_module_are_rounded_to_nearest_and_the_report_says_so() -> None:
    model = Transposed()
    weight = model.weight.detach().clone()
    data = [torch.randn(20, 32)]
    with pytest.raises(ValueError, match="products sum over another axis"):
        quantize_(model, {"weight": gptq(INT4, data, strict=True)})
    report = quantize_(model, {"weight": auto(INT4, data)})
    (row,) = report.quantized
    assert "products sum over another axis" in row.calibration.method
    assert torch.equal(model.weight.dequantize(), INT4.apply(weight).dequantize())


def test_experts_stored_the_other_way_around_are_calibrated_along_their_inputs() -> None:
    model = Transposed()
    x = torch.randn(200, 32)
    wanted = model(x).detach()
    report = quantize_(model, auto(INT4, [x]), targets=qtorch.find_uses(model, x))
    (row,) = report.quantized
    assert row.calibration.tokens == 200
    assert 0 < row.calibration.error < row.calibration.nearest_error
    assert 0 < float((model(x) - wanted).norm() / wanted.norm()) < 0.15
