"""inject on models of transformers whose code nothing has touched: BERT, ViT and Mixtral, tiny, random weights."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from qtorch import compute_error, quantize_
from qtorch.kernels import record_kernels
from qtorch.training import convert, fully_quantized, inject, mixed_precision_training

pytest.importorskip("transformers")

from tests.zoo.architectures import built

SPEC = fully_quantized(8, 8)
LAYERS = 2
# model -> the number of quantized products of a forward, by function; those of attention are added
MODELS: dict[str, Counter[str]] = {
    # query, key, value, attention output, intermediate, output; two layers of the head
    "bert": Counter(linear=6 * LAYERS + 2),
    # the same, the convolution in front, and the classifier
    "vit": Counter(linear=6 * LAYERS + 1, conv2d=1),
    # q, k, v, o and the router; head; up and down of all experts
    "mixtral": Counter(linear=5 * LAYERS + 1, grouped_mm=2 * LAYERS),
}


def build(name: str, attention: str = "sdpa") -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model, batch = built(name, attn_implementation=attention)
    return model, {key: value for key, value in batch.items() if key != "attention_mask"}


def by_function(counts: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found[name.rpartition(":")[2].partition(".")[0]] += count
    return found


def first(output: Any) -> torch.Tensor:
    return output[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_counts_and_conversion(name: str, attention: str) -> None:
    """All products of the forward, each with both gradients; the converted model gives equal outputs."""
    wanted, (model, inputs) = MODELS[name], build(name, attention)
    products = Counter({"scores": LAYERS, "values": LAYERS}) if attention == "sdpa" else Counter(matmul=2 * LAYERS)
    with torch.no_grad():
        floats = first(model(**inputs))
    injection = inject(SPEC)
    with injection:
        y = first(model(**inputs))
    assert by_function(injection.counts) == wanted + products
    assert 15 < compute_error(floats, y) < 90
    with record_kernels() as kernels:
        y.square().mean().backward()
    assert "int_matmul" in kernels
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    with torch.no_grad():
        trained = y.detach()
        injection.convert(model, **inputs)
        with injection:
            served = first(model(**inputs))
        assert torch.equal(trained, served)
    kept = [p for p in model.parameters() if not p.is_meta and p.dim() > 1]
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    assert len(injection.stored) > 0
    if name != "mixtral":
        assert all(any(p is table for table in tables) or p.dim() == 3 for p in kept)


def test_the_same_as_the_recipe_for_layers() -> None:
    """With attention in full precision, BERT injected is BERT quantized by `quantize_`, forward and gradients."""
    model, inputs = build("bert")
    model = model.bert
    other = copy.deepcopy(model)
    quantize_(other, mixed_precision_training(SPEC))
    with inject({r".*:(scores|values)": None, r".*": SPEC}):
        y = first(model(**inputs))
    z = first(other(**inputs))
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, torch.as_tensor(b.grad)), key
    quantize_(other, convert())
    with torch.no_grad():
        assert torch.equal(first(other(**inputs)), y)


def test_a_model_attached_generates() -> None:
    """The context is entered by the model itself; cached keys and values meet other lengths in each step."""
    model, inputs = build("mixtral")
    injection = inject({"lm_head": None, r".*": SPEC})
    injection.attach(model)
    injection.convert(model, **inputs)
    tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 15)
    assert injection.counts
    assert "lm_head:linear" not in injection.counts
