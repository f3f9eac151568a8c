"""Models with convolutions, and tables alone and tied to a head, under every recipe."""

import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch import compute_error, dequantize_, explain, int8_weight_only, load_quantized, quantize_, save_quantized
from tests.every_recipe import NAMES, WEIGHT_ONLY, make

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
    assert all(type(conv.weight) is qtorch.dtypes.ConvWeight for conv in model.convs)
    with torch.no_grad(), warnings.catch_warnings(), qtorch.kernels.record_kernels() as ran:
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
    assert (explained.problem.op, explained.problem.scheme.shape) == ("linear", (16, 288))
    assert explained.note.startswith("on windows of the input, gathered first")
    qtorch.quantize_(qtorch.dequantize_(layer), {"weight": qtorch.int8_weight_only()})
    with qtorch.kernels.cpu.compiled_library.use(None):
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
    qtorch.quantize_(model, {CONVS: qtorch.recipes.base.RECIPES[name]()})
    assert model.convs[0].weight.shape == (64, 64, 3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = model.convs[0].weight.dequantize().detach().clone()
    model(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.convs[0].weight.dequantize())
    trained = model(X).detach()
    qtorch.quantize_(model, qtorch.recipes.base.RECIPES["convert"]())
    assert type(model.convs[0].weight) is qtorch.dtypes.ConvWeight
    y = model(X).detach()
    assert torch.equal(y, trained) if model.convs[0].weight.scheme.activation else qtorch.compute_error(trained, y) > 70


every_recipe = pytest.mark.parametrize("name", WEIGHT_ONLY)

IDS = torch.randint(48, (5, 7), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A table, as an embedding or as bags, and a head of the same weight."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        self.embed = kind(48, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def ran_by(model: nn.Module, ids: Tensor = IDS) -> tuple[Tensor, list[str]]:
    with torch.no_grad(), warnings.catch_warnings(), qtorch.kernels.record_kernels() as ran:
        warnings.simplefilter("error")
        y = model(ids)
    return y, [kernel for kernel in ran if ":" in kernel]


@every_recipe
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_table(name: str, kind: type[nn.Module]) -> None:
    layer = kind(48, 64)
    wanted = layer(IDS)
    report = quantize_(layer, {"weight": make(name, 32)})
    y, ran = ran_by(layer)
    (explained,) = explain(layer)
    assert ran == [f"embedding:{report.quantized[0].kernel}"] == [f"embedding:{explained.kernel}"]
    assert ran != ["embedding:reference"]
    assert "saves memory" in explained.note
    assert 5 < compute_error(wanted, y) < 60
    assert torch.equal(y, dequantize_(layer)(IDS))


@every_recipe
def test_only_the_rows_asked_for_are_dequantized(name: str) -> None:
    """Four rows take less than the codes of the whole table in bytes, a quarter of its values."""
    layer = nn.EmbeddingBag(4096, 256)
    quantize_(layer, {"weight": make(name, 32)})
    ids = torch.tensor([[1, 5], [9, 4095]])
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        layer(ids)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert 0 < allocated < 4096 * 256


@every_recipe
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("asked", ["embed", "head"])
def test_a_tied_head_keeps_one_copy(name: str, kind: type[nn.Module], asked: str, tmp_path) -> None:
    model = Tied(kind)
    wanted = model(IDS)
    report = quantize_(model, {asked: make(name, 32)})
    assert len(report.quantized) == 1
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, qtorch.dtypes.QuantizedTensor)
    y, ran = ran_by(model)
    assert [kernel.partition(":")[0] for kernel in ran] == ["embedding", "linear"]
    assert not any(kernel.endswith(":reference") for kernel in ran)
    assert 5 < compute_error(wanted, y) < 60
    save_quantized(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = Tied(kind)
    load_quantized(other, tmp_path / "model.safetensors")
    assert other.head.weight is other.embed.weight
    assert torch.equal(ran_by(other)[0], y)
    # One copy in memory and in the file: about the size of the codes, which are at most a byte a weight.
    assert model.head.weight.nbytes < 48 * 64 * 2
    assert (tmp_path / "model.safetensors").stat().st_size < 48 * 64 * 2 + 4000


def test_bags_are_asked_for_as_embeddings_are() -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, 64), nn.Linear(64, 8))
    report = quantize_(model, int8_weight_only(), dry_run=True)
    assert [layer.name for layer in report.quantized] == ["1.weight"]
    assert report.skipped[0].detail == 'an embedding; ask for it by name, or with targets="all"'
    report = quantize_(model, int8_weight_only(), lambda module, name: isinstance(module, nn.EmbeddingBag))
    assert [layer.name for layer in report.quantized] == ["0.weight"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_before_the_first_lookup(kind: type[nn.Module]) -> None:
    layer = kind(8, 8, max_norm=1.0)
    message = rf"weight: is the table of an {kind.__name__} with max_norm, which rewrites the table"
    with pytest.raises(ValueError, match=message):
        quantize_(layer, {"weight": int8_weight_only()})
    assert type(layer.weight) is nn.Parameter
