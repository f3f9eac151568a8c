"""Folders of transformers: which files they name, what is refused, and plain folders as a Source."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qtorch import int8_weight_only, load_quantized, quantize_, save_quantized
from qtorch.checkpoint.hf_folder import FloatFolder, HFFolder
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


def test_contents_are_known_without_the_data(tmp_path: Path) -> None:
    with open_source(write(tmp_path, tensors(), 2)) as source:
        assert source.format == "transformers"
        assert source.contents("body.weight") == ((16, 16), torch.float32, 16 * 16 * 4, None)


def test_what_a_configuration_says(tmp_path: Path) -> None:
    config = {"text_config": {"dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}}}
    with HFFolder(write(tmp_path, tensors(), config=config)) as folder:
        assert folder.dtype is torch.bfloat16
        assert folder.quantization_config == {"quant_method": "gptq"}
    write(tmp_path, tensors(), config={"torch_dtype": "float16"})
    with HFFolder(tmp_path) as folder:
        assert folder.dtype is torch.float16
        assert folder.quantization_config == {}


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    write(tmp_path, tensors(), config={"quantization_config": {"quant_method": "eetq"}})
    refuses(r"config.json: quant_method is 'eetq'; known: ", lambda: load_quantized(Tied(), tmp_path))


def test_a_folder_of_save_quantized_is_named(tmp_path: Path) -> None:
    model = Tied()
    quantize_(model, {"body": int8_weight_only()})
    save_quantized(model, tmp_path / "model.safetensors")
    refuses(r"holds a checkpoint of save_quantized; open its file .*model.safetensors", lambda: open_source(tmp_path))


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


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path, tensors(), 2)
    save_file(tensors(), tmp_path / "model-00001-of-00002.safetensors")
    refuses(r"is in it and in model-00000-of-00002.safetensors", lambda: open_source(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', '{"quantization_config": 3}', "[" * 100_000])
def test_damaged_configurations(text: str, tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "config.json").write_text(text)
    refuses(r"config\.json: ", lambda: open_source(tmp_path))


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    refuses("the folder is empty", lambda: open_source(tmp_path))
    with pytest.raises(FileNotFoundError):
        HFFolder(tmp_path)


def test_a_single_file_can_be_opened(tmp_path: Path) -> None:
    file = write(tmp_path, tensors()) / "model.safetensors"
    with FloatFolder.open(file) as source:
        assert source.names == tensors().keys()
