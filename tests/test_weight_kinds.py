"""Kinds of weights: which axis products contract, what `targets` reaches, what is refused before anything changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import find_uses, int8_weight_only, load_quantized, quantize_, quantize_checkpoint, register_weight_kind
from qtorch.dtypes import AffineQuantizedTensor, TransposedWeight
from qtorch.model.weight_kinds import EXPERTS, LINEAR_IN_OUT, RULES, UNKNOWN, WeightKind, is_router, kind_of
from tests.refusals import refuses

INT8 = int8_weight_only()


class Mixture(nn.Module):
    """A mixture of experts as transformers marks one, with its router, an embedding and a convolution."""

    is_concatenated = True

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(16, 32), nn.Conv1d(32, 32, 1)
        self.gate, self.head = nn.Linear(32, 4, bias=False), nn.Linear(32, 16)
        self.experts = nn.Module()
        self.experts.is_transposed, self.experts.is_concatenated = is_transposed, True  # type: ignore[assignment]
        self.experts.down_proj = nn.Parameter(torch.randn(4, 32, 32) * torch.linspace(0.01, 1, 32))
        self.is_transposed = is_transposed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.conv(x.mT).mT
        rows = x.flatten(0, 1)
        weight = self.experts.down_proj
        each = torch.stack([rows @ w if self.is_transposed else functional.linear(rows, w) for w in weight])  # type: ignore[union-attr]
        return self.head(torch.einsum("eto,te->to", each, self.gate(rows).softmax(-1)))


def quantized(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if hasattr(p, "scheme")}


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("linear", ["experts.down_proj", "head.weight"]),
        ("experts", ["experts.down_proj"]),
        (["embedding", "router"], ["embed.weight", "gate.weight"]),
        ("all", ["conv.weight", "embed.weight", "experts.down_proj", "gate.weight", "head.weight"]),
    ],
    ids=str,
)
def test_words_for_what_is_reached(targets: Any, found: list[str]) -> None:
    for recipe in (INT8, {".*": INT8}):
        model = Mixture(True)
        quantize_(model, recipe, targets=targets)
        assert sorted(quantized(model)) == found


def test_an_unknown_word_is_refused() -> None:
    for targets in ("linears", ["linear", 3], 3):
        with pytest.raises(ValueError, match=r'targets is one or some of .*"?all.*got'):
            quantize_(nn.Linear(8, 8), INT8, targets=targets)  # type: ignore[arg-type]


def test_routers_stay_unless_they_are_asked_for() -> None:
    model = Mixture(False)
    report = quantize_(model, INT8)
    (row,) = [row for row in report.skipped if row.name == "gate.weight"]
    assert row.detail == 'a router, which stays in floating point; ask for it by name, or with targets="all"'
    quantize_(model, {"gate": INT8})
    assert "gate.weight" in quantized(model)
    names = {"", "a", "a.gate", "a.experts", "b", "b.gate", "c.router", "c.router.layer"}
    assert {name for name in names if is_router(name, names)} == {"a.gate", "c.router", "c.router.layer"}
    dense = nn.ModuleDict({"gate": nn.Linear(8, 8)})  # of a gated layer, without experts
    quantize_(dense, INT8)
    assert quantized(dense) == {"gate.weight"}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_have_a_scale_for_each_output(is_transposed: bool) -> None:
    model = Mixture(is_transposed)
    weight = model.experts.down_proj.detach().clone()  # type: ignore[union-attr]
    quantize_(model, INT8)
    made: Any = model.experts.down_proj
    assert isinstance(made, TransposedWeight) == is_transposed
    assert made.scales()[0].shape == (4, 32, 1)
    error = (made.dequantize() - weight).abs().amax(-2 if is_transposed else -1)
    largest = weight.abs().amax(-2 if is_transposed else -1)
    assert bool((error <= largest / 127 / 2 * 1.001).all())
    assert bool((error > 0).any())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_uses_are_found(is_transposed: bool) -> None:
    model = Mixture(is_transposed)
    uses = find_uses(model, torch.randint(0, 16, (2, 5)))
    assert uses["embed.weight"].obstacle == "is not multiplied: its rows were looked up"
    assert uses["embed.weight"].lookups == 10
    (of_experts,) = uses["experts.down_proj"].contractions
    assert (of_experts.axis, of_experts.rows) == (-2 if is_transposed else -1, 40)
    assert of_experts.function == ("matmul" if is_transposed else "linear")
    assert uses["conv.weight"].is_convolution
    assert "linear over axis -1, 10 rows" in str(uses)


class Strange(nn.Module):
    """Parameters that nothing is known of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(8, 16))
        self.both = nn.Parameter(torch.randn(16, 16))
        self.scaled = nn.Parameter(torch.randn(16, 16))
        self.table = nn.Parameter(torch.randn(5, 16))
        self.layer_scale = nn.Parameter(torch.ones(16, 1, 1))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,io->bo", x, self.kernel)
        y = y @ self.both + functional.linear(y, self.both) + y @ (self.scaled * 2)
        return (y + self.table[0]) * self.layer_scale.flatten()


