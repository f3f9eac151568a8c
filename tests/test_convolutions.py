"""Models with convolutions under every recipe."""

import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import RECIPES
from tests.every_recipe import NAMES, make

CONVS = r"convs\.\d"


class ConvNet(nn.Module):
    """Rows of 576 and 640 elements, with and without groups."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 32, (2, 5), stride=2, bias=False)])
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x).relu()
        return self.head(x.mean((2, 3)))


X = torch.randn(4, 64, 9, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe(name: str, tmp_path) -> None:
    model = ConvNet()
    wanted = model(X).detach()
    report = qtorch.quantize_(model, {CONVS: make(name, 32)})
    assert [layer.name for layer in report.quantized] == ["convs.0.weight", "convs.1.weight"]
    assert all(type(conv.weight) is ConvWeight for conv in model.convs)
    with torch.no_grad(), warnings.catch_warnings(), record_kernels() as ran:
        warnings.simplefilter("ignore")  # of emulations
        y = model(X)
    explained = qtorch.explain(model)
    kernels = [kernel for kernel in ran if ":" in kernel]
    assert kernels == [f"{e.problem.op}:{e.kernel}" for e in explained]
    assert [layer.kernel for layer in report.quantized] == [e.kernel for e in explained]
    assert "reference" not in " ".join(kernels)
    assert 5 < qtorch.compute_error(wanted, y) < 70
    qtorch.save_quantized(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        loaded = ConvNet()
    qtorch.load_quantized(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded(X), y)
    qtorch.dequantize_(model)
    assert type(model.convs[0].weight) is nn.Parameter
    assert qtorch.compute_error(model(X), y) > 20


def test_explain() -> None:
    layer = nn.Conv2d(64, 32, 3, groups=2)
    qtorch.quantize_(layer, {"weight": qtorch.int8_dynamic_activation_int8_weight()})
    (explained,) = qtorch.explain(layer)
    assert explained.problem.op == "linear"
    assert explained.problem.scheme.shape == (16, 288)
    assert explained.note.startswith("on windows of the input, gathered first")
    qtorch.quantize_(qtorch.dequantize_(layer), {"weight": qtorch.int8_weight_only()})
    with compiled_library.use(None):
        shown = str(qtorch.explain(layer))
    assert_expected_inline(
        shown,
        """\
weight: conv, float32 input on cpu, weight int8 PerRow() symmetric, PlainLayout()
  runs dequantized_conv (dequantizes the weight on each call: it saves memory, not time)
  not portable_conv: reads the portable layout, the weight has plain
  not cpu_conv: needs quantized activations, the scheme is weight-only
  not cpu_weight_only_conv: is switched off
  not image_conv: needs quantized activations, the scheme is weight-only
  not windows: takes quantized activations""",
    )


TRAIN = ["int8_mixed_precision_training", "int8_weight_only_quantized_training", "bitnet_training"]


@pytest.mark.parametrize("name", TRAIN)
def test_training_recipes(name: str) -> None:
    """Trained for a step, converted, served: by the same sums of integers."""
    model = ConvNet()
    qtorch.quantize_(model, {CONVS: RECIPES[name]()})
    assert model.convs[0].weight.shape == (64, 64, 3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = model.convs[0].weight.dequantize().detach().clone()
    model(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.convs[0].weight.dequantize())
    trained = model(X).detach()
    qtorch.quantize_(model, RECIPES["convert"]())
    assert type(model.convs[0].weight) is ConvWeight
    y = model(X).detach()
    assert torch.equal(y, trained) if model.convs[0].weight.scheme.activation else qtorch.compute_error(trained, y) > 70
