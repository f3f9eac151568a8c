"""A model that `quantize_` changed after loading knows how to save itself, and how to become float again."""

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from qtorch import dequantize_, get_model_size_in_bytes, int8_weight_only, load_quantized, quantize_, save_quantized
from qtorch.integrations.transformers import QtorchConfig
from qtorch.training import qat
from tests.every_recipe import NAMES, make
from tests.integrations.transformers.tiny_models import CASES, EXPERTS, I4, I8, assert_same, build, quantized_names
from tests.refusals import refuses

X = torch.arange(6)[None]


def test_attributes_and_shared_configs(tmp_path: Path) -> None:
    model = build("llama")
    quantize_(model, I8)
    assert model.is_quantized
    assert model.quantization_method == "qtorch"
    assert model.config.quantization_config is model.hf_quantizer.quantization_config
    assert model.config.quantization_config.recipe == I8
    assert (model.hf_quantizer.is_trainable, model.hf_quantizer.is_qat_trainable) == (True, False)
    assert model.hf_quantizer.is_compileable
    model = build("llama")
    quantize_(model, I8, dry_run=True)
    refuses("matches no", lambda: quantize_(model, {"nowhere": I8}))
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    model = build("llama")
    quantize_(model, I4)
    quantize_(model, {"model.embed_tokens": I8})
    assert model.config.quantization_config.recipe == {"model.embed_tokens.weight": I8, r".*": I4}
    one = build("llama")
    other = type(one)(one.config)
    quantize_(one, I8)
    other.save_pretrained(tmp_path / "float")
    one.save_pretrained(tmp_path / "quantized")
    assert "qtorch" not in (tmp_path / "float" / "config.json").read_text()
    assert not (tmp_path / "float" / "README.md").exists()
    assert_same(type(one).from_pretrained(tmp_path / "float"), other)
    assert_same(type(one).from_pretrained(tmp_path / "quantized"), one)
    model = build("mixtral")
    quantize_(model, {EXPERTS: I8})
    assert model.hf_quantizer.is_compileable
    quantize_(training := build("mixtral"), {EXPERTS: qat(int8_weight_only())})
    assert not training.hf_quantizer.is_compileable
    refuses("version 2", lambda: QtorchConfig(version=2))


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_a_model_is_that_of_its_codes(name: str) -> None:
    model = build("llama")
    before = model.get_memory_footprint()
    report = quantize_(model, {"lm_head": None, r".*": make(name, 32)})
    assert model.get_memory_footprint() == get_model_size_in_bytes(model) < before
    assert before - model.get_memory_footprint() == report.bytes_before - report.bytes_after


@pytest.mark.parametrize("keys", [["model.embed_tokens"], ["lm_head"], ["model.embed_tokens", "lm_head"]])
def test_quantized_tables_cannot_be_resized(keys: list[str]) -> None:
    model = build("tied_llama" if len(keys) == 2 else "llama")
    quantize_(model, dict.fromkeys(keys, I8))
    rows, wanted = model.config.vocab_size, model(X).logits
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    for arguments in ((rows + 1,), (rows - 1,), (None, 7)):
        with pytest.raises(ValueError, match=f"^resize_token_embeddings: .*its {rows} rows .*dequantize_"):
            model.resize_token_embeddings(*arguments)
    assert torch.equal(model(X).logits, wanted)
    dequantize_(model)
    assert len(model.resize_token_embeddings(rows + 1).weight) == rows + 1


@pytest.mark.parametrize("by_method", [False, True])
def test_dequantize(tmp_path: Path, by_method: bool) -> None:
    model = build("tied_llama")
    quantize_(model, {"model.embed_tokens": I8, "lm_head": I8, r".*": I4})
    expected = model(X).logits
    model.save_pretrained(tmp_path / "q")
    model.dequantize() if by_method else dequantize_(model)
    assert model.is_quantized is False
    assert getattr(model, "hf_quantizer", None) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(X).logits, expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in (tmp_path / "float" / "config.json").read_text()
    assert_same(type(model).from_pretrained(tmp_path / "float"), model)
    loaded = type(model).from_pretrained(tmp_path / "q").dequantize(dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert not quantized_names(loaded)


def test_parts_and_quantizing_further(tmp_path: Path) -> None:
    model = build("llama")
    quantize_(model.model.layers[0], I8)
    assert getattr(model, "hf_quantizer", None) is None
    model.save_pretrained(tmp_path)
    assert len(quantized_names(model)) == 7
    assert_same(type(model).from_pretrained(tmp_path), model)
    model = build("mixtral")
    quantize_(model, {EXPERTS: I8, r".*": I4})
    save_quantized(model, tmp_path / "own.safetensors")
    loaded = load_quantized(build("mixtral"), tmp_path / "own.safetensors")
    loaded.save_pretrained(tmp_path / "folder")
    assert_same(CASES["mixtral"].kind.from_pretrained(tmp_path / "folder"), model)
    model = build("llama")
    quantize_(model, {"lm_head": None, r".*": I8})
    dequantize_(copy.deepcopy(model))  # a copy has a quantizer of its own
    assert model.hf_quantizer is not None
    model.save_pretrained(tmp_path / "one")
    loaded = type(model).from_pretrained(tmp_path / "one")
    assert_same(loaded, model)
    quantize_(loaded, {"lm_head": I4})
    loaded.save_pretrained(tmp_path / "two")
    again = type(model).from_pretrained(tmp_path / "two")
    assert_same(again, loaded)
    assert "lm_head.weight" in quantized_names(again)
