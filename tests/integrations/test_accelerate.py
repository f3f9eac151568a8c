"""accelerate moves quantized weights of every class between devices, the CPU and the disk; numbers stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, cpu_offload, dispatch_model, init_empty_weights, load_checkpoint_in_model
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import compute_module_sizes, set_module_tensor_to_device
from safetensors.torch import load_file
from torch import Tensor, nn

import qtorch
from qtorch.dtypes import AffineQuantizedTensor, ConvWeight, LUTQuantizedTensor, QuantizedTensor
from qtorch.integrations import accelerate as ours
from tests import every_recipe, fast_part, test_install
from tests.quantize_model import assert_same
from tests.refusals import refuses

RECIPES = {
    "int8": qtorch.int8_weight_only(),
    "int4": qtorch.int4_weight_only(group_size=32),
    "int8_dynamic": qtorch.int8_dynamic_activation_int8_weight(),
    "nf4": qtorch.nf4_weight_only(group_size=32),
    "uint3": qtorch.uintx_weight_only(torch.uint3, group_size=32),
    "semi_sparse": qtorch.int8_dynamic_activation_int8_semi_sparse_weight(),
}
KINDS = pytest.mark.parametrize("recipe", RECIPES)


class Model(nn.Module):
    """Every kind of weight, two of them tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.conv = nn.Conv1d(64, 64, 1)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.embedding(ids))
        return self.head(self.norm(self.conv(x.mT)).mT)


IDS = torch.arange(12).reshape(2, 6)


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS)


