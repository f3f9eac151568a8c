"""LoRA on bare quantized parameters: fused experts, and the weight of a linear layer by its name."""

from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor, PerRow, QuantSpec, quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.peft import expert_adapters, prepare_for_adapters, requantize_merged
from tests.integrations.peft.models import IDS, OF_EXPERTS, RECIPES, merge_and_unmerge, moe, output, randomized
from tests.refusals import refuses

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PATTERN = r".*\.experts\.(gate_up_proj|down_proj)"


def quantized(name: str, recipe: str, implementation: str = "grouped_mm") -> Any:
    model = moe(name, implementation)
    quantize_(model, {"lm_head": None, PATTERN: RECIPES[recipe], r".*": RECIPES["int8"]})
    return model


def adapted_experts(base: nn.Module) -> Any:
    return randomized(get_peft_model(base, LoraConfig(r=4, target_parameters=EXPERTS)))


@pytest.mark.parametrize("name", OF_EXPERTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_experts(name: str, recipe: str) -> None:
    base = quantized(name, recipe)
    plain = output(base)
    experts = base.model.layers[0].mlp.experts
    before = {name: experts._parameters[name] for name in ("gate_up_proj", "down_proj")}
    assert all(isinstance(weight, QuantizedTensor) for weight in before.values())
    model = adapted_experts(base)
    y = output(model)
    assert (y - plain).abs().max() > 0.01
    with model.disable_adapter():
        assert torch.equal(output(model), plain)
    merge_and_unmerge(model, lambda: output(model), 2e-2 if recipe == "int8_dynamic" else 1e-5)
    assert all(experts._parameters[name] is weight for name, weight in before.items())
    with requantize_merged():
        merged = model.merge_and_unload(safe_merge=True)
    assert isinstance(merged.model.layers[0].mlp.experts.down_proj, QuantizedTensor)
    assert 1e-5 < (output(merged) - y).abs().max() < 0.3


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_gradients_are_those_of_the_float_model(implementation: str) -> None:
    grads = []
    for dequantized in (False, True):
        base = quantized("qwen3_moe", "int8", implementation)
        if dequantized:
            experts = base.model.layers[0].mlp.experts
            for name in ("gate_up_proj", "down_proj"):
                setattr(experts, name, nn.Parameter(getattr(experts, name).dequantize()))
        model = adapted_experts(base)
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) == 4
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-6)


def test_parameters_of_layers_and_what_is_no_product() -> None:
    grads = []
    for checkpointing in (False, True):
        base = quantized("mixtral", "int4")
        if checkpointing:
            prepare_for_adapters(base)
        model = adapted_experts(base)
        model.train()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    base = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    quantize_(base, RECIPES["int4"])
    x = torch.randn(3, 64)
    model = randomized(get_peft_model(base, LoraConfig(r=4, target_parameters=["0.weight"])), 0.2)
    merge_and_unmerge(model, lambda: model(x).detach())
    stack, _ = operand(3, 16, 64)
    with pytest.raises(NotImplementedError, match=r"target_parameters\): only products"):
        torch.relu(stack)  # type: ignore[arg-type]
    refuses("along its first axis", lambda: stack[torch.tensor([0, 1])], NotImplementedError)
    refuses("last two axes", lambda: stack.transpose(0, 1), NotImplementedError)


@pytest.mark.skipif(peft.__version__.startswith(("0.18.", "0.19.")), reason="this PEFT takes one adapter of parameters")
def test_two_adapters_at_once() -> None:
    model = adapted_experts(quantized("mixtral", "int8"))
    one = output(model)
    model.add_adapter("other", LoraConfig(r=2, target_parameters=EXPERTS))
    randomized(model)
    model.base_model.set_adapter(["default", "other"])
    assert not torch.equal(one, output(model))
    merge_and_unmerge(model, lambda: output(model))


def operand(*shape: int) -> tuple[expert_adapters.AdaptedParameter, Tensor]:
    """A stand-in for a parameter, and the float tensor that it stands for."""
    base = AffineQuantizedTensor.from_float(torch.randn(shape), QuantSpec(torch.int8, PerRow()))
    left, right = torch.randn(*shape[:-1], 4), torch.randn(*shape[:-2], 4, shape[-1])
    return expert_adapters.AdaptedParameter(base, left, right), base.dequantize() + left @ right


def test_products_of_an_adapted_parameter() -> None:
    matrix, w = operand(16, 64)
    stack, ws = operand(3, 16, 64)
    x, y, bias = torch.randn(5, 64), torch.randn(3, 5, 64), torch.randn(16)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    pairs = [
        (nn.functional.linear(x, matrix, bias), nn.functional.linear(x, w, bias)),  # type: ignore[arg-type]
        (x @ matrix.t(), x @ w.t()),
        (matrix @ x.t(), w @ x.t()),
        (torch.matmul(x, matrix.T), x @ w.T),  # type: ignore[arg-type]
        (nn.functional.linear(x, stack[1]), nn.functional.linear(x, ws[1])),  # type: ignore[arg-type]
        (nn.functional.linear(x, stack[torch.tensor(2)]), nn.functional.linear(x, ws[2])),  # type: ignore[arg-type]
        (torch.bmm(y, stack.mT), torch.bmm(y, ws.mT)),  # type: ignore[arg-type]
        (torch.bmm(stack, y.mT), torch.bmm(ws, y.mT)),  # type: ignore[arg-type]
        (
            torch._grouped_mm(x, stack.transpose(-2, -1), offs=offs),  # type: ignore[arg-type]
            torch.cat([x[:2] @ ws[0].T, x[2:] @ ws[2].T]),
        ),
    ]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    assert (stack.shape, stack.dim(), stack.size(1), stack.dtype) == ((3, 16, 64), 3, 16, torch.float32)
