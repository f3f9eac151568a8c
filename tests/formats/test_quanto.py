"""quanto: what it writes itself, and the same by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qtorch import load_quantized
from qtorch.dtypes import QuantizedTensor
from tests.formats.folders import check, plain_tensors, quantized_config, refused, to_dtype, write
from tests.formats.test_float8 import e4m3

SHAPE = OUTPUTS, INPUTS = 32, 64


def layer(kind: torch.dtype = torch.int8) -> dict[str, Tensor]:
    codes = e4m3(*SHAPE) if kind.is_floating_point else torch.randint(-127, 128, SHAPE, dtype=kind)
    of_layer = {"layer.weight._data": codes, "layer.weight._scale": torch.rand(OUTPUTS, 1).bfloat16() + 0.01}
    scales = {f"layer.{name}_scale": torch.ones((), dtype=torch.bfloat16) for name in ("input", "output")}
    return {**of_layer, **scales, **plain_tensors(INPUTS, torch.bfloat16)}


@pytest.mark.parametrize("by_map", [False, True])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_a_byte(kind: torch.dtype, by_map: bool, tmp_path: Path) -> None:
    tensors = layer(kind)
    config = {"dtype": "bfloat16"} if by_map else quantized_config("quanto", "bfloat16")
    folder = write(tmp_path / "model", tensors, 2, config)
    if by_map:
        (folder / "quanto_qmap.json").write_text(json.dumps({"layer": {"weights": "qint8", "activations": "none"}}))
    codes, scale = tensors["layer.weight._data"].float(), tensors["layer.weight._scale"].float()
    wanted = to_dtype((codes.double() * scale.double()).tolist(), torch.bfloat16)
    check(folder, wanted, "weight_only_mm", 8.6)


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "groups": ("layer.weight._data._data", lambda t: torch.zeros(16, 64, dtype=torch.uint8), "no file of quanto says"),
    "few scales": ("layer.weight._scale", lambda t: t[1:], "layer.weight._scale has shape"),
    "other codes": ("layer.weight._data", lambda t: t.short(), "layer.weight._data has shape"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    part, change, says = DAMAGE[name]
    tensors = layer()
    tensors[part] = change(tensors.get(part))
    refused(write(tmp_path / "model", tensors, 1, quantized_config("quanto")), SHAPE, f"model.*{says}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qint8", "qfloat8_e4m3fn", "qfloat8_e5m2"])
def test_numbers_are_those_of_quanto(name: str, tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    theirs = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    quanto.quantize(theirs, weights=getattr(quanto, name))
    quanto.freeze(theirs)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(quanto.quantization_map(theirs)))
    ours = load_quantized(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), tmp_path)
    for index in (0, 2):
        weight = ours[index].weight
        assert isinstance(weight, QuantizedTensor)
        assert torch.equal(weight.dequantize(), theirs[index].weight.dequantize())
