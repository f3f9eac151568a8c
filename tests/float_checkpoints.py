"""Checkpoints in floating point, as others write them, and what they are once they are quantized."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qtorch import quantize_, save_quantized
from qtorch.checkpoint.sources import open_source

HIDDEN = 64


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)


class Decoder(nn.Module):
    """The names of a decoder, with a bias and a buffer of odd sizes."""

    def __init__(self, hidden: int = HIDDEN, layers: int = 2, vocabulary: int = 101) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.odd = nn.Linear(hidden, 3)
        self.register_buffer("steps", torch.arange(5))
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)


def decoder(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    torch.manual_seed(seed)
    return Decoder().to(dtype)


def save_shards(tensors: dict[str, Tensor], folder: Path, count: int, config: dict[str, object] | None = None) -> Path:
    """A folder of transformers with `count` shards, a configuration and a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "test", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("the card of the float model")
    names = sorted(tensors)
    places = {}
    for index in range(count):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name].contiguous().clone() for name in names[index::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def stored(path: Path) -> dict[str, Tensor]:
    """All stored tensors of a checkpoint with its shards."""
    with open_source(path) as opened:
        files = opened.files  # type: ignore[attr-defined]
        return {name: file.read(name) for file in files for name in file.stored}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)), name


def expected(path: Path, recipe: object) -> dict[str, Tensor]:
    """What quantize_ and save_quantized write."""
    model = decoder()
    quantize_(model, recipe)
    save_quantized(model, path)
    return stored(path)
