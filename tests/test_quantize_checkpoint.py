"""quantize_checkpoint writes what quantize_ and save_quantized write, without the model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qtorch
from qtorch import convert_checkpoint, load_quantized, quantize_, quantize_checkpoint, save_quantized
from qtorch.checkpoint import sources, tensor_file
from qtorch.checkpoint.streaming import forms
from tests.float_checkpoints import assert_same, decoder, expected, save_shards, stored
from tests.refusals import refuses

RECIPES = [
    qtorch.int4_weight_only(group_size=32), qtorch.int8_weight_only(),
    qtorch.int8_dynamic_activation_int4_weight(group_size=32), qtorch.nf4_weight_only(), qtorch.float8_weight_only(),
    qtorch.nvfp4_weight_only(),
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_shards(decoder().state_dict(), tmp_path / "float", 3)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_stored_tensors_are_equal(recipe: object, source: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(source, tmp_path / "q.safetensors", recipe)
    assert_same(stored(tmp_path / "q.safetensors"), expected(tmp_path / "wanted.safetensors", recipe))
    assert {layer.name for layer in report.quantized} == {
        "odd.weight",
        "lm_head.weight",
        *(f"layers.{i}.{name}.weight" for i in range(2) for name in ("q_proj", "down_proj")),
    }
    assert all(10 < layer.sqnr < 60 for layer in report.quantized)
    reasons = {layer.name: layer.detail for layer in report.skipped}
    assert "embedding" in reasons["embed_tokens.weight"]
    assert not list(tmp_path.glob(".*"))


def test_reports_and_names_that_are_too_long(source: Path, tmp_path: Path) -> None:
    recipe = qtorch.int8_weight_only()
    tried = quantize_checkpoint(source, tmp_path / "q.safetensors", recipe, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]
    done = quantize_checkpoint(source, tmp_path / "q.safetensors", recipe)
    assert (tried.dry_run, tried.layers) == (True, done.layers)
    recipe = {r"layers\..*": qtorch.int8_weight_only(), "embed_tokens": qtorch.int4_weight_only(group_size=32)}
    found = quantize_checkpoint(source, tmp_path / "found.safetensors", recipe)
    wanted = quantize_(decoder(), recipe)
    assert set(found.quantized) == set(wanted.quantized)
    assert found.quantized_parameters == wanted.quantized_parameters
    assert found.model_bytes_before == wanted.model_bytes_before
    assert found.model_bytes_after == wanted.model_bytes_after
    recipe = qtorch.int8_weight_only()
    with pytest.raises(ValueError, match="has more than 200 bytes"):
        quantize_checkpoint(source, tmp_path / ("x" * 300 + ".safetensors"), recipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for missing in (tmp_path / ("x" * 300), loop):
        with pytest.raises(FileNotFoundError, match="no such file"):
            quantize_checkpoint(missing, tmp_path / "q.safetensors", recipe)
        refuses("no such file", lambda missing=missing: load_quantized(decoder(), missing), FileNotFoundError)
    with pytest.raises(FileExistsError, match="exists; remove it"):
        quantize_checkpoint(source, loop.rename(tmp_path / "loop.safetensors"), recipe)


@pytest.mark.parametrize("limit", [1, 4000, 20_000])
def test_shards(limit: int, source: Path, tmp_path: Path) -> None:
    recipe = qtorch.int4_weight_only(group_size=32)
    quantize_checkpoint(source, tmp_path / "q.safetensors", recipe, max_shard_size=limit)
    found = sorted(path.name for path in tmp_path.glob("q*.safetensors"))
    assert len(found) > 1
    assert_same(stored(tmp_path / "q.safetensors"), expected(tmp_path / "wanted.safetensors", recipe))
    for name in found:
        sizes = [of.stop - of.start for of in tensor_file.TensorFile(tmp_path / name).stored.values()]
        assert sum(sizes) <= max(limit, 20_000)


def test_where_data_begin(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "q.safetensors", qtorch.nf4_weight_only())
    of_file = tensor_file.TensorFile(tmp_path / "q.safetensors").stored
    assert any((of.stop - of.start) % 64 for of in of_file.values())
    for name, of in of_file.items():
        assert of.start % of.dtype.itemsize == 0, name
        assert of.start % 64 == 0 or (of.stop - of.start) % 64, name
    assert load_file(tmp_path / "q.safetensors").keys() == of_file.keys()
    monkeypatch.setattr(forms, "_room", lambda names, of_each: 10)
    quantize_checkpoint(source, tmp_path / "again.safetensors", qtorch.nf4_weight_only(), max_shard_size=9000)
    wanted = expected(tmp_path / "wanted.safetensors", qtorch.nf4_weight_only())
    assert_same(stored(tmp_path / "again.safetensors"), wanted)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("format", ["qtorch", "transformers", "compressed-tensors"])
def test_heads_are_left_where_readers_expect_it(format: str, source: Path, tmp_path: Path) -> None:
    target, recipe = tmp_path / ("q.safetensors" if format == "qtorch" else "q"), qtorch.int8_weight_only()
    left = quantize_checkpoint(source, target, recipe, format=format, dry_run=True).skipped
    reason = {layer.name: layer.detail for layer in left}.get("lm_head.weight", "")
    assert reason.startswith("" if format == "qtorch" else "a head or a router, in floating point for the readers of")
    for given, reach in ((recipe, "all"), ({"lm_head": recipe}, "linear"), ({".*": recipe}, "linear")):
        found = quantize_checkpoint(source, target, given, targets=reach, format=format, dry_run=True)
        assert "lm_head.weight" in {layer.name for layer in found.quantized}


def test_kept_tied_and_nan(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "a.safetensors", {r".*q_proj": qtorch.int8_weight_only()})
    report = quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", qtorch.nf4_weight_only())
    model = decoder()
    quantize_(model, {r".*q_proj": qtorch.int8_weight_only(), ".*": qtorch.nf4_weight_only()})
    save_quantized(model, tmp_path / "wanted.safetensors")
    assert_same(stored(tmp_path / "b.safetensors"), stored(tmp_path / "wanted.safetensors"))
    assert sum(layer.detail == "is quantized already" for layer in report.layers) == 2
    quantize_checkpoint(source, tmp_path / "q.safetensors", qtorch.int4_weight_only(group_size=32))
    convert_checkpoint(tmp_path / "q.safetensors", tmp_path / "folder", format="transformers")
    convert_checkpoint(tmp_path / "folder", tmp_path / "again.safetensors", max_shard_size=8000)
    assert_same(stored(tmp_path / "again.safetensors"), stored(tmp_path / "q.safetensors"))
    (tmp_path / "q.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="remove it, or give another name"):
        quantize_checkpoint(source, tmp_path / "q.safetensors", qtorch.int8_weight_only())
    assert (tmp_path / "q.safetensors").read_text() == "mine"
    model = decoder()
    model.lm_head.weight = model.embed_tokens.weight
    save_quantized(model, tmp_path / "of_ties.safetensors")
    quantize_checkpoint(tmp_path / "of_ties.safetensors", tmp_path / "tied.safetensors", qtorch.int8_weight_only())
    tied = decoder()
    tied.lm_head.weight = tied.embed_tokens.weight
    load_quantized(tied, tmp_path / "tied.safetensors")
    assert tied.lm_head.weight is tied.embed_tokens.weight
    model = decoder()
    model.layers[1].q_proj.weight.data[0, 0] = torch.nan
    folder = save_shards(model.state_dict(), tmp_path / "with_nan", 1)
    with pytest.raises(ValueError, match=r"layers.1.q_proj.weight: has 1 values of 4096 that are NaN"):
        quantize_checkpoint(folder, tmp_path / "nan.safetensors", qtorch.int8_weight_only())
    assert not (tmp_path / "nan.safetensors").exists()


def test_experts(tmp_path: Path) -> None:
    experts = {
        f"layers.0.mlp.experts.{i}.{name}.weight": torch.randn(shape)
        for i in range(4)
        for name, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items()
    }

    def of(index: int, name: str) -> torch.Tensor:
        return experts[f"layers.0.mlp.experts.{index}.{name}_proj.weight"]

    tensors = {**experts, "layers.0.mlp.gate.weight": torch.randn(4, 64)}
    folder = save_shards(tensors, tmp_path / "float", 2, {"model_type": "qwen3_moe"})
    quantize_checkpoint(folder, tmp_path / "q.safetensors", qtorch.int4_weight_only(group_size=32))

    fused = {
        "gate_up_proj": torch.stack([torch.cat([of(i, "gate"), of(i, "up")]) for i in range(4)]),
        "down_proj": torch.stack([of(i, "down") for i in range(4)]),
    }
    mlp = torch.nn.ModuleDict({"gate": torch.nn.Linear(64, 4, bias=False), "experts": torch.nn.ParameterDict(fused)})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": mlp})])})
    load_quantized(model, tmp_path / "q.safetensors")
    recipe = qtorch.int4_weight_only(group_size=32)
    for name, value in fused.items():
        assert torch.equal(mlp["experts"][name].dequantize(), recipe.apply(value).dequantize())
    assert not isinstance(mlp["gate"].weight, qtorch.dtypes.QuantizedTensor)
    # The matrices of all experts in one tensor: by name only, as in quantize_.
    named = {f"mlp.experts.{name}": value for name, value in fused.items()}
    save_file({**named, "head.weight": torch.randn(8, 64)}, tmp_path / "fused.safetensors")
    report = quantize_checkpoint(
        tmp_path / "fused.safetensors", tmp_path / "f.safetensors", {r".*\.(gate_up|down)_proj": recipe}
    )
    assert len(report.quantized) == 2
    assert torch.equal(
        sources.open_source(tmp_path / "f.safetensors").tensor("mlp.experts.down_proj").dequantize(),
        recipe.apply(fused["down_proj"]).dequantize(),
    )


@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_of_transformers(shards: bool, source: Path, tmp_path: Path) -> None:
    recipe = qtorch.int4_weight_only(group_size=32)
    limit = 9000 if shards else 1 << 30
    quantize_checkpoint(source, tmp_path / "q", recipe, format="transformers", max_shard_size=limit)
    names = {path.name for path in (tmp_path / "q").iterdir()}
    assert {"config.json", "tokenizer.json"} < names
    assert ("model.safetensors.index.json" in names) == shards == (len(names) > 3)
    assert "README.md" not in names
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["model_type"] == "test"
    assert config["quantization_config"]["quant_method"] == "qtorch"
    assert config["quantization_config"]["names"] == "checkpoint"
    model = decoder(seed=1)
    load_quantized(model, tmp_path / "q")
    wanted = decoder()
    quantize_(wanted, {"lm_head": None, ".*": recipe})
    for name, parameter in wanted.named_parameters():
        found = model.get_parameter(name)
        assert type(found) is type(parameter), name
        both = [p.dequantize() if isinstance(p, qtorch.dtypes.QuantizedTensor) else p for p in (found, parameter)]
        assert torch.equal(*both), name


@pytest.mark.parametrize(
    "recipe", [qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32), qtorch.nvfp4_weight_only()], ids=str
)
def test_compressed_tensors(recipe: object, source: Path, tmp_path: Path) -> None:
    mapping = {r"layers\..*": recipe}
    quantize_checkpoint(source, tmp_path / "q", mapping, format="compressed-tensors")
    model = decoder()
    quantize_(model, qtorch.recipes_for_vllm(model, mapping))
    save_quantized(model, tmp_path / "wanted", format="compressed-tensors")
    assert_same(load_file(tmp_path / "q" / "model.safetensors"), load_file(tmp_path / "wanted" / "model.safetensors"))
    configs = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("q", "wanted")]
    for config in configs:
        config["ignore"] = sorted(config["ignore"])
        config["config_groups"] = {
            key: {**g, "targets": sorted(g["targets"])} for key, g in config["config_groups"].items()
        }
    assert configs[0] == configs[1]


# --- errors ---
@pytest.mark.parametrize(("recipe", "options", "error"), [
    (qtorch.int8_weight_only, {}, r"int8_weight_only\(\)"),
    (qtorch.int4_weight_only(group_size=48), {}, "does not divide"),
    ({"nothing": qtorch.int8_weight_only()}, {}, "matches no linear layer"),
    (qtorch.training.qat(qtorch.int8_weight_only()), {}, "use quantize_"),
    (qtorch.int8_weight_only(), {"format": "gguff"}, "is not known; known are 'qtorch'"),
    (qtorch.int8_weight_only(), {"dst": "folder"}, "is a file, such as folder.safetensors"),
    (qtorch.int8_weight_only(), {"dst": "none/q.safetensors"}, "there is no folder"),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_wrong_arguments(recipe: object, options: dict[str, str], error: str, source: Path, tmp_path: Path) -> None:
    dst = tmp_path / options.pop("dst", "q.safetensors")
    refuses(error, lambda: quantize_checkpoint(source, dst, recipe, **options), (ValueError, TypeError, OSError))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


# --- names, and what lies beside the weights ---
@pytest.mark.parametrize("name", ["__metadata__", "half of a character \ud800"])
@pytest.mark.parametrize("format", ["qtorch", "transformers", "compressed-tensors"])
def test_names_that_no_file_can_hold(name: str, format: str, source: Path, tmp_path: Path) -> None:
    """Whatever reader has them: they are refused before anything is written."""

    class Named(sources.QtorchSource):
        format = "test"

        @classmethod
        def recognizes(cls, path: Path) -> bool:
            return path.suffix == ".safetensors"

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.names = {name}

        def contents(self, name: str) -> sources.Contents:
            return super().contents("odd.weight")

    save_quantized(decoder(), tmp_path / "s.safetensors")
    dst = tmp_path / ("q.safetensors" if format == "qtorch" else "q")
    sources.register_source(Named)
    try:
        with pytest.raises(ValueError, match=r"s\.safetensors: .*rename the tensor"):
            convert_checkpoint(tmp_path / "s.safetensors", dst, format=format)
    finally:
        sources.SOURCES.remove(Named)
    refuses("rename the tensor", lambda: save_quantized({name: torch.zeros(2, 2)}, dst, format=format))
    assert {path.name for path in tmp_path.iterdir()} == {"float", "s.safetensors"}


def test_links_to_what_is_copied(source: Path, tmp_path: Path) -> None:
    """The cache of Hugging Face consists of links; one to anything else would publish it."""
    secret = tmp_path / "secret"
    secret.write_text('{"auths": "token"}')
    recipe = qtorch.int8_weight_only()
    for number, name in enumerate(("tokenizer.json", "config.json", "additional_chat_templates/a.jinja")):
        copy = tmp_path / f"copy {number}"
        shutil.copytree(source, copy)
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(secret)
        with pytest.raises(ValueError, match=rf"{name} is a link to .*secret, outside of the folder"):
            quantize_checkpoint(copy, tmp_path / "q", recipe, format="transformers")
    assert not list(tmp_path.glob("q*"))
    assert not list(tmp_path.glob(".q*"))

    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        shutil.copy(path, blobs / f"hash of {path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash of {path.name}")
    (snapshot / "merges.txt").symlink_to("tokenizer.json")
    quantize_checkpoint(snapshot, tmp_path / "q", recipe, format="transformers")
    assert (tmp_path / "q" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert not any(path.is_symlink() for path in (tmp_path / "q").iterdir())
