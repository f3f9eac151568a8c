"""Adapters on quantized layers: how they start, also on embeddings and convolutions."""

from pathlib import Path
from typing import Any

import pytest

peft = pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from qtorch import quantize_
from qtorch.dtypes import ConvWeight, QuantizedTensor
from qtorch.integrations.peft import initialize_from_quantization_error, requantize_merged
from tests.integrations.peft import models
from tests.integrations.peft.models import RECIPES, TARGETS, adapted, base_of, llama, output, quantized_llama
from tests.refusals import refuses

Q_PROJ = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{Q_PROJ}.weight"


def delta_of(model: Any, layer: str) -> Tensor:
    return model.get_submodule(f"base_model.model.{layer}").get_delta_weight("default").detach()


def tail(error: Tensor, rank: int) -> float:
    """The relative error of the best approximation of that rank."""
    singular = torch.linalg.svdvals(error)
    return float(singular[..., rank:].square().sum().sqrt() / singular.square().sum().sqrt())


@pytest.mark.parametrize("recipe", ["int4", "nf4"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 3}])
def test_linear_layers(recipe: str, options: dict[str, Any]) -> None:
    original, rank = llama(), 8
    base = quantized_llama(recipe)
    model = get_peft_model(base, LoraConfig(r=rank, target_modules=TARGETS, **options)).eval()
    error = (output(base) - output(original)).norm()
    left = initialize_from_quantization_error(model, original)
    assert len(left) == 3
    weight = original.state_dict()[WEIGHT]
    of_base = weight - base_of(model, Q_PROJ).weight.dequantize()
    best = tail(of_base, rank)
    assert 0 < best < 0.95
    assert left[WEIGHT] == pytest.approx(best, rel=1e-3)
    assert float((of_base - delta_of(model, Q_PROJ)).norm() / of_base.norm()) == pytest.approx(best, rel=1e-3)
    assert (output(model) - output(original)).norm() < 0.97 * error
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


def test_ranks_iterations_and_trained_tokens() -> None:
    original = llama()
    model = get_peft_model(quantized_llama("int4"), LoraConfig(r=80, target_modules=["q_proj"])).eval()
    left = initialize_from_quantization_error(model, original.state_dict())
    assert left[WEIGHT] < 1e-4
    total = base_of(model, Q_PROJ).weight.dequantize() + delta_of(model, Q_PROJ)
    torch.testing.assert_close(total, original.state_dict()[WEIGHT], rtol=0, atol=1e-6)
    original = llama()
    model = get_peft_model(quantized_llama("nf4"), LoraConfig(r=8, target_modules=TARGETS)).eval()
    one = initialize_from_quantization_error(model, original)
    before = base_of(model, Q_PROJ).weight.dequantize()
    five = initialize_from_quantization_error(model, original, iterations=5)
    weight = base_of(model, Q_PROJ).weight
    assert isinstance(weight, QuantizedTensor)
    assert not torch.equal(weight.dequantize(), before)
    assert sum(five.values()) < sum(one.values())
    of_all = original.state_dict()[WEIGHT] - weight.dequantize() - delta_of(model, Q_PROJ)
    before_error = (original.state_dict()[WEIGHT] - before).norm()
    assert float(of_all.norm() / before_error) == pytest.approx(five[WEIGHT], rel=1e-3)
    base = with_embedding("int8")
    plain = output(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 7]))
    ids = torch.tensor([[1, 3, 2, 7]])
    assert torch.equal(output(model.eval()), plain)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    tokens = next(p for name, p in model.named_parameters() if "trainable_tokens_delta" in name)
    tokens.data += tokens.grad.sign()
    model.eval()
    models.merge_and_unmerge(model, lambda: output(model, ids))


