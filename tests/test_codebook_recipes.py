"""nf4_weight_only and lut_weight_only: as values, on a model, and as the frozen base of LoRA."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qtorch
from qtorch import (
    LUTQuantizedTensor,
    compute_error,
    dequantize_,
    int4_weight_only,
    load_quantized,
    lut_weight_only,
    nf4_weight_only,
    quantize_,
    save_quantized,
)
from qtorch.kernels import record_kernels
from qtorch.primitives import from_json, to_json
from qtorch.recipes.base import Recipe

RECIPES = [
    nf4_weight_only(),
    nf4_weight_only(group_size=32, double_quantize=False),
    lut_weight_only(),
    lut_weight_only(3, 64),
    lut_weight_only(bits=2),
]
# (lowest, highest) SQNR in dB of a Gaussian weight; bits a weight of 16 bits takes in rows of 512.
EXPECTED = {
    "nf4_weight_only()": ((20, 21.5), 4.13),
    "nf4_weight_only(group_size=32, double_quantize=False)": ((20.5, 23), 4.51),
    "lut_weight_only()": ((20.2, 22.5), 4.57),
    "lut_weight_only(bits=3, group_size=64)": ((15.5, 18), 5.25),
    "lut_weight_only(bits=2)": ((9, 10.5), 2.19),
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


class Model(nn.Module):
    """An embedding, a linear layer and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 128)
        self.up = nn.Linear(128, 96)
        self.experts = nn.Parameter(torch.randn(2, 64, 96))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.embed(ids))
        return torch.bmm(torch.stack([x, x]), self.experts.mT).sum(0)


IDS = torch.arange(24)


def quantized(recipe: Recipe) -> Model:
    model = Model().eval()
    quantize_(model, {"embed": recipe, "up": recipe, "experts": lut_weight_only(3, 32)})
    return model


@every_recipe
def test_is_a_value(recipe: Recipe) -> None:
    assert recipe == dataclasses.replace(recipe)
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    assert str(recipe) in EXPECTED


@pytest.mark.parametrize("name", ["nf4_weight_only", "lut_weight_only"])
def test_names(name: str) -> None:
    assert getattr(qtorch.quantize_api, name) is getattr(qtorch, name) is getattr(qtorch.recipes, name)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_report(recipe: Recipe, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(512, 256, dtype=dtype))
    nn.init.normal_(model[0].weight)
    x = torch.randn(3, 512, dtype=dtype)
    wanted = model(x)
    (row,) = quantize_(model, recipe).quantized
    (low, high), bits = EXPECTED[str(recipe)]
    assert row.kernel == "lut_weight_mm"
    assert low < row.sqnr < high
    with record_kernels() as ran:
        y = model(x)
    assert ran == ["linear:lut_weight_mm", "lut_weight_mm"]
    assert low - 2 < compute_error(wanted, y) < high + 2
    if dtype.itemsize == 2:
        assert abs(row.bytes_after * 8 / (256 * 512) - bits) < 0.02
    assert isinstance(model[0].weight, LUTQuantizedTensor)
    assert not model[0].weight.requires_grad


def test_better_than_int4_at_the_same_size() -> None:
    """NF4 at 4.13 bits a weight against symmetric or asymmetric int4 in groups of 128, at 4.19."""
    weight = torch.randn(256, 1024).bfloat16()
    errors = {
        r.name: compute_error(weight, r.apply(weight).dequantize()) for r in (nf4_weight_only(), int4_weight_only())
    }
    assert errors["int4_weight_only"] + 0.5 < errors["nf4_weight_only"] < errors["int4_weight_only"] + 3


@every_recipe
def test_model(recipe: Recipe, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Model()
    torch.manual_seed(0)
    model = quantized(recipe)
    with torch.no_grad(), record_kernels() as ran:
        y = model(IDS)
    assert ran == ["embedding:gather_lut_rows", *["linear:lut_weight_mm", "lut_weight_mm"] * 3]
    assert 5 < compute_error(reference(IDS), y) < 30
    save_quantized(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = Model()
    load_quantized(other, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(other(IDS), y)
        assert compute_error(dequantize_(other)(IDS), y) > 90


@every_recipe
def test_compile_traces_one_graph(recipe: Recipe) -> None:
    model = quantized(recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    counters.clear()
    with torch.no_grad(), record_kernels() as ran:
        y = compiled(IDS)
    assert ran == ["lut_weight_mm"] * 3
    assert compute_error(model(IDS), y) > 100
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_lora_on_a_frozen_base(compiled: bool) -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(128, 32)
            self.down = nn.Linear(128, 4, bias=False)
            self.up = nn.Linear(4, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model, x, target = nn.Sequential(nn.Linear(64, 128), Lora()), torch.randn(16, 64), torch.randn(16, 32)
    quantize_(model, {"1.base": nf4_weight_only()})
    codes = model[1].base.weight.qdata.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 5
    optimizer = torch.optim.Adam(trained, 1e-2)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    losses = []
    for _ in range(20):
        loss = (run(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert 0 < losses[-1] < 0.7 * losses[0]
    assert torch.equal(model[1].base.weight.qdata, codes)


def test_errors_name_the_layer() -> None:
    model = nn.Sequential(nn.Linear(96, 32))
    with pytest.raises(ValueError, match=r"0: block_size \(1, 64\) does not divide shape \(32, 96\)"):
        quantize_(model, nf4_weight_only())
    with pytest.raises(ValueError, match="bits is 5; it must be 2, 3 or 4"):
        lut_weight_only(5)
    with pytest.raises(ValueError, match="group_size is 0; it must be positive"):
        nf4_weight_only(0)
    quantize_(model, lut_weight_only(2))
    with pytest.raises(ValueError, match="is already quantized: LUTQuantizedTensor"):
        quantize_(model, lut_weight_only(3))
