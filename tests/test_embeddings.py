"""Tables of nn.Embedding and nn.EmbeddingBag, alone and tied to a head, under every weight-only recipe."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from qtorch import compute_error, dequantize_, explain, int8_weight_only, load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.kernels import record_kernels
from tests.every_recipe import WEIGHT_ONLY, make

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
    with torch.no_grad(), warnings.catch_warnings(), record_kernels() as ran:
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
    assert isinstance(model.head.weight, QuantizedTensor)
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
