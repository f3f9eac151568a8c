"""The package decompresses our files to our numbers, and we read its files as the numbers that it decompresses."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtorch import explain, load_quantized, save_quantized
from qtorch.dtypes import QuantizedTensor
from tests.formats.compressed_tensors import judge
from tests.formats.compressed_tensors.cases import CASES, GROUPS, Case

pytest.importorskip("compressed_tensors")

SHAPES = {"wide": (64, 192), "narrow": (33, 32)}
"""The second has rows whose packed codes end inside a word, or take as many words in both packings."""

# `python -m tools.versions compressed-tensors==0.17.0` runs these tests with that version, which packs codes of 3, 5, 6
# and 7 bits otherwise than vLLM has read them since 0.18, and guesses the size of blocks from the shapes.
OLD = metadata.version("compressed-tensors").startswith("0.17.")
of_today = [case for case in CASES if not (OLD and any(f"int{bits}," in str(case.recipe) for bits in (3, 5, 6, 7)))]
every_case = pytest.mark.parametrize("case", of_today, ids=lambda case: case.id)


def model_of(dtype: torch.dtype) -> nn.ModuleDict:
    return nn.ModuleDict({n: nn.Linear(columns, rows, bias=False) for n, (rows, columns) in SHAPES.items()}).to(dtype)


def quantized(case: Case) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = model_of(case.dtype)
    if "PerBlock" in case.id:
        del model["narrow"]
    for module in model.values():
        with torch.no_grad():
            rows = torch.linspace(0.1, 2, module.weight.shape[0]).reshape(-1, 1)
            made = case.make(torch.randn(module.weight.shape) * rows)
        module.weight = nn.Parameter(made, requires_grad=False)
    return model


def write(case: Case, folder: Path) -> nn.ModuleDict:
    model = quantized(case)
    save_quantized(model, folder, format="compressed-tensors")
    return model


def check_equal(model: nn.ModuleDict, floats: dict[str, Tensor]) -> None:
    """The numbers of the package, in its dtype: that of the scale, or bfloat16."""
    assert floats.keys() == {f"{name}.weight" for name in model}
    for name, module in model.items():
        found = floats[f"{name}.weight"]
        assert isinstance(module.weight, QuantizedTensor)
        assert torch.equal(module.weight.dequantize(found.dtype), found)


@every_case
def test_the_package_reads_what_is_written(case: Case, tmp_path: Path) -> None:
    model = write(case, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert config["format"] == case.format
    check_equal(model, judge.decompress(tmp_path / "model"))


@every_case
def test_what_is_written_is_read_again(case: Case, tmp_path: Path) -> None:
    model = write(case, tmp_path / "model")
    again = model_of(case.dtype)
    for name in again.keys() - model.keys():
        del again[name]
    load_quantized(again, tmp_path / "model")
    for name, module in model.items():
        read = again[name].weight
        assert isinstance(read, QuantizedTensor)
        assert read.scheme.dtype is case.dtype
        assert torch.equal(read.dequantize(), module.weight.dequantize())
        scales = 3 * read.shape[0] if "PerTensor" in case.id else 8
        assert read.nbytes <= module.weight.nbytes + scales  # stays packed
        assert explain(read).kernel == explain(module.weight).kernel
        x = torch.randn(3, read.shape[1]).to(case.dtype)
        assert torch.equal(again[name](x), module(x))


def config_of(word: str) -> dict[str, Any]:
    format, weights = GROUPS[word]
    # The package has weights in bytes only together with quantized inputs.
    dynamic = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
    inputs = {**dynamic, "type": weights["type"]} if format in ("int-quantized", "float-quantized") else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [],
    }  # fmt: skip


def floats_of(word: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(64, 192)
    if "beyond the edge" in word:
        return {"wide.weight": wide[:48].to(dtype)}
    if "blocks" in word:
        return {"wide.weight": wide.to(dtype)}
    return {"wide.weight": wide.to(dtype), "narrow.weight": (torch.randn(33, 32) + 0.3).to(dtype)}


def read(folder: Path, floats: dict[str, Tensor]) -> nn.ModuleDict:
    names = {name.removesuffix(".weight"): weight.shape for name, weight in floats.items()}
    model = nn.ModuleDict({name: nn.Linear(shape[1], shape[0], bias=False) for name, shape in names.items()})
    load_quantized(model, folder)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("word", [word for word in GROUPS if not (OLD and "beyond the edge" in word)])
def test_what_the_package_writes_is_read(word: str, dtype: torch.dtype, tmp_path: Path) -> None:
    floats = floats_of(word, dtype)
    judge.compress(floats, config_of(word), tmp_path / "model")
    model = read(tmp_path / "model", floats)
    check_equal(model, judge.decompress(tmp_path / "model"))
    for name, module in model.items():
        # Something was quantized.
        assert not torch.equal(module.weight.dequantize(torch.float32), floats[f"{name}.weight"].float())
