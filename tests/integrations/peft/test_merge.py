"""Adapters on linear layers: training, files, disabling, merging, unmerging."""

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from qtorch import AffineQuantizedTensor, dequantize_, load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.peft import prepare_for_adapters, requantize_merged
from tests.integrations.peft import models
from tests.integrations.peft.models import IDS, RECIPES, adapted, base_of, llama, output, quantized_llama, randomized
from tests.movement.holding import through_file
from tests.refusals import refuses
from tests.zoo.architectures import built

Q_PROJ = "model.layers.0.self_attn.q_proj"
KINDS = pytest.mark.parametrize("recipe", RECIPES)


BOUNDS = {"int8": (1e-4, 1e-2), "int8_dynamic": (1e-4, 1.5e-2), "int4": (3e-3, 8e-2), "nf4": (3e-3, 0.12)}
"""What rounding the merged weight to codes changes in logits that are below 0.6."""


@pytest.mark.parametrize("dora", [False, True])
@KINDS
def test_merge_and_unmerge(recipe: str, dora: bool) -> None:
    model = adapted(quantized_llama(recipe), use_dora=dora)
    before, y = base_of(model, Q_PROJ).weight, output(model)
    with model.disable_adapter():
        assert (output(model) - y).abs().max() > 0.1
    model.merge_adapter()
    weight = base_of(model, Q_PROJ).weight
    assert type(weight) is torch.nn.Parameter
    assert not weight.requires_grad
    # int8_dynamic: a float weight does not round its inputs any more.
    tolerance = 2e-2 if recipe == "int8_dynamic" else 1e-5
    torch.testing.assert_close(output(model), y, rtol=0, atol=tolerance)
    model.unmerge_adapter()
    assert base_of(model, Q_PROJ).weight is before
    assert torch.equal(output(model), y)
    for safe in () if dora else (False, True):
        with requantize_merged():
            model.merge_adapter(safe_merge=safe)
        weight = base_of(model, Q_PROJ).weight
        assert isinstance(weight, QuantizedTensor)
        assert weight.scheme == before.scheme
        low, high = BOUNDS[recipe]
        assert low < (output(model) - y).abs().max() < high
        model.unmerge_adapter()
        assert torch.equal(output(model), y)
    merged = model.merge_and_unload(safe_merge=True)
    assert isinstance(merged.model.layers[0].self_attn.k_proj.weight, QuantizedTensor)  # has no adapter
    torch.testing.assert_close(output(merged), y, rtol=0, atol=tolerance)
    # From here it is quantized like any model.
    quantize_(merged, {"lm_head": None, r".*": RECIPES[recipe]})
    assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)


def test_requantized_codes_are_the_nearest_and_bf16_merges_in_fp32() -> None:
    model = adapted(quantized_llama("int8"))
    layer = model.get_submodule(f"base_model.model.{Q_PROJ}")
    exact = layer.get_base_layer().weight.dequantize() + layer.get_delta_weight("default")
    with requantize_merged():
        merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert isinstance(merged, AffineQuantizedTensor)
    error = (merged.dequantize() - exact).abs() / merged.dense_scale()
    assert 0.4 < error.max() <= 0.5 + 1e-4
    model = adapted(quantized_llama("int8", torch.bfloat16), lora_alpha=4)
    layer = model.get_submodule(f"base_model.model.{Q_PROJ}")
    weight = layer.get_base_layer().weight
    delta = layer.get_delta_weight("default")
    expected = (weight.dequantize(torch.float32) + delta).to(torch.bfloat16)
    model.merge_adapter()
    assert torch.equal(layer.get_base_layer().weight, expected)


def test_two_adapters_merge_one_after_the_other() -> None:
    model = adapted(quantized_llama("int4"))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    randomized(model)
    model.base_model.set_adapter(["default", "other"])
    y, codes = output(model), base_of(model, Q_PROJ).weight.inner_tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter(["default"])
        model.merge_adapter(["other"])
    apart = output(model)
    model.unmerge_adapter()
    model.merge_adapter()
    assert torch.equal(output(model), apart)
    model.unmerge_adapter()
    assert torch.equal(output(model), y)
    assert all(torch.equal(codes[name], t) for name, t in base_of(model, Q_PROJ).weight.inner_tensors.items())


