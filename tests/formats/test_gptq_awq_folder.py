"""Folders of GPTQ and AWQ that are written here: read back bit for bit, and by the formulas of the formats alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qtorch
from qtorch import (
    convert_checkpoint,
    int4_weight_only,
    int8_weight_only,
    intx_weight_only,
    load_quantized,
    quantize_,
    save_quantized,
)

BITS32 = torch.arange(32)

RECIPES = {
    "uint4": int4_weight_only(group_size=32),
    "int4": intx_weight_only("int4", group_size=64),
    "int8": int8_weight_only(group_size=32),
    "int8 rows": int8_weight_only(scale_dtype=torch.bfloat16),
    "int3": intx_weight_only("int3", group_size=32),
    "int2": intx_weight_only("int2", group_size=32),
}
CASES = [("gptq", name) for name in RECIPES] + [("awq", name) for name in ("int4", "uint4")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(torch.bfloat16)


def bits_of(words: torch.Tensor) -> torch.Tensor:
    """(R, W) int32 -> bits (R, 32 W), the lowest first."""
    return ((words[..., None] >> BITS32) & 1).flatten(1)


def numbers(bits: torch.Tensor, width: int) -> torch.Tensor:
    return (bits.unflatten(1, (-1, width)) << torch.arange(width)).sum(-1)


def by_formula(path: Path, layer: str) -> torch.Tensor:
    """The weight (O, I) of a layer in fp32, w = (q - z) s, from the definitions of both formats."""
    stored = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    width, scales = config["bits"], stored[f"{layer}.scales"].float()
    words, zeros = stored[f"{layer}.qweight"], stored[f"{layer}.qzeros"]
    if config["quant_method"] == "gptq":
        q = numbers(bits_of(words.t().contiguous()), width)
        z = numbers(bits_of(zeros), width) + (config["checkpoint_format"] == "gptq")
        group = stored[f"{layer}.g_idx"].long()
        return ((q - z[group].t()) * scales[group].t()).float()
    nibble = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    unpack = lambda words: numbers(bits_of(words), 4).unflatten(1, (-1, 8))[:, :, nibble].flatten(1)  # noqa: E731
    q, z = unpack(words), unpack(zeros)
    group = torch.arange(len(q)) // (len(q) // len(z))
    return ((q - z[group]) * scales[group]).t()


@pytest.mark.parametrize("format, name", CASES)
def test_bit_for_bit(format: str, name: str, tmp_path: Path) -> None:
    model = build()
    quantize_(model, RECIPES[name])
    save_quantized(model, tmp_path / "made", format=format)
    loaded = build()
    load_quantized(loaded, tmp_path / "made")
    for layer in ("0", "2"):
        weight = model.get_submodule(layer).weight
        assert torch.equal(loaded.get_submodule(layer).weight.dequantize(), weight.dequantize())
        assert torch.equal(by_formula(tmp_path / "made", layer), weight.dequantize(torch.float32))
    assert torch.equal(loaded[1].weight, model[1].weight)


REFUSED = {
    "float8": (qtorch.float8_weight_only(), "has codes in float8_e4m3fn, and the format has integers"),
    "nf4": (qtorch.nf4_weight_only(group_size=32), "is a LUTQuantizedTensor"),
    "activations": (qtorch.int8_dynamic_activation_int4_weight(group_size=32), "quantizes its activations"),
    "fp32 scales": (int8_weight_only(), r"has scales in torch.float32, and engines keep them in torch.bfloat16"),
    "five bits": (intx_weight_only("int5", group_size=32), "has codes in int5"),
}


@pytest.mark.parametrize("format", ["gptq", "awq"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(format: str, name: str, tmp_path: Path) -> None:
    recipe, message = REFUSED[name]
    model = build()
    quantize_(model, recipe)
    if format == "awq" and name == "fp32 scales":
        message = "has codes in int8"
    with pytest.raises(ValueError, match=rf"{format}: 0.weight {message}.*quantize with int"):
        save_quantized(model, tmp_path / "made", format=format)
    assert not (tmp_path / "made").exists()


def test_one_kind_of_weight_and_zero_points_of_zero(tmp_path: Path) -> None:
    model = build()
    quantize_(model, {"0": RECIPES["int4"], "2": RECIPES["int3"]})
    with pytest.raises(ValueError, match=r"gptq: 2.weight has .*a folder has one of each"):
        save_quantized(model, tmp_path / "made", format="gptq")
    positive = nn.Sequential(nn.Linear(128, 64)).to(torch.bfloat16)
    positive[0].weight.data.abs_()
    quantize_(positive, RECIPES["uint4"])
    own = tmp_path / "own.safetensors"
    save_quantized(positive, own)
    with pytest.raises(ValueError, match=r"gptq: 0.weight has zero points of 0.*gptq_v2"):
        save_quantized(positive, tmp_path / "made", format="gptq")
    convert_checkpoint(own, tmp_path / "v2", format="gptq", options={"checkpoint_format": "gptq_v2"})
    assert torch.equal(by_formula(tmp_path / "v2", "0"), positive[0].weight.dequantize(torch.float32))


def test_a_checkpoint_is_converted_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qtorch.cli import main

    model = build()
    quantize_(model, RECIPES["int4"])
    save_quantized(model, tmp_path / "own.safetensors")
    assert not main(["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "awq"), "--format", "awq"])
    assert not main(["convert", str(tmp_path / "awq"), str(tmp_path / "gptq"), "--format", "gptq"])
    assert torch.equal(by_formula(tmp_path / "gptq", "0"), model[0].weight.dequantize(torch.float32))
