"""Calibration by data of transformers, and generation with the result."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM

import qtorch
from qtorch.calibration import auto, gptq, importance_weighted
from qtorch.calibration.data import token_batches
from qtorch.integrations.transformers import QtorchConfig, compile_generate
from tests.cli.tiny import save_llama
from tests.fast_part import slow_but
from tests.integrations.transformers import tiny_models
from tests.integrations.transformers.tiny_models import CASES, EXPERTS, I4, I8, assert_same, build, load
from tests.refusals import refuses


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (2, 16), generator=generator)} for _ in range(count)]


@pytest.mark.parametrize("method", slow_but([gptq], ["gptq", "auto", gptq]))
def test_batches(method: Any, folder: Path) -> None:
    data = batches()
    model = load(folder, I4, calibration=data, calibration_method=method)
    wanted = CASES["llama"].kind.from_pretrained(folder)
    report = qtorch.quantize_(wanted, {"lm_head": None, r".*": (auto if method == "auto" else gptq)(I4, data)})
    assert_same(model, wanted)
    ours = model.hf_quantizer.report
    assert [row.name for row in ours.quantized] == [row.name for row in report.quantized]
    for mine, row in zip(ours.quantized, report.quantized, strict=True):
        assert mine.calibration.tokens == 3 * 2 * 16
        assert (mine.calibration.error, mine.sqnr) == (row.calibration.error, row.sqnr)
    reasons = {row.name: row.detail for row in ours.skipped}
    assert "left by default" in reasons["lm_head.weight"]


def test_saved_without_data_and_what_is_refused(folder: Path, tmp_path: Path) -> None:
    config = QtorchConfig(I4, calibration=batches(), calibration_method="gptq")
    model = CASES["llama"].kind.from_pretrained(folder, quantization_config=config)
    assert config.calibration is not None
    assert model.config.quantization_config.calibration is None
    model.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved" / "config.json").read_text()
    assert "int4" in text.lower()
    assert "calibration_" not in text
    assert_same(CASES["llama"].kind.from_pretrained(tmp_path / "saved"), model)
    save_llama(tmp_path)
    config = QtorchConfig(I4, calibration=TEXTS, calibration_method="gptq", calibration_length=16)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    data = token_batches(TEXTS, AutoTokenizer.from_pretrained(tmp_path), length=16)
    wanted = LlamaForCausalLM.from_pretrained(tmp_path)
    qtorch.quantize_(wanted, {"lm_head": None, r".*": gptq(I4, data)})
    assert_same(model, wanted)
    assert {row.calibration.tokens for row in model.hf_quantizer.report.quantized} == {5 + 60 + 3}
    build("llama").save_pretrained(tmp_path / "llama")
    build("t5").save_pretrained(tmp_path / "t5")
    refuses("has no tokenizer", lambda: load(tmp_path / "llama", I4, calibration=TEXTS))
    refuses("takes more than a text", lambda: load(tmp_path / "t5", {r".*\.q": I4}, name="t5", calibration=TEXTS))
    with pytest.raises(ValueError, match="no method 'magic'; known are auto, gptq"):
        load(tmp_path / "llama", I4, calibration=batches(), calibration_method="magic")
    refuses("at least one batch", lambda: load(tmp_path / "llama", I4, calibration=[]))
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path))
    (batch,) = token_batches(TEXTS, tokenizer, length=16)
    assert batch["attention_mask"].sum(1).tolist() == [5, 16, 16, 16, 12, 3]
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 8, 9, *[0] * 11]
    assert batch["input_ids"][4][:3].tolist() == [10, 11, 10]
    (batch,) = token_batches(TEXTS, tokenizer, length=16, tokens=30)
    assert batch["attention_mask"].sum(1).tolist() == [5, 16, 9]
    assert len(token_batches(["w1 w2 " * 5000], tokenizer, length=1000)) == 3
    refuses("takes a list of texts", lambda: token_batches("w1 w2", tokenizer), TypeError)
    refuses("no text has two tokens", lambda: token_batches(["", " "], tokenizer))


def test_mappings_refusals_and_attention(folder: Path, tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    model = load(
        tmp_path / "mixtral", {EXPERTS: I4, r".*": I8}, name="mixtral", calibration=batches(), calibration_method="gptq"
    )
    assert any(name.endswith("experts.gate_up_proj") for name in tiny_models.quantized_names(model))
    assert all(row.calibration.tokens > 0 for row in model.hf_quantizer.report.quantized)
    data = batches()
    for recipe in (gptq(I4, data), importance_weighted(qtorch.lut_weight_only(bits=3, group_size=64), data)):
        wanted = CASES["llama"].kind.from_pretrained(folder)
        qtorch.quantize_(wanted, {"lm_head": None, r".*": recipe})
        assert_same(load(folder, recipe), wanted)
    with pytest.raises(TypeError, match="compile_generate takes a model of transformers, got Linear"):
        compile_generate(torch.nn.Linear(2, 2), 16)
    refuses("LlamaModel does not generate from ids", lambda: compile_generate(llama().model, 16))
    refuses("got max_length=4 and sequences=1, want more than 4 tokens", lambda: compile_generate(llama(), 4))
    model = llama()
    model._supports_default_dynamic_cache = lambda: False
    refuses("transformers does not compile LlamaForCausalLM", lambda: compile_generate(model, 16, progress=False))
    assert attention_of(compiled(llama("eager"))) == "eager"
    assert attention_of(compiled(llama())) == "qtorch"


TEXTS = ["w1 w2 w3 w4 w5", "w6 w7 " * 30, "w9 w10 w11"]


SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 96,
}  # fmt: skip
TOKENS = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 8, "max_new_tokens": 8}


def llama(attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(length, sequences=1):
    ids = torch.randint(0, 96, (sequences, length))
    return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (None, None),
        (qtorch.int8_weight_only(), None),
        (qtorch.int4_weight_only(group_size=32), {"cpp_wrapper": True}),
        (qtorch.int8_dynamic_activation_int4_weight(), None),
    ],
    ids=str,
)
def test_one_graph_writes_the_same_tokens(recipe, options):
    model = llama()
    if recipe is not None:
        qtorch.quantize_(model, recipe)
    wanted = [model.generate(**prompt(length, 2), **TOKENS) for length in map(seeded, (5, 11))]
    settings = compile_generate(model, 40, sequences=2, progress=False, options=options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with qtorch.kernels.record_kernels() as ran:
        got = [model.generate(**prompt(length, 2), **TOKENS, **settings) for length in map(seeded, (5, 11))]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert all(map(torch.equal, got, wanted))
    assert ran.count("float_attention") == 2 * 7 * SHAPE["num_hidden_layers"]  # the first token is the prompt's
    # What was chosen for this process is not saved.
    assert model.generation_config.cache_implementation is model.generation_config.compile_config is None


def seeded(length):
    torch.manual_seed(length)
    return length


def compiled(model):
    """Without a compiler."""
    before = torch.compile
    torch.compile = lambda call, **options: call
    try:
        compile_generate(model, 16, progress=False)
    finally:
        torch.compile = before
    return model


def attention_of(model):
    return model.config._attn_implementation