def test_biases_and_broken_adapters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).bfloat16()
    quantize_(model, RECIPES["int8"])
    bias = model[0].bias.detach().clone()
    model = randomized(get_peft_model(model, LoraConfig(r=4, target_modules=["0"], lora_bias=True)), 0.3)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    y = model(x)
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        base = model.base_model.model[0].get_base_layer()
        assert base.bias.dtype == torch.bfloat16
        assert not torch.equal(base.bias, bias)
        torch.testing.assert_close(model(x), y, rtol=0.05, atol=0.05)
        model.unmerge_adapter()
        assert torch.equal(base.bias, bias)
        assert torch.equal(model(x), y)
    model = adapted(quantized_llama("int8"))
    y = output(model)
    layer = model.get_submodule(f"base_model.model.{Q_PROJ}")
    good = layer.lora_B["default"].weight.data.clone()
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    refuses("NaNs detected", lambda: model.merge_adapter(safe_merge=True))
    with requantize_merged(), pytest.raises(ValueError, match="NaN or infinite values in the merged weights"):
        layer.merge()
    assert not layer.merged
    layer.lora_B["default"].weight.data = good
    assert torch.equal(output(model), y)


def test_casts_copies_and_batches() -> None:
    model = adapted(quantized_llama("int8"))
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    weight = base_of(model, Q_PROJ).weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.dtype == torch.bfloat16
    assert output(model).dtype == torch.bfloat16
    model = adapted(quantized_llama("int8"))
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    randomized(model)
    with torch.no_grad():
        mixed = model(input_ids=IDS, adapter_names=["default", "other"]).logits
    for row, name in enumerate(("default", "other")):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[row], output(model)[row], rtol=0, atol=1e-6)
    model = adapted(quantized_llama("int4"))
    y = output(model)
    model.merge_adapter()
    other = copy.deepcopy(model)
    other.unmerge_adapter()
    assert torch.equal(output(other), y)
    assert model.get_submodule(f"base_model.model.{Q_PROJ}").merged
    layer = through_file(model.get_submodule(f"base_model.model.{Q_PROJ}"), weights_only=False)
    layer.unmerge()
    assert isinstance(layer.get_base_layer().weight, QuantizedTensor)


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", "nf4"])
def test_training_and_files(recipe: str, tmp_path: Path) -> None:
    base = quantized_llama(recipe)
    save_quantized(base, tmp_path / "base.safetensors")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    codes = {k: v.clone() for k, v in base_of(model, Q_PROJ).weight.inner_tensors.items()}
    losses = []
    model.train()
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(codes[k], v) for k, v in base_of(model, Q_PROJ).weight.inner_tensors.items())
    y = output(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    assert {f.name for f in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}

    fresh = load_quantized(llama(), tmp_path / "base.safetensors")
    for options in ({}, {"low_cpu_mem_usage": True}):
        loaded = PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path / "adapter", **options)
        assert torch.equal(output(loaded), y)
        loaded.merge_adapter()
        loaded.unmerge_adapter()
        assert torch.equal(output(loaded), y)


def test_quantized_after_get_peft_model_and_dequantized() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    assert type(model.get_submodule(f"base_model.model.{Q_PROJ}")) is peft.tuners.lora.Linear
    quantize_(model, {r".*q_proj\.base_layer": RECIPES["int8"]})
    randomized(model)
    y = output(model)
    refuses(r"prepare_for_adapters\(model", lambda: model.merge_adapter(), NotImplementedError)
    prepare_for_adapters(model, gradient_checkpointing=False)
    model.merge_adapter()
    torch.testing.assert_close(output(model), y)
    assert [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n] == []
    assert any(p.requires_grad for p in model.parameters())
    model = adapted(quantized_llama("int8"))
    y = output(model)
    merged = dequantize_(model).merge_and_unload()
    torch.testing.assert_close(output(merged), y, rtol=0, atol=1e-5)
    base = quantized_llama("int8")
    before = output(base)
    base.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    randomized(base)
    assert not torch.equal(output(base), before)
    base.disable_adapters()
    assert torch.equal(output(base), before)


