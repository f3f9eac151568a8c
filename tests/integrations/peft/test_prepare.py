"""prepare_for_adapters, and what PEFT's own preparation does."""

import warnings

import pytest
import torch

peft = pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

from qtorch import fuse_projections, quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.peft import prepare_for_adapters
from tests.integrations.peft.models import IDS, RECIPES, llama, quantized_llama, randomized
from tests.refusals import refuses


def gradients(prepare: bool, **options: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of the adapters, and how often the first layer ran."""
    base = quantized_llama("int8", torch.bfloat16)
    if prepare:
        assert prepare_for_adapters(base, gradient_checkpointing_kwargs=options or None) is base
    model = randomized(get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])))
    runs = []
    model.get_submodule("base_model.model.model.layers.0.self_attn").register_forward_hook(lambda *_: runs.append(1))
    model.train()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad], len(runs)


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}])
def test_gradient_checkpointing_is_on_and_changes_no_number(options: dict[str, bool]) -> None:
    plain, runs = gradients(False)
    assert runs == 1
    checkpointed, runs = gradients(True, **options)
    assert runs == 2
    assert len(plain) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed))


def test_preparation() -> None:
    model = quantized_llama("int4", torch.bfloat16)
    prepare_for_adapters(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    refuses("is quantized; call quantize_", lambda: prepare_for_adapters(model))
    quantize_(model, RECIPES["int8"])
    refuses("pass gradient_checkpointing=False", lambda: prepare_for_adapters(model))
    prepare_for_adapters(model, gradient_checkpointing=False)
    assert not model[0].bias.requires_grad
    with pytest.raises(TypeError):
        prepare_for_adapters("model")  # type: ignore[type-var]
    fuse_projections(model := quantized_llama("int8", torch.bfloat16))
    refuses("take no adapters", lambda: get_peft_model(model, LoraConfig(target_modules="all-linear")))
    model = quantized_llama("int8", torch.bfloat16)
    with pytest.warns(UserWarning, match=r"prepare_for_adapters\(model\)"):
        prepare_model_for_kbit_training(model)
    # The whole model is cast, so that it runs; it stays quantized.
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)
    assert model(IDS).logits.dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepare_model_for_kbit_training(llama(torch.bfloat16))