def test_batches_lower_the_error_of_the_outputs() -> None:
    original = nn.Sequential(nn.Linear(64, 48, bias=False))
    base = nn.Sequential(nn.Linear(64, 48, bias=False))
    base.load_state_dict(original.state_dict())
    quantize_(base, RECIPES["int4"])
    x = torch.randn(256, 64) @ torch.randn(64, 64) * torch.logspace(-2, 1, 64)
    weight = base[0].weight
    assert isinstance(weight, QuantizedTensor)
    # What the best matrix of rank 4 leaves of the outputs of the error (Eckart, Young and Mirsky).
    least = torch.linalg.svdvals(x @ (original[0].weight - weight.dequantize()).detach().t())[4:].norm().item()
    errors = []
    for batches in (None, [x]):
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["0"])).eval()
        left = initialize_from_quantization_error(model, original, batches=batches)
        assert left.keys() == {"0.weight"}
        errors.append((model(x) - original(x)).norm().item())
        base = model.unload()
    assert errors[1] < 0.8 * errors[0]
    assert least * 0.9999 < errors[1] < least * 1.01


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.conv = nn.Conv2d(32, 32, 3)


def test_embeddings_convolutions_and_dora() -> None:
    original, base = Others(), Others()
    base.load_state_dict(original.state_dict())
    quantize_(base, {"table": RECIPES["int4"], "conv": RECIPES["int4"]})
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["table", "conv"], lora_alpha=3))
    left = initialize_from_quantization_error(model, original)
    for name in ("table", "conv"):
        weight = original.get_submodule(name).weight
        error = (weight - base_of(model, name).weight.dequantize()).detach()
        assert left[f"{name}.weight"] == pytest.approx(tail(error.flatten(1), 8), rel=1e-3)
        got = float((error - delta_of(model, name)).norm() / error.norm())
        assert got == pytest.approx(left[f"{name}.weight"], rel=1e-3)
    original = llama()
    model = get_peft_model(quantized_llama("int4"), LoraConfig(r=64, target_modules=["q_proj"], use_dora=True)).eval()
    initialize_from_quantization_error(model, original)
    model.merge_adapter()
    torch.testing.assert_close(base_of(model, Q_PROJ).weight, original.state_dict()[WEIGHT], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_fused_experts(name: str) -> None:
    original, base = models.moe(name), models.moe(name)
    quantize_(base, {r".*\.experts\.(gate_up_proj|down_proj)": RECIPES["int4"]})
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, target_parameters=targets)).eval()
    left = initialize_from_quantization_error(model, original)
    prefix = "model.layers.0.mlp.experts"
    assert left.keys() == {f"{prefix}.gate_up_proj", f"{prefix}.down_proj"}
    for layer in (model.get_submodule(f"base_model.model.{prefix}{below}") for below in ("", ".base_layer")):
        weight = original.state_dict()[f"{prefix}.{layer.parameter_name}"]
        error = weight - layer.get_param().dequantize()
        got = float((error - layer.get_delta_weight("default").detach()).norm() / error.norm())
        assert got == pytest.approx(tail(error, 8), rel=1e-3)


def test_errors_leave_the_model_as_it_was_and_loftq_of_peft_is_refused() -> None:
    original = llama()
    model = get_peft_model(quantized_llama("int4"), LoraConfig(r=4, target_modules=TARGETS))
    before, state = output(model.eval()), original.state_dict()
    for arguments, options, words in [
        ((model, {k: v for k, v in state.items() if k != WEIGHT}), {}, f"no '{WEIGHT}'"),
        ((model, {**state, WEIGHT: torch.zeros(2, 2)}), {}, "has shape"),
        ((model, original, "x"), {}, "no LoRA layer with an adapter 'x'"),
        ((original, original), {}, "no LoRA layer"),
        ((model, original), {"iterations": 0}, "iterations must be"),
        ((model, original), {"iterations": 2, "batches": [1]}, "iterations must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            initialize_from_quantization_error(*arguments, **options)
    assert torch.equal(output(model), before)
    model.merge_adapter()
    refuses("unmerge_adapter first", lambda: initialize_from_quantization_error(model, original))
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights="loftq", loftq_config={"loftq_bits": 4})
    refuses("initialize_from_quantization_error", lambda: get_peft_model(quantized_llama("int4"), config))


@pytest.mark.parametrize("recipe", ["int8", "nf4"])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_residuals_are_quantized_again(recipe: str, init: str, tmp_path: Path) -> None:
    """PiSSA and OLoRA move a part of the base weight to the adapter; what is left keeps its kind of codes."""
    before = output(quantized_llama(recipe))
    base = quantized_llama(recipe)
    codes = base.model.layers[0].self_attn.q_proj.weight
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)).eval()
    weight = base_of(model, Q_PROJ).weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.scheme == codes.scheme
    assert not torch.equal(weight.dequantize(), codes.dequantize())
    total = weight.dequantize() + delta_of(model, Q_PROJ)
    largest = (total - codes.dequantize()).abs().max() / codes.dequantize().abs().max()
    assert 0 < largest < (0.02 if recipe == "int8" else 0.3)
    assert (output(model) - before).abs().max() < 0.3
    if init != "pissa_niter_4":  # it has random numbers in it
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(quantized_llama(recipe), tmp_path)
        assert torch.equal(output(loaded), output(model))


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "eva", "mica"])
def test_initializations_that_leave_the_base(init: str) -> None:
    base = quantized_llama("int8")
    weight = base.model.layers[0].self_attn.q_proj.weight
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init))
    assert base.model.layers[0].self_attn.q_proj.get_base_layer().weight is weight


