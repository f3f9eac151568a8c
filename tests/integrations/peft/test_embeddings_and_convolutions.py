"""LoRA and DoRA on quantized embeddings and convolutions, and trained tokens."""

from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from torch import nn

from qtorch import quantize_
from qtorch.dtypes import ConvWeight, QuantizedTensor
from qtorch.integrations.peft import requantize_merged
from tests.integrations.peft.models import RECIPES, adapted, llama, merge_and_unmerge, output, randomized

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
    merge_and_unmerge(model, lambda: output(model))
    assert base.weight is weight
    with requantize_merged():
        merged = model.merge_and_unload()
    assert isinstance(merged.model.embed_tokens.weight, QuantizedTensor)
    assert 0 < (output(merged) - y).abs().max() < 0.5


@pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`", "ignore:Model has `tie_word_embeddings=True`"
)
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


def test_trained_tokens() -> None:
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
    merge_and_unmerge(model, lambda: output(model, ids))


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
    model = randomized(get_peft_model(base, config), 0.1)
    weights = {name: base.get_submodule(name).get_base_layer().weight for name in names}
    assert all(isinstance(weight, ConvWeight) for weight in weights.values())
    model.train()
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    y = model(x).detach()
    assert (y - plain).abs().max() > 0.05
    # int8_dynamic: a float weight does not round its inputs any more.
    merge_and_unmerge(model, lambda: model(x).detach(), 5e-2 if recipe == "int8_dynamic" else 1e-4)
    assert all(base.get_submodule(name).get_base_layer().weight is weight for name, weight in weights.items())
    with requantize_merged():
        merged = model.merge_and_unload()
    assert isinstance(merged.one.weight, ConvWeight)
    assert 1e-4 < (merged(x) - y).abs().max() < 0.5