WITHOUT_TARGETS = ("ADAPTION_PROMPT", "LN_TUNING", "SHADOW", "TRAINABLE_TOKENS")
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10, "tinit": 2, "tfinal": 2}, "ADAPTION_PROMPT": {"adapter_layers": 1, "adapter_len": 4},
    "C3A": {"block_size": 16}, "IA3": {"feedforward_modules": []}, "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"r": 0, "oft_block_size": 16}, "POLY": {"n_tasks": 2}, "ROAD": {"group_size": 16},
    "TRAINABLE_TOKENS": {"token_indices": IDS[0, :2].tolist()}, "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 64},
}  # fmt: skip
GENERAL = {"target_modules": models.TARGETS, "r": 4, "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
OTHERS = {"XLORA", "FROD"}  # a mixture of trained LoRA adapters; refused, below


def adapter_config(name: str) -> peft.PeftConfig:
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[name]
    known = {field.name for field in dataclasses.fields(kind)}
    if name in WITHOUT_TARGETS:
        known.remove("target_modules")
    options = {key: value for key, value in GENERAL.items() if key in known}
    return kind(**{**options, **OPTIONS.get(name, {})})


@pytest.mark.parametrize("name", sorted({kind.value for kind in peft.PEFT_TYPE_TO_TUNER_MAPPING} - OTHERS))
def test_every_kind_of_adapter(name: str) -> None:
    """It computes, trains and merges on codes as on the floats that they stand for."""
    if name == "SHIRA" and not hasattr(peft.tuners.shira.mask_functions, "_get_in_out_features"):
        pytest.skip("this PEFT makes the mask like the weight, in codes")
    codes = quantized_llama("int8")
    plain, results, merges = output(codes), [], []
    for base in (codes, dequantized(codes)):
        torch.manual_seed(0)
        model: Any = get_peft_model(base, adapter_config(name))
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.05
        tasks = {"task_ids": torch.tensor([0, 1])} if name in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
        model(input_ids=IDS, labels=IDS, **tasks).loss.backward()
        with torch.no_grad():
            y = model.eval()(input_ids=IDS, **tasks).logits
        results.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
        try:
            model.merge_adapter()
        except (AttributeError, NotImplementedError, ValueError):
            merges.append(False)
            continue
        merges.append(True)
        torch.testing.assert_close(output(model), y, rtol=0, atol=1e-5)
        if hasattr(model.base_model, "unmerge_adapter") and base is codes and name != "OSF":
            model.unmerge_adapter()
            assert torch.equal(output(model), y)
    assert results[0][0].shape != plain.shape or (results[0][0] - plain).abs().max() > 1e-4
    assert merges[0] == merges[1]
    assert len(results[0]) > 1
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def dequantized(model: Any) -> Any:
    model = copy.deepcopy(model)
    dequantize_(model)
    return model


@pytest.mark.skipif("FROD" not in peft.PEFT_TYPE_TO_CONFIG_MAPPING, reason="added in PEFT 0.20")
def test_adapters_that_decompose_the_weights_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"FRoD\), need a float model: dequantize_\(model\)"):
        get_peft_model(quantized_llama("int8"), adapter_config("FROD"))


@pytest.mark.parametrize("dora", [False, True])
def test_transposed_weights_of_gpt2(dora: bool) -> None:
    base, _ = built("gpt2", vocab_size=128, n_embd=64, n_layer=1)
    quantize_(base, {r".*\.(c_attn|c_proj|c_fc)\.weight": RECIPES["int4"]})
    plain = output(base)
    model = adapted(base, target_modules=["c_attn"], use_dora=dora, fan_in_fan_out=True)
    assert (output(model) - plain).abs().max() > 1e-2
    models.merge_and_unmerge(model, lambda: output(model))


def test_modules_to_save_and_multihead_attention_are_refused() -> None:
    model = llama()
    quantize_(model, RECIPES["int8"])
    with pytest.raises(ValueError, match="modules_to_save trains a copy"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model = quantized_llama("int8")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert model.lm_head.modules_to_save["default"].weight.requires_grad

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(64, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    model = Block()
    quantize_(model, {"attention.in_proj_weight": RECIPES["int8"]})
    with pytest.raises(ValueError, match=r"LoRA on nn\.MultiheadAttention"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["attention"]))