def test_a_module_that_nothing_is_known_of() -> None:
    model, x = Strange(), torch.randn(3, 8)
    wanted = model(x).detach()
    uses = find_uses(model, x)
    report = quantize_(model, INT8, targets=uses)
    assert quantized(model) == {"kernel"}
    assert isinstance(model.kernel, TransposedWeight)
    assert 0 < float((model(x) - wanted).norm() / wanted.norm()) < 0.02
    assert {row.name: row.detail for row in report.skipped} == {
        "both": "took part in products that sum over different axes of it",
        "scaled": "is not multiplied: it took part in mul",
        "table": "is not multiplied: it took part in add",
        "layer_scale": "has shape (16, 1, 1), a vector: it scales elements one by one",
        "unused": "is not multiplied: nothing was done with it",
    }


def test_what_cannot_be_quantized_is_named_before_anything_changes() -> None:
    """Asked for by name, they are refused now and not in the first forward pass."""
    model = Strange()
    for module in (nn.LSTM(8, 8), nn.GRU(8, 8), nn.Bilinear(8, 8, 8), nn.ConvTranspose1d(8, 8, 3)):
        model.inner = module
        name = "inner." + next(iter(dict(module.named_parameters())))
        with pytest.raises(ValueError, match=rf"{name}: is a parameter of {type(module).__name__}, which has no quant"):
            quantize_(model, {name: INT8, "kernel": INT8})
        assert quantized(model) == set()
    refuses(r"layer_scale: has shape \(16, 1, 1\), a vector", lambda: quantize_(model, {"layer_scale": INT8}))


def test_a_weight_that_modules_use_along_different_axes() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Conv1D(8, 8)})
    model["b"].weight = model["a"].weight
    refuses(r"a: is shared by a.weight \(linear\) and b.weight .*different axes", lambda: quantize_(model, INT8))


@pytest.fixture
def rules() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


@pytest.mark.usefixtures("rules")
def test_kinds_of_other_packages() -> None:
    @register_weight_kind
    def mine(module: nn.Module, attribute: str) -> WeightKind | None:
        return LINEAR_IN_OUT if isinstance(module, Strange) and attribute == "kernel" else None

    model, x = Strange(), torch.randn(3, 8)
    assert kind_of(model, "kernel") is LINEAR_IN_OUT
    assert kind_of(model, "both") is UNKNOWN
    quantize_(model, INT8)
    assert isinstance(model.kernel, TransposedWeight)
    assert torch.equal(model.kernel.matrix.plain()[1], INT8.apply(Strange().kernel.mT).plain()[1])  # type: ignore[attr-defined]
    model(x)


def test_depthwise_weights_that_are_viewed() -> None:
    """As state-space models do: the weight (C, 1, k) is squeezed, and a parameter (C, k) unsqueezed."""
    conv, x = nn.Conv1d(8, 8, 4, groups=8), torch.randn(2, 8, 20)
    plain = nn.Module()
    plain.weight = nn.Parameter(conv.weight.detach().squeeze(1).clone())
    quantize_(conv, INT8, targets="all")
    quantize_(plain, {"weight": INT8})
    wanted = conv(x)
    squeezed = conv.weight.squeeze(1)
    assert isinstance(squeezed, AffineQuantizedTensor)
    assert torch.equal(functional.conv1d(x, squeezed.unsqueeze(1), conv.bias, groups=8), wanted)
    assert torch.equal(functional.conv1d(x, plain.weight.unsqueeze(1), conv.bias, groups=8), wanted)
    with pytest.raises(TypeError, match="conv1d takes a float input and a ConvWeight"):
        functional.conv1d(x, INT8.apply(torch.randn(8, 8, 4)), None)


def test_a_file_says_which_axis_it_is(tmp_path: Path) -> None:
    """A weight that was quantized along one axis does not become that of a layer that contracts another."""
    transformers = pytest.importorskip("transformers.pytorch_utils")
    layer = transformers.Conv1D(8, 8)
    quantize_(layer, INT8)
    qtorch.save_quantized(layer, tmp_path / "model.safetensors")
    other = transformers.Conv1D(8, 8)
    load_quantized(other, tmp_path / "model.safetensors")
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
    with pytest.raises(ValueError, match=r"weight is quantized as a weight that is stored as \(inputs, outputs\), but"):
        load_quantized(nn.Linear(8, 8), tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_its_model(name: str, tmp_path: Path) -> None:
    """The same bits as in the model."""
    pytest.importorskip("transformers")
    from tests.zoo.architectures import built

    model, _ = built(name)
    folder = tmp_path / name
    folder.mkdir()
    model.config.save_pretrained(folder)
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else {}
    save_file({k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}, folder / "model.safetensors")
    report = quantize_checkpoint(folder, tmp_path / "out.safetensors", qtorch.int4_weight_only(group_size=32))
    quantize_(model, {row.name: qtorch.int4_weight_only(group_size=32) for row in report.quantized})
    fresh, _ = built(name)
    load_quantized(fresh, tmp_path / "out.safetensors")
    transposed = 0
    for row in report.quantized:
        one, other = fresh.get_parameter(row.name), model.get_parameter(row.name)
        transposed += isinstance(one, TransposedWeight)
        assert type(one) is type(other)
        assert torch.equal(one.dequantize(), other.dequantize()), row.name
    assert transposed >= 4
    assert EXPERTS.name == "experts"
