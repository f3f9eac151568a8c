"""Folders of transformers: plain ones, and those that qtorch has quantized."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import qtorch
from qtorch import dequantize_, int8_weight_only, load_quantized, nf4_weight_only, quantize_, save_quantized
from qtorch.checkpoint import hf_folder, tensor_file
from qtorch.checkpoint.formats.transformers_folder import Index, cast, quantization_config, stored
from qtorch.checkpoint.sources import open_source
from tests.formats.folders import write
from tests.refusals import refuses


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embed.weight


def tensors() -> dict[str, Tensor]:
    state = {name: tensor.detach().clone() for name, tensor in Tied().state_dict().items()}
    del state["head.weight"]
    return state


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_plain_folder_loads_with_its_ties(shards: int, mmap: bool, tmp_path: Path) -> None:
    """transformers leaves out the second name of a tied parameter."""
    wanted = tensors()
    model = Tied()
    load_quantized(model, write(tmp_path, wanted, shards), mmap=mmap)
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_contents_casts_and_what_a_folder_may_not_be(tmp_path: Path) -> None:
    with open_source(write(tmp_path, tensors(), 2)) as source:
        assert source.format == "transformers"
        assert source.contents("body.weight") == ((16, 16), torch.float32, 16 * 16 * 4, None)
    config = {"text_config": {"dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}}}
    with hf_folder.HFFolder(write(tmp_path, tensors(), config=config)) as folder:
        assert folder.dtype is torch.bfloat16
        assert folder.quantization_config == {"quant_method": "gptq"}
    write(tmp_path, tensors(), config={"torch_dtype": "float16"})
    with hf_folder.HFFolder(tmp_path) as folder:
        assert folder.dtype is torch.float16
        assert folder.quantization_config == {}
    weight = nn.Linear(64, 32)
    quantize_(weight, nf4_weight_only())
    before = weight.weight
    after = cast(before, torch.bfloat16)
    assert after.dtype is torch.bfloat16
    assert torch.equal(after.dequantize(torch.float32), before.dequantize())
    assert cast(before, torch.int8) is before
    eetq = write(tmp_path / "eetq", tensors(), config={"quantization_config": {"quant_method": "eetq"}})
    refuses(r"config.json: quant_method is 'eetq'; known: ", lambda: load_quantized(Tied(), eetq))
    model = Tied()
    quantize_(model, {"body": int8_weight_only()})
    ours, empty = tmp_path / "ours", tmp_path / "empty"
    ours.mkdir()
    save_quantized(model, ours / "model.safetensors")
    refuses(r"holds a checkpoint of save_quantized; open its file .*model.safetensors", lambda: open_source(ours))
    twice = write(tmp_path / "twice", tensors(), 2)
    save_file(tensors(), twice / "model-00001-of-00002.safetensors")
    refuses(r"is in it and in model-00000-of-00002.safetensors", lambda: open_source(twice))
    empty.mkdir()
    refuses("the folder is empty", lambda: open_source(empty))
    with pytest.raises(FileNotFoundError):
        hf_folder.HFFolder(empty)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 3, None])
def test_an_index_names_files_of_its_folder_only(name: object, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    write(tmp_path, tensors())
    write(inner, tensors(), 2)
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"body.weight": name}}))
    refuses("is not the name of a file in its folder", lambda: open_source(inner))


def break_index(folder: Path, change: Any) -> None:
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    change(data["weight_map"])
    index.write_text(json.dumps(data))


@pytest.mark.parametrize(("change", "says"), [
    (lambda m: m.update(more="model-00000-of-00002.safetensors"), "more is not in model-00000"),
    (lambda m: m.update(more="gone.safetensors"), "its shard gone.safetensors is missing"),
    (lambda m: m.clear(), "it has no weight_map"),
    (lambda m: m.update({"body.weight": m["body.bias"]}), "body.weight is not in model-00000"),
])  # fmt: skip
def test_damaged_indices(change: Any, says: str, tmp_path: Path) -> None:
    write(tmp_path, tensors(), 2)
    break_index(tmp_path, change)
    refuses(f"model.safetensors.index.json: .*{says}", lambda: open_source(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', '{"quantization_config": 3}', "[" * 100_000])
def test_damaged_configurations(text: str, tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "config.json").write_text(text)
    refuses(r"config\.json: ", lambda: open_source(tmp_path))


def test_the_bare_name_single_files_and_missing_shards(tmp_path: Path) -> None:
    file = write(tmp_path, tensors()) / "model.safetensors"
    with hf_folder.FloatFolder.open(file) as source:
        assert source.names == tensors().keys()
    model = quantized()
    write_of_transformers_folder(model, tmp_path / "m")
    with open_source(tmp_path / "m" / "model.safetensors") as source:
        assert source.format == "transformers folder of qtorch"
        assert source.names == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}
        contents = source.contents("1.weight")
        assert (contents.shape, contents.scheme) == ((64, 32), model[1].weight.scheme)
        assert contents.nbytes == 64 * 32 // 2 + 64 * 4 + 64  # codes, scales, zero points
        assert source.contents("0.bias").scheme is None
    write_of_transformers_folder(quantized(), tmp_path / "bare")
    file = tensor_file.TensorFile(tmp_path / "bare" / "model.safetensors")
    assert (file.stored["0.weight"].shape, file.stored["0.weight_codes"].shape) == ((0,), (32, 64))
    file.close()
    write_of_transformers_folder(quantized(), tmp_path / "shards", 2)
    first, second = sorted((tmp_path / "shards").glob("*.safetensors"))
    edit(second, lambda t, d: d["aliases"].update({"2.weight": "1.bias"}))
    refuses(r"describe 2\.weight in different ways", lambda: load_quantized(build(), tmp_path / "shards"))
    first.unlink()
    refuses(r"its shard .* is missing", lambda: load_quantized(build(), tmp_path / "shards"))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False))
    model[2].weight = model[0].weight
    return model


def quantized() -> nn.Sequential:
    model = build()
    quantize_(model, {"0": int8_weight_only(), "1": qtorch.int4_weight_only(group_size=32)})
    return model


def write_of_transformers_folder(model: nn.Module, folder: Path, shards: int = 1) -> None:
    """As a streaming writer would: a shard has the entries of its own tensors."""
    files: list[tuple[dict[str, Any], Index]] = [({}, Index(aliases={"2.weight": "0.weight"})) for _ in range(shards)]
    for number, (name, tensor) in enumerate(model.named_parameters()):
        tensors, index = files[number % shards]
        if isinstance(tensor, qtorch.dtypes.QuantizedTensor):
            parts, index.quantized[name] = stored(name, tensor)
            tensors |= parts
        else:
            tensors[name] = tensor.detach()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization_config(int8_weight_only())}))
    names = ["model.safetensors"]
    if shards > 1:
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        where = {key: name for name, (tensors, _) in zip(names, files, strict=True) for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name, (tensors, index) in zip(names, files, strict=True):
        contiguous = {key: value.contiguous() for key, value in tensors.items()}
        tensor_file.write_tensors(folder / name, contiguous, {"format": "pt", **index.to_metadata()})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mmap", [False, True])
def test_load_quantized_reads_it(tmp_path: Path, shards: int, mmap: bool) -> None:
    model, x = quantized(), torch.randn(2, 64)
    write_of_transformers_folder(model, tmp_path / "m", shards)
    loaded = load_quantized(build(), tmp_path / "m", mmap=mmap)
    assert loaded[0].weight is loaded[2].weight
    assert isinstance(loaded[1].weight, qtorch.dtypes.QuantizedTensor)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(dequantize_(loaded)[1].weight, model[1].weight.dequantize())


def edit(path: Path, change: Any) -> None:
    """Rewrite a safetensors file with `change(tensors, data of the index)` applied."""
    file = tensor_file.TensorFile(path)
    tensors = {name: file.read(name) for name in file.stored}
    data = json.loads(file.metadata["qtorch.transformers"])
    file.close()
    change(tensors, data)
    tensor_file.write_tensors(path, tensors, {"qtorch.transformers": json.dumps(data)})


@pytest.mark.parametrize(("change", "words"), [
    (lambda t, d: d.update(version=2), "version 2"),
    (lambda t, d: d.update(quantized=[]), "no objects"),
    (lambda t, d: d["quantized"]["0.weight"].pop("scheme"), "no scheme"),
    (lambda t, d: d["quantized"]["0.weight"]["tensors"].update(codes="elsewhere"), "missing key elsewhere"),
    (lambda t, d: d["quantized"]["0.weight"]["tensors"].update(codes="1.weight_scale"), "more than one tensor"),
    (lambda t, d: t.update({"0.weight": torch.ones(3)}), "both quantized and in floating point"),
    (lambda t, d: d["aliases"].update({"2.weight": "nothing"}), "another name of 'nothing'"),
    (lambda t, d: d["aliases"].update({"0.bias": "1.bias"}), "stored itself"),
    (lambda t, d: t.update({"0.weight_codes": torch.zeros(3, dtype=torch.int8)}), "codes have shape"),
])  # fmt: skip
def test_damage_is_reported(tmp_path: Path, change: Any, words: str) -> None:
    write_of_transformers_folder(quantized(), tmp_path / "m")
    edit(tmp_path / "m" / "model.safetensors", change)
    refuses(words, lambda: load_quantized(build(), tmp_path / "m"))