def quantized(recipe: str) -> tuple[Model, Tensor]:
    model = Model().eval()
    recipes = {"embedding": RECIPES["int8" if "dynamic" in recipe or "sparse" in recipe else recipe]}
    qtorch.quantize_(model, {**recipes, "conv": RECIPES[recipe], r"block\..*": RECIPES[recipe]})
    return model, output(model)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate collects garbage for every shard, which takes a second in a process that ran many tests."""
    monkeypatch.setattr("accelerate.utils.modeling.gc.collect", lambda *_: 0)


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def test_every_class_is_here() -> None:
    found = {type(p) for recipe in RECIPES for p in weights(quantized(recipe)[0]).values()}
    assert found == {AffineQuantizedTensor, LUTQuantizedTensor, ConvWeight}


@KINDS
def test_cpu_offload(recipe: str, tmp_path: Path) -> None:
    """And saved again, once the weights are back."""
    model, y = quantized(recipe)
    schemes = {name: weight.scheme for name, weight in weights(model).items()}
    cpu_offload(model, "cpu")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert all(isinstance(p, QuantizedTensor) for p in (model.block[0].weight, model.conv.weight))
    for _ in range(2):
        assert torch.equal(output(model), y)
    assert model.block[0].weight.is_meta
    refuses("meta device", lambda: ours.disk_offload(model, tmp_path))
    remove_hook_from_submodules(model)
    assert torch.equal(output(model), y)
    # accelerate gives tied weights back one by one, float ones too.
    back = {name: weight.scheme for name, weight in weights(model).items() if name != "head.weight"}
    assert back == schemes
    qtorch.save_quantized(model, tmp_path / "model.safetensors")
    with init_empty_weights():
        fresh = Model().eval()
    fresh.head.weight = fresh.embedding.weight
    qtorch.load_quantized(fresh, tmp_path / "model.safetensors")
    assert torch.equal(output(fresh), y)


@KINDS
@pytest.mark.parametrize("buffers", [False, True])
def test_disk_offload(recipe: str, buffers: bool, tmp_path: Path) -> None:
    model, y = quantized(recipe)
    assert ours.disk_offload(model, tmp_path / "offloaded", offload_buffers=buffers) is model
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [f.name for f in (tmp_path / "offloaded").iterdir()] == ["weights.safetensors"]
    for _ in range(2):
        assert torch.equal(output(model), y)
    assert model.block[0].weight.is_meta


@KINDS
def test_models_and_tensors_are_dispatched(recipe: str, tmp_path: Path) -> None:
    """Hooks on the CPU, as for devices."""
    model, y = quantized(recipe)
    dispatch_model(model, dict.fromkeys(["embedding", "block", "conv", "norm", "head"], "cpu"), force_hooks=True)
    assert torch.equal(output(model), y)
    assert model.head.weight is model.embedding.weight

    model, y = quantized(recipe)
    places = {"embedding": "cpu", "block": "disk", "conv": "disk", "norm": "cpu", "head": "cpu"}
    assert ours.dispatch_model(model, places, offload_dir=tmp_path) is model
    assert model.block[0].weight.is_meta
    assert not model.embedding.weight.is_meta
    for _ in range(2):
        assert torch.equal(output(model), y)
    model, y = quantized(recipe)
    for name, weight in weights(model).items():
        set_module_tensor_to_device(model, name, "meta")
        moved = model.get_submodule(name.rpartition(".")[0]).weight
        assert type(moved) is type(weight)
        assert moved.is_meta
        refuses("we need a `value`", lambda name=name: set_module_tensor_to_device(model, name, "cpu"))
        set_module_tensor_to_device(model, name, "cpu", value=weight)
        back = model.get_submodule(name.rpartition(".")[0]).weight
        assert back.scheme == weight.scheme
        assert all(torch.equal(t, weight.inner_tensors[key]) for key, t in back.inner_tensors.items())
    assert torch.equal(output(model), y)


def test_set_module_tensor_and_weights_on_disk(tmp_path: Path) -> None:
    model, _ = quantized("int4")
    weight = model.block[0].weight
    set_module_tensor_to_device(model, "block.0.weight", "cpu", value=weight, dtype=torch.bfloat16)
    assert model.block[0].weight.dtype == torch.bfloat16
    assert torch.equal(model.block[0].weight.dequantize(torch.float32), weight.dequantize(torch.float32))
    saved_and_loaded(Tied(0), lambda: Tied(1), tmp_path)
    assert torch.equal(load_file(tmp_path / "1GB" / "model.safetensors")["first.weight"], Tied(0).first.weight)
    model, _ = quantized("int4")
    path = tmp_path / "model.safetensors"
    qtorch.save_quantized(model, path)
    on_disk = ours.WeightsOnDisk(path, verify=True)
    assert set(on_disk) == set(model.state_dict())
    assert len(on_disk) == len(model.state_dict())
    assert torch.equal(on_disk["head.weight"], model.head.weight)
    assert torch.equal(on_disk["norm.running_var"], model.norm.running_var)
    with pytest.raises(KeyError):
        on_disk["missing"]
    on_disk.close()


def test_files_that_are_refused(tmp_path: Path) -> None:
    model, _ = quantized("int8")
    with pytest.raises(TypeError, match=r"qtorch\.integrations\.accelerate\.disk_offload"):
        accelerate.disk_offload(model, tmp_path)
    refuses("offload_dir=", lambda: ours.dispatch_model(model, {"": "disk"}))
    # It counts elements times the logical dtype, so its maps are on the safe side.
    assert compute_module_sizes(model)["block.0.weight"] >= model.block[0].weight.nbytes
    model, other = Tied(0), Tied(1)
    qtorch.quantize_(model, qtorch.int8_weight_only())
    qtorch.quantize_(other, qtorch.int4_weight_only(group_size=32))
    accelerator_of(model)[0].save_state(str(tmp_path))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items() if "first.weight" in name}
    with pytest.raises(RuntimeError, match=r"first\.weight.*would change its numbers"):
        accelerator_of(other)[0].load_state(str(tmp_path))
    assert torch.equal(before["first.weight"], other.first.weight)
    refuses("first", lambda: accelerator_of(Tied(2))[0].load_state(str(tmp_path)), RuntimeError)


class Tied(nn.Module):
    """Two layers with one weight; a convolution and an embedding are in `Model`."""

    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        if tied:
            self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x))))


def accelerator_of(*prepared: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(*prepared)


def saved_and_loaded(model: Any, fresh: Callable[[], Any], folder: Path) -> None:
    """`save_state` and `load_state`, `save_model` in one file and in several, and what reads these."""
    accelerator, _ = accelerator_of(model)
    accelerator.save_state(str(folder / "state"))
    assert (folder / "state" / "model.safetensors").is_file()
    other = fresh()
    accelerator_of(other)[0].load_state(str(folder / "state"))
    assert_same(other, model)
    for size, count in (("1GB", 1), ("2KB", 2)):
        accelerator.save_model(model, str(folder / size), max_shard_size=size)
        assert len(list((folder / size).glob("*.safetensors"))) >= count
        other = fresh()
        load_checkpoint_in_model(other, str(folder / size))
        assert_same(other, model)


@pytest.mark.parametrize("recipe", fast_part.slow_but(every_recipe.FAMILIES, every_recipe.NAMES))
def test_safetensors_of_every_recipe(recipe: str, tmp_path: Path) -> None:
    def quantized_from(seed: int) -> Tied:
        model = Tied(seed).eval()
        qtorch.quantize_(model, every_recipe.make(recipe, 32))
        return model

    model = quantized_from(0)
    saved_and_loaded(model, lambda: quantized_from(1), tmp_path)
    for folder in ("1GB", "2KB"):
        assert_same(qtorch.load_quantized(Tied(2).eval(), tmp_path / folder), model)


@pytest.mark.parametrize("recipe", fast_part.slow_but(["nf4", "semi_sparse"], RECIPES))
def test_safetensors_of_every_class(recipe: str, tmp_path: Path) -> None:
    def other() -> Model:
        model, _ = quantized(recipe)
        with torch.no_grad():
            model.norm.weight.zero_()
        return model

    model, y = quantized(recipe)
    saved_and_loaded(model, other, tmp_path)
    assert torch.equal(output(qtorch.load_quantized(Model().eval(), tmp_path / "2KB")), y)


@pytest.mark.parametrize("recipe", fast_part.slow_but(test_install.TRAINING[1:3], test_install.TRAINING), ids=str)
def test_safetensors_of_a_run(recipe: Any, tmp_path: Path) -> None:
    """A run that is continued from its state takes the step of one that was not interrupted."""

    def start(seed: int) -> tuple[Accelerator, Any, Any]:
        model = Tied(seed, tied="lora" not in str(recipe)).train()
        qtorch.quantize_(model, recipe)
        accelerator, (model, optimizer) = accelerator_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return accelerator, model, optimizer

    def step(model: Any, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    accelerator, model, optimizer = start(0)
    step(model, optimizer, 1)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "model"))
    other, copy, of_copy = start(2)
    load_checkpoint_in_model(copy, str(tmp_path / "model"))
    assert_same(copy, model)
    step(copy, of_copy, 3)
    other.load_state(str(tmp_path / "state"))
    assert_same(copy, model)
    step(model, optimizer, 4)
    step(copy, of_copy, 4)
    assert_same(copy, model)