KINDS = pytest.mark.parametrize("recipe", RECIPES)
EMBEDDINGS = [name for name in RECIPES if "dynamic" not in name]


def with_embedding(recipe: str, tied: bool = False) -> Any:
    model = llama(tie_word_embeddings=tied)
    quantize_(model, {"model.embed_tokens": RECIPES[recipe]})
    return model


@pytest.mark.parametrize("recipe", EMBEDDINGS)
@pytest.mark.parametrize("dora", [False, True])
def test_embedding(recipe: str, dora: bool) -> None:
    model = adapted(with_embedding(recipe), target_modules=["embed_tokens"], use_dora=dora)
    base = model.get_submodule("base_model.model.model.embed_tokens").get_base_layer()
    weight, y = base.weight, output(model)
    model.train()
    model(input_ids=torch.randint(1, 128, (1, 8)), labels=torch.randint(1, 128, (1, 8))).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    with model.disable_adapter():
        assert (output(model) - y).abs().max() > 1e-3
    models.merge_and_unmerge(model, lambda: output(model))
    assert base.weight is weight
    with requantize_merged():
        merged = model.merge_and_unload()
    assert isinstance(merged.model.embed_tokens.weight, QuantizedTensor)
    assert 0 < (output(merged) - y).abs().max() < 0.5


@pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`")
def test_merged_tied_embeddings_come_apart() -> None:
    """The adapter is on the embedding alone, so the head keeps the weight that both had."""
    model = adapted(with_embedding("int8", tied=True), target_modules=["embed_tokens"])
    y = output(model)
    with pytest.warns(UserWarning, match="no longer tied"):
        merged = model.merge_and_unload()
    assert not merged.config.tie_word_embeddings
    assert isinstance(merged.lm_head.weight, QuantizedTensor)
    torch.testing.assert_close(output(merged), y, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_tied_weights_stay_tied_if_neither_is_adapted() -> None:
    model = adapted(with_embedding("int8", tied=True), target_modules=["q_proj"])
    merged = model.merge_and_unload()
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(32, 64, 3, padding=1, stride=2)
        self.two = nn.Conv2d(64, 32, 1, bias=False)
        self.three = nn.Conv1d(32, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x).relu()).flatten(2))


@KINDS
@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(recipe: str, dora: bool) -> None:
    base = Convolutions()
    names = ["one", "two", "three"]
    quantize_(base, dict.fromkeys(names, RECIPES[recipe]))
    x = torch.randn(2, 32, 8, 8)
    plain = base(x).detach()
    config = LoraConfig(r=4, target_modules=names, use_dora=dora, lora_dropout=0.1)
    model = models.randomized(get_peft_model(base, config), 0.1)
    weights = {name: base.get_submodule(name).get_base_layer().weight for name in names}
    assert all(isinstance(weight, ConvWeight) for weight in weights.values())
    model.train()
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    y = model(x).detach()
    assert (y - plain).abs().max() > 0.05
    # int8_dynamic: a float weight does not round its inputs any more.
    models.merge_and_unmerge(model, lambda: model(x).detach(), 5e-2 if recipe == "int8_dynamic" else 1e-4)
    assert all(base.get_submodule(name).get_base_layer().weight is weight for name, weight in weights.items())
    with requantize_merged():
        merged = model.merge_and_unload()
    assert isinstance(merged.one.weight, ConvWeight)
    assert 1e-4 < (merged(x) - y).abs().max() < 0.5
