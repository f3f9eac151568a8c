"""The model that the checkpoint tests save and load: ties, a buffer outside its state dict, every kind of weight."""

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qtorch

INT8 = qtorch.int8_weight_only()
RECIPES = [
    INT8,
    qtorch.int4_weight_only(group_size=16),
    qtorch.int4_weight_only(group_size=16, zero_point_domain=qtorch.ZeroPointDomain.FLOAT),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(),
]


class Model(nn.Module):
    """Tied weights, experts, and buffers of every kind: 0-d, empty, not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 32)
        self.fc = nn.Linear(32, 32)
        self.experts = nn.Parameter(torch.randn(2, 32, 32))
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("angles", torch.randn(32), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.fc(self.embed(ids) * self.angles).tanh()
        return self.head(torch.bmm(torch.stack([x, x]), self.experts.mT).sum(0))


IDS = torch.arange(24)
SMALL = 1000
"""Bytes of a shard that make several of this model."""


def quantized(recipe: qtorch.recipes.base.Recipe = INT8) -> Model:
    model = Model()
    qtorch.quantize_(model, {"fc": recipe, "experts": recipe, "embed": INT8})
    return model.eval()


def meta() -> Model:
    with torch.device("meta"):
        return Model()


def contents(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(contents(model), contents(other), strict=True):
        assert type(mine) is type(theirs), name
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert torch.equal(mine, theirs), name
    with torch.no_grad():
        assert torch.equal(model(IDS), other(IDS))


def files(folder: Path) -> list[str]:
    """Without what differs from save to save."""
    return sorted(re.sub("-[0-9a-f]{8}-", "-TOKEN-", path.name) for path in folder.iterdir())


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header, with a checksum that fits."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["qtorch"])
    change(header)
    text = json.dumps(header)
    save_file(load_file(path), path, {"qtorch": text, "qtorch.crc32": str(zlib.crc32(text.encode()))})


def error(model: nn.Module, path: Path, kind: type[Exception] = ValueError) -> str:
    """What loading says, the folder left out; the model has to be as it was."""
    before = contents(model)
    with pytest.raises(kind, match=re.escape(str(path.parent))) as caught:
        qtorch.load_quantized(model, path)
    assert type(caught.value) is kind
    assert all(a is b for (_, a), (_, b) in zip(before, contents(model), strict=True))
    return str(caught.value).replace(f"{path.parent}{os.sep}", "")
