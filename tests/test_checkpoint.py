"""save_quantized and load_quantized: round trips, what cannot be saved, what does not fit."""

import itertools
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch import load_quantized, quantize_, save_quantized
from qtorch.recipes.base import Recipe
from tests.checkpoint_model import INT8, RECIPES, SMALL, Model, assert_same, contents, error, files, meta, quantized
from tests.refusals import refuses


# --- round trips ---
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shard_size", [1, SMALL, 2**30])
@pytest.mark.parametrize("build", [Model, meta, quantized], ids=["float", "meta", "quantized"])
def test_round_trip(recipe: Recipe, shard_size: int, build: Callable[[], Model], path: Path) -> None:
    saved = quantized(recipe)
    save_quantized(saved, path, max_shard_size=shard_size)
    model = build().eval()
    assert load_quantized(model, path) is model
    assert_same(model, saved)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, path: Path) -> None:
    saved = Model().to(dtype)
    quantize_(saved, {"fc": qtorch.int4_weight_only(group_size=16)})
    save_quantized(saved, path)
    assert_same(load_quantized(meta(), path), saved)
    save_quantized(floats := Model(), path)
    assert_same(load_quantized(quantized(), path), floats)


def test_state_dicts_and_read_only_folders(path: Path) -> None:
    saved, model = quantized(), Model()
    save_quantized(saved.state_dict(), path)
    model.angles = saved.angles
    load_quantized(model, path)
    assert_same(model, saved)
    assert model.head.weight is model.embed.weight
    assert error(meta(), path).startswith("model.safetensors: missing key angles;")
    path.parent.chmod(0o555)
    try:
        if not os.access(path.parent, os.W_OK):  # root may write everywhere
            refuses(re.escape(str(path.parent)), lambda: save_quantized(nn.Linear(2, 2), path), PermissionError)
    finally:
        path.parent.chmod(0o755)


def test_tensors_that_share_memory(path: Path) -> None:
    """Views come back as tensors of their own; the same view under two names as one tensor."""
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(4, 4))
    views = {"flat": module.w.data.view(16), "t": module.w.data.t(), "row": module.w.data[1], "same": module.w.data}
    z = torch.full((2,), 1j)
    views |= {"expanded": torch.ones(1).expand(3), "z": z, "conj": z.conj()}
    for name, view in views.items():
        module.register_buffer(name, view)
    save_quantized(module, path)
    other = nn.Module()
    other.w = nn.Parameter(torch.zeros(4, 4))
    for name, view in views.items():
        other.register_buffer(name, torch.zeros(view.shape))
    load_quantized(other, path)
    for (name, mine), (_, theirs) in zip(contents(other), contents(module), strict=True):
        assert torch.equal(mine, theirs), name
        assert isinstance(mine, nn.Parameter) == (name == "w")
    assert other.same.data_ptr() == other.w.data_ptr()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("mmap", [True, False])
def test_memory_mapped(mmap: bool, path: Path) -> None:
    saved = quantized()
    save_quantized(saved, path)
    model = load_quantized(meta(), path, mmap=mmap)
    assert_same(model, saved)
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0] for line in maps if line.rstrip().endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in item.split("-")) for item in mapped]
    for tensor in (model.fc.weight.qdata, model.fc.bias):
        assert any(start <= tensor.data_ptr() < stop for start, stop in ranges) == mmap


@pytest.mark.parametrize("shard_size", [1, 2**30])
def test_saving_over_the_file_that_is_mapped(shard_size: int, path: Path) -> None:
    saved = quantized()
    save_quantized(saved, path, max_shard_size=shard_size)
    model = load_quantized(meta(), path, mmap=True)
    save_quantized(model, path, max_shard_size=shard_size)
    assert_same(model, saved)
    assert_same(load_quantized(meta(), path), saved)


