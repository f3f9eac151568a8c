"""What `from_pretrained(quantization_config=...)` chooses, refuses and reports."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from qtorch import int4_weight_only, int8_weight_only, quantize_
from qtorch.integrations.transformers import QtorchConfig
from qtorch.training import convert, int8_mixed_precision_training, lsq, qat
from tests.integrations.transformers.tiny_models import CASES, I4, I8, assert_same, build, load, quantized_names
from tests.refusals import refuses

LAYER = "model.layers.0"
PROJECTIONS = {f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkvo"}
PROJECTIONS |= {f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(("recipe", "skipped", "quantized"), [
    (I8, None, PROJECTIONS),
    # What a mapping names is quantized though the default leaves it, but `modules_to_not_convert` wins.
    ({"lm_head": I8}, None, {"lm_head.weight"}),
    ({"lm_head": I8, r".*": I4}, ["lm_head"], PROJECTIONS),
    (
        I8,
        [r".*\.self_attn", "mlp.up_proj"],
        {"lm_head.weight", *(f"{LAYER}.mlp.{n}_proj.weight" for n in ("gate", "down"))},
    ),
])  # fmt: skip
def test_what_is_quantized(folder: Path, recipe: Any, skipped: Any, quantized: set[str]) -> None:
    model = load(folder, recipe, modules_to_not_convert=skipped)
    assert quantized_names(model) == quantized
    reasons = {row.name: row.detail for row in model.hf_quantizer.report.skipped}
    assert ("modules_to_not_convert" in reasons.values()) == (skipped is not None)
    assert "embed" in reasons["model.embed_tokens.weight"] or isinstance(recipe, dict)


def test_sizes_kernels_and_training(folder: Path) -> None:
    report = load(folder, I8).hf_quantizer.report
    wanted = quantize_(build("llama"), {"lm_head": None, r".*": I8})
    rows = {row.name: row for row in report.quantized}
    for row in wanted.quantized:
        mine = rows[row.name]
        assert (mine.bytes_before, mine.bytes_after, mine.kernel) == (row.bytes_before, row.bytes_after, row.kernel)
        assert mine.sqnr is None
    assert report.model_bytes_after == wanted.model_bytes_after
    assert report.model_bytes_before == wanted.model_bytes_before
    assert report.quantized_parameters == wanted.quantized_parameters
    for recipe in (int8_mixed_precision_training(), qat(I8), lsq()):
        model = load(folder, recipe)
        assert model.hf_quantizer.is_qat_trainable
        wanted = build("llama")
        quantize_(wanted, {"lm_head": None, r".*": recipe})
        x = torch.arange(6)[None]
        model.train()(x)
        wanted.train()(x)
        model.eval()
        wanted.eval()
        assert torch.equal(model(x).logits, wanted(x).logits)
        quantize_(model, convert())
        assert not model.hf_quantizer.is_qat_trainable


def test_experts_dtypes_and_what_is_refused(folder: Path, tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    model = load(tmp_path / "mixtral", I8, name="mixtral")
    rows = {row.name: row for row in model.hf_quantizer.report.layers}
    assert rows["model.layers.0.mlp.experts.gate_up_proj"].action == "quantized"
    assert rows["model.layers.0.mlp.gate.weight"].detail.startswith("a router")
    kind = CASES["llama"].kind
    model = kind.from_pretrained(folder, quantization_config=QtorchConfig(I8), dtype=torch.bfloat16)
    wanted = kind.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(wanted, {"lm_head": None, r".*": I8})
    assert_same(model, wanted)
    build("tied_llama").save_pretrained(tmp_path / "tied")
    with pytest.raises(ValueError, match="a tied weight takes one recipe"):
        load(tmp_path / "tied", {"lm_head": I8, "model.embed_tokens": I4}, name="tied_llama")
    with pytest.raises(ValueError, match="no weight of LlamaForCausalLM is left"):
        load(folder, I8, modules_to_not_convert=["model", "lm_head"])
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    refuses("issues during automatic conversion", lambda: load(tmp_path / "nan", int8_weight_only()), RuntimeError)


@pytest.mark.parametrize("targets", ["all", ["linear", "embedding"]], ids=str)
def test_targets(targets: object, folder: Path, tmp_path: Path) -> None:
    model = CASES["llama"].kind.from_pretrained(folder, quantization_config=QtorchConfig(I8, targets=targets))
    rows = {row.name: row for row in model.hf_quantizer.report.layers}
    assert rows["model.embed_tokens.weight"].action == "quantized"
    model.save_pretrained(tmp_path / "again")
    again = CASES["llama"].kind.from_pretrained(tmp_path / "again")
    assert again.config.quantization_config.targets == targets
    assert_same(again, model)


@pytest.mark.parametrize(("recipe", "words"), [
    (None, "takes a recipe, or a mapping"),
    ("int8", "takes a recipe, or a mapping"),
    (convert(), "call quantize_ after loading"),
    (int4_weight_only(group_size=48), r"q_proj.*48"),
    ({"nowhere": I8}, "'nowhere' matches no"),
    ({"model.embed_tokens": I8, r"model\.embed.*": I4}, "taken by entries before it"),
])  # fmt: skip
def test_what_is_refused(folder: Path, recipe: Any, words: str) -> None:
    refuses(words, lambda: load(folder, recipe))
