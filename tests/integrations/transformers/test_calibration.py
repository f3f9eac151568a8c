"""`QtorchConfig(recipe, calibration=...)` gives the model that `quantize_` gives after loading."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoTokenizer, LlamaForCausalLM

from qtorch import lut_weight_only, quantize_
from qtorch.calibration import auto, gptq, importance_weighted
from qtorch.calibration.texts import token_batches
from qtorch.integrations.transformers import QtorchConfig
from tests.cli.tiny import save_llama
from tests.fast_part import slow_but
from tests.integrations.transformers.tiny_models import (
    CASES,
    EXPERTS,
    I4,
    I8,
    assert_same,
    build,
    load,
    quantized_names,
)
from tests.refusals import refuses


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (2, 16), generator=generator)} for _ in range(count)]


@pytest.mark.parametrize("method", slow_but([gptq], ["gptq", "auto", gptq]))
def test_batches(method: Any, folder: Path) -> None:
    data = batches()
    model = load(folder, I4, calibration=data, calibration_method=method)
    wanted = CASES["llama"].kind.from_pretrained(folder)
    report = quantize_(wanted, {"lm_head": None, r".*": (auto if method == "auto" else gptq)(I4, data)})
    assert_same(model, wanted)
    ours = model.hf_quantizer.report
    assert [row.name for row in ours.quantized] == [row.name for row in report.quantized]
    for mine, row in zip(ours.quantized, report.quantized, strict=True):
        assert mine.calibration.tokens == 3 * 2 * 16
        assert (mine.calibration.error, mine.sqnr) == (row.calibration.error, row.sqnr)
    reasons = {row.name: row.detail for row in ours.skipped}
    assert "left by default" in reasons["lm_head.weight"]


def test_it_is_saved_and_loaded_without_the_data(folder: Path, tmp_path: Path) -> None:
    config = QtorchConfig(I4, calibration=batches(), calibration_method="gptq")
    model = CASES["llama"].kind.from_pretrained(folder, quantization_config=config)
    assert config.calibration is not None
    assert model.config.quantization_config.calibration is None
    model.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved" / "config.json").read_text()
    assert "int4" in text.lower()
    assert "calibration_" not in text
    assert_same(CASES["llama"].kind.from_pretrained(tmp_path / "saved"), model)


def test_a_mapping_calibrates_each_of_its_recipes(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)
    model = load(tmp_path, {EXPERTS: I4, r".*": I8}, name="mixtral", calibration=batches(), calibration_method="gptq")
    assert any(name.endswith("experts.gate_up_proj") for name in quantized_names(model))
    assert all(row.calibration.tokens > 0 for row in model.hf_quantizer.report.quantized)


def test_recipes_that_have_data_themselves(folder: Path) -> None:
    data = batches()
    for recipe in (gptq(I4, data), importance_weighted(lut_weight_only(bits=3, group_size=64), data)):
        wanted = CASES["llama"].kind.from_pretrained(folder)
        quantize_(wanted, {"lm_head": None, r".*": recipe})
        assert_same(load(folder, recipe), wanted)


TEXTS = ["w1 w2 w3 w4 w5", "w6 w7 " * 30, "w9 w10 w11"]


def test_texts_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = QtorchConfig(I4, calibration=TEXTS, calibration_method="gptq", calibration_length=16)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    data = token_batches(TEXTS, AutoTokenizer.from_pretrained(tmp_path), length=16)
    wanted = LlamaForCausalLM.from_pretrained(tmp_path)
    quantize_(wanted, {"lm_head": None, r".*": gptq(I4, data)})
    assert_same(model, wanted)
    assert {row.calibration.tokens for row in model.hf_quantizer.report.quantized} == {5 + 60 + 3}


def test_what_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")
    build("t5").save_pretrained(tmp_path / "t5")
    refuses("has no tokenizer", lambda: load(tmp_path / "llama", I4, calibration=TEXTS))
    refuses("takes more than a text", lambda: load(tmp_path / "t5", {r".*\.q": I4}, name="t5", calibration=TEXTS))
    with pytest.raises(ValueError, match="no method 'magic'; known are auto, gptq"):
        load(tmp_path / "llama", I4, calibration=batches(), calibration_method="magic")
    refuses("at least one batch", lambda: load(tmp_path / "llama", I4, calibration=[]))


def test_tokens_of_texts(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path))
    (batch,) = token_batches(TEXTS, tokenizer, length=16)
    assert batch["attention_mask"].sum(1).tolist() == [5, 16, 16, 16, 12, 3]
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 8, 9, *[0] * 11]
    assert batch["input_ids"][4][:3].tolist() == [10, 11, 10]
    (batch,) = token_batches(TEXTS, tokenizer, length=16, tokens=30)
    assert batch["attention_mask"].sum(1).tolist() == [5, 16, 9]
    assert len(token_batches(["w1 w2 " * 5000], tokenizer, length=1000)) == 3
    refuses("takes a list of texts", lambda: token_batches("w1 w2", tokenizer), TypeError)
    refuses("have no tokens", lambda: token_batches(["", " "], tokenizer))