def test_folders_permissions_and_former_shards(tmp_path: Path, path: Path) -> None:
    save_quantized(quantized(), path, max_shard_size=1)
    assert len(files(path.parent)) == 10
    save_quantized(quantized(), path, max_shard_size=3000)
    assert_expected_inline(
        "\n".join(files(path.parent)),
        """\
model-TOKEN-00001-of-00001.safetensors
model.safetensors""",
    )
    save_quantized(quantized(), path)
    assert files(path.parent) == ["model.safetensors"]
    save_quantized(quantized(), path)
    assert_same(load_quantized(meta(), path, device="cpu"), load_quantized(Model(), path, device=torch.device("cpu")))
    assert all(tensor.is_meta for _, tensor in contents(load_quantized(Model(), path, device="meta")))
    save_quantized(nn.Linear(2, 2), path)
    path.with_name("other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.with_name("other").stat().st_mode)
    with pytest.raises(IsADirectoryError, match=f"save_quantized: {tmp_path} is a folder; give the name of a file"):
        save_quantized(nn.Linear(2, 2), tmp_path)
    with pytest.raises(FileNotFoundError, match=f"save_quantized: there is no folder {tmp_path / 'no'}"):
        save_quantized(nn.Linear(2, 2), tmp_path / "no" / "model.safetensors")


@pytest.mark.parametrize("name", ["modèle ☃.safetensors", "a b", "m[12].safetensors", ".hidden", "x.tar.gz"])
def test_names_of_files(name: str, tmp_path: Path) -> None:
    saved = quantized()
    for _ in range(2):
        save_quantized(saved, str(tmp_path / name), max_shard_size=SMALL)
    assert len(files(tmp_path)) > 2
    assert_same(load_quantized(Model(), str(tmp_path / name)), saved)


@pytest.mark.parametrize("other", ["model2.safetensors", "model.2", "model", "mode[l].safetensors", "model-a"])
def test_saving_beside_another_checkpoint(other: str, path: Path) -> None:
    saved = quantized()
    for targets in itertools.permutations([path, path.with_name(other)]):
        for target in targets:
            save_quantized(saved, target, max_shard_size=SMALL)
        for target in targets:
            assert_same(load_quantized(Model(), target), saved)


# --- what cannot be saved ---
class WithState(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(("source", "message"), [
    (nn.Sequential(WithState(2, 2)), "0 has extra state, which safetensors cannot hold"),
    (nn.LazyLinear(2), "weight is not initialized yet; run the model once"),
    (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    ({"a": 1}, "a is a int, not a tensor"),
    ({"a": torch.eye(2).to_sparse()}, "a is a torch.sparse_coo tensor of torch.float32, which safetensors cannot"),
    ({"a": torch.zeros(2, dtype=torch.complex128)}, "a is a torch.strided tensor of torch.complex128, which safet"),
    ({"a": torch.zeros(2).as_subclass(Subclass)}, "a is a Subclass, which has no canonical form"),
    ({"w": INT8.apply(torch.randn(4, 4)), "w_scale": torch.ones(1)}, "two tensors would be stored as w_scale"),
    ({"w_scale": torch.ones(1), "w": INT8.apply(torch.randn(4, 4))}, "two tensors would be stored as w_scale"),
], ids=lambda value: "" if isinstance(value, str) else type(value).__name__)  # fmt: skip
def test_refused(source: object, message: str, path: Path) -> None:
    save_quantized(nn.Linear(3, 3), path)
    before = path.read_bytes()
    refuses(f"^save_quantized: {re.escape(message)}", lambda: save_quantized(source, path))
    assert files(path.parent) == ["model.safetensors"]
    assert path.read_bytes() == before


# --- what does not fit the model ---
def with_layer(name: str, layer: nn.Module) -> Model:
    model = Model()
    setattr(model, name, layer)
    return model


@pytest.mark.parametrize(("saved", "model", "message"), [
    (
        {"weight": torch.zeros(2, 2), "wieght": torch.zeros(1)},
        nn.Linear(2, 2),
        "missing key bias; unexpected key wieght; the model is unchanged",
    ),
    (
        {f"k{i}": torch.zeros(1) for i in range(9)},
        Model(),
        "missing key experts, embed.weight, fc.weight, fc.bias, ...; unexpected key k0, k1, k2, k3, ...; the mod",
    ),
    (
        quantized(),
        with_layer("fc", nn.Linear(16, 32)),
        "fc.weight has shape (32, 32), the model's has (32, 16); the model is unchanged",
    ),
    (
        quantized(),  # the second of two names of a tied weight
        with_layer("head", nn.Linear(8, 24, bias=False)),
        "head.weight has shape (24, 32), the model's has (24, 8); the model is unchanged",
    ),
    (nn.Linear(2, 2), nn.LazyLinear(2), "weight of the model is not initialized yet; run the model once"),
], ids=["keys", "many keys", "shape", "tied shape", "lazy"])  # fmt: skip
def test_misfit(saved: nn.Module | dict[str, Tensor], model: nn.Module, message: str, path: Path) -> None:
    save_quantized(saved, path)
    assert error(model, path).startswith(f"model.safetensors: {message}")
