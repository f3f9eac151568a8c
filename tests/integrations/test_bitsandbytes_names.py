"""bitsandbytes by changing the import: its names do what the recipes do, and, where it is installed, what it does."""

import pytest
import torch

import qtorch.integrations.bitsandbytes as bnb
from qtorch import compute_error, int8_dynamic_activation_int8_weight, nf4_weight_only
from qtorch.dtypes import QuantizedTensor

LAYERS = {
    "nf4": (lambda: bnb.nn.Linear4bit(128, 64, quant_type="nf4"), nf4_weight_only()),
    "LinearNF4": (lambda: bnb.nn.LinearNF4(128, 64, compress_statistics=False), nf4_weight_only(double_quantize=False)),
    "int8": (lambda: bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False), int8_dynamic_activation_int8_weight()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_recipes(name: str) -> None:
    build, recipe = LAYERS[name]
    layer, x = build(), torch.randn(3, 128)
    floats = layer.weight.detach().clone()
    wanted = torch.nn.functional.linear(x, recipe.apply(floats), layer.bias)
    assert torch.equal(layer(x), wanted)
    assert isinstance(layer.weight, QuantizedTensor)
    assert not layer.weight.requires_grad
    assert 15 < compute_error(torch.nn.functional.linear(x, floats, layer.bias), layer(x)) < 60
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_the_dtype_of_products_and_the_move_to_a_device() -> None:
    layer = bnb.nn.LinearNF4(64, 64, compute_dtype=torch.bfloat16)
    x = torch.randn(2, 64)
    assert layer(x).dtype is torch.float32
    meta = bnb.nn.LinearNF4(64, 64, device="meta")
    assert not isinstance(meta.to_empty(device="meta").weight, QuantizedTensor)
    assert isinstance(meta.to_empty(device="cpu").weight, QuantizedTensor)
    assert isinstance(bnb.nn.Params4bit(torch.randn(8, 64), quant_type="nf4"), QuantizedTensor)


@pytest.mark.parametrize("name", bnb.optim.__all__)
def test_optimizers_train(name: str) -> None:
    layer, x = torch.nn.Linear(64, 128), torch.randn(8, 64)
    optimizer = getattr(bnb.optim, name)(layer.parameters(), 1e-2, optim_bits=32, min_8bit_size=4096)
    losses = []
    for _ in range(5):
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("call, message", [
    (lambda: bnb.nn.Linear4bit(64, 64), "Linear4bit: quant_type='fp4' has no equivalent"),
    (lambda: bnb.nn.Linear8bitLt(64, 64), "has_fp16_weights=False"),
    (lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0), "threshold=6.0"),
    (lambda: bnb.nn.Params4bit(torch.ones(2, 64), requires_grad=True), "frozen weight"),
    (lambda: bnb.optim.AdamW8bit([torch.nn.Parameter(torch.ones(2))], percentile_clipping=5), "percentile_clipping"),
])  # fmt: skip
def test_refused_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["Lion8bit", "PagedLion8bit", "SGD8bit", "AdEMAMix8bit", "GlobalOptimManager"])
def test_refused_names(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"bitsandbytes\.optim\.{name} has no equivalent here, only Adam8bit"):
        getattr(bnb.optim, name)
    with pytest.raises(AttributeError, match=r"bitsandbytes\.nn\.LinearFP4 has no equivalent"):
        bnb.nn.LinearFP4  # noqa: B018
