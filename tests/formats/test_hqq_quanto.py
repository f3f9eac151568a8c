"""Checkpoints of HQQ and quanto."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qtorch import load_quantized
from qtorch.dtypes import QuantizedTensor
from tests.formats.folders import check, load, plain_tensors, quantized_config, refused, to_dtype, write
from tests.formats.test_float8 import e4m3

OUTPUTS, INPUTS = 32, 64
SHAPE = OUTPUTS, INPUTS
PACKINGS = dict.fromkeys((8, 6, 5), "8bit_u8") | {
    4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1.58: "2bit_u8", 1: "1bit_u8",
}  # fmt: skip
OFF = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero")
ON = ("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize")
WIDTHS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}


def text(value: str) -> Tensor:
    return torch.tensor([ord(character) for character in value], dtype=torch.uint8)


def layer(
    bits: float, group: int = 32, dtype: torch.dtype = torch.float16, shape: tuple[int, int] = SHAPE
) -> dict[str, Tensor]:
    """What HQQLinear.state_dict returns, with random codes."""
    groups = shape[0] * shape[1] // group
    packing = PACKINGS[bits]
    if packing == "3bit_32":
        codes = torch.randint(0, 2**30, (-(-groups // 10), group), dtype=torch.int32)
    elif packing == "8bit_u8":
        codes = torch.randint(0, 2 ** int(bits), (groups, group), dtype=torch.uint8)
    else:
        codes = torch.randint(0, 256, (groups * WIDTHS[packing] // 8, group), dtype=torch.uint8)
    settings = {
        "nbits": torch.tensor(bits, dtype=torch.float32 if bits == 1.58 else torch.int32),
        "group_size": torch.tensor(group, dtype=torch.int32),
        "shape": torch.tensor(shape),
        "axis": torch.tensor(1, dtype=torch.int32),
        "packing": text(packing),
        "unpack_view_dtype": text("torch.uint8"),
        "compute_dtype": text(str(dtype)),
        **{key: torch.tensor(0, dtype=torch.uint8) for key in OFF},
        **{key: torch.tensor(1, dtype=torch.uint8) for key in ON},
    }
    parts = {"W_q": codes, "scale": (torch.rand(groups, 1) + 0.01).to(dtype), **settings}
    parts["zero"] = (torch.rand(groups, 1) * 2**bits).to(dtype)
    return {**{f"layer.{key}": part for key, part in parts.items()}, **plain_tensors(shape[1], dtype)}


def decoded(tensors: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, int] = SHAPE) -> Tensor:
    packing = "".join(chr(c) for c in tensors["layer.packing"])
    width = WIDTHS[packing]
    per_word = 10 if packing == "3bit_32" else 8 // width
    words = tensors["layer.W_q"].tolist()
    scale, zero = tensors["layer.scale"].double().tolist(), tensors["layer.zero"].double().tolist()
    flat = []
    for g in range(len(scale)):
        part, row = divmod(g, len(words))
        shift = width * (per_word - 1 - part)
        flat += [(((word >> shift) & (2**width - 1)) - zero[g][0]) * scale[g][0] for word in words[row]]
    return to_dtype([flat[o * shape[1] : (o + 1) * shape[1]] for o in range(shape[0])], dtype)


def folder(tmp_path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float16) -> Path:
    return write(tmp_path / "model", tensors, 2, quantized_config("hqq", str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", PACKINGS)
def test_hqq(bits: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = layer(bits, dtype=dtype)
    width = 2 if bits == 1.58 else int(bits)
    check(folder(tmp_path, tensors, dtype), decoded(tensors, dtype), "cpu_weight_only_mm", width + 1)


@pytest.mark.parametrize(("group", "part"), [(64, 64), (128, 64), (96, 32)])
def test_groups_of_several_rows(group: int, part: int, tmp_path: Path) -> None:
    """HQQ groups the flattened weight."""
    tensors = layer(4, group, shape=(48, 64))
    weight = load(folder(tmp_path, tensors), (48, 64))
    assert torch.equal(weight.dequantize(), decoded(tensors, torch.float16, (48, 64)))
    assert weight.scheme.weight.block_size((48, 64)) == (1, part)


def test_codes_viewed_as_floats_and_beyond_their_width(tmp_path: Path) -> None:
    """view_as_float, for FSDP."""
    tensors = layer(4)
    wanted = decoded(tensors, torch.float16)
    tensors["layer.W_q"] = tensors["layer.W_q"].view(torch.float16)
    tensors["layer.view_as_float"] = torch.tensor(1, dtype=torch.uint8)
    weight = load(folder(tmp_path, tensors), SHAPE)
    assert torch.equal(weight.dequantize(), wanted)
    tensors = layer(5)
    tensors["layer.W_q"][1, 1] = 32
    refused(folder(tmp_path, tensors), SHAPE, r"layer.weight: one of its codes is 32, which has more than 5 bits")


DAMAGE = {
    "the other axis": ({"axis": torch.tensor(0)}, "has axis=0, groups of elements of many rows; quantize with axis=1"),
    "quantized zero points": ({"quant_zero": torch.tensor(1)}, "has quantized scales or zero points"),
    "an unknown packing": ({"packing": text("4bit_i32")}, "codes of 4 bits in the packing '4bit_i32'"),
    "no packing": ({"packing": None}, "layer.packing is missing"),
    "too many bits": ({"nbits": torch.tensor(5)}, "codes of 5 bits in the packing '4bit_u8'"),
    "another shape": ({"shape": torch.tensor([OUTPUTS, 2 * INPUTS])}, "layer.W_q has 1024 bytes"),
    "a huge shape": ({"shape": torch.tensor([2**40, 2**40])}, "layer.W_q has 1024 bytes"),
    "a negative shape": ({"shape": torch.tensor([-1, -1])}, r"has the shape \(-1, -1\)"),
    "few zero points": ({"zero": torch.ones(63, 1).half()}, "layer.zero has shape"),
    "no scales": ({"scale": None}, "layer.scale is missing"),
    "no groups": ({"scale": torch.ones(0, 1).half(), "zero": torch.ones(0, 1).half()}, "2048 codes are not 0 groups"),
    "a large setting": ({"axis": torch.zeros(10_000)}, "layer.axis has 40000 bytes, which is no setting"),
    "a setting that is NaN": ({"axis": torch.tensor(float("nan"))}, "not a number"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    change, says = DAMAGE[name]
    merged = {**layer(4), **{f"layer.{key}": tensor for key, tensor in change.items()}}
    tensors = {key: tensor for key, tensor in merged.items() if tensor is not None}
    refused(folder(tmp_path, tensors), SHAPE, f"model.*{says}")


def layer_of_quanto(kind: torch.dtype = torch.int8) -> dict[str, Tensor]:
    codes = e4m3(*SHAPE) if kind.is_floating_point else torch.randint(-127, 128, SHAPE, dtype=kind)
    of_layer = {"layer.weight._data": codes, "layer.weight._scale": torch.rand(OUTPUTS, 1).bfloat16() + 0.01}
    scales = {f"layer.{name}_scale": torch.ones((), dtype=torch.bfloat16) for name in ("input", "output")}
    return {**of_layer, **scales, **plain_tensors(INPUTS, torch.bfloat16)}


@pytest.mark.parametrize("by_map", [False, True])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_a_byte(kind: torch.dtype, by_map: bool, tmp_path: Path) -> None:
    tensors = layer_of_quanto(kind)
    config = {"dtype": "bfloat16"} if by_map else quantized_config("quanto", "bfloat16")
    folder = write(tmp_path / "model", tensors, 2, config)
    if by_map:
        (folder / "quanto_qmap.json").write_text(json.dumps({"layer": {"weights": "qint8", "activations": "none"}}))
    codes, scale = tensors["layer.weight._data"].float(), tensors["layer.weight._scale"].float()
    wanted = to_dtype((codes.double() * scale.double()).tolist(), torch.bfloat16)
    check(folder, wanted, "weight_only_mm", 8.6)


QUANTO_DAMAGE: dict[str, tuple[str, Any, str]] = {
    "groups": ("layer.weight._data._data", lambda t: torch.zeros(16, 64, dtype=torch.uint8), "no file of quanto says"),
    "few scales": ("layer.weight._scale", lambda t: t[1:], "layer.weight._scale has shape"),
    "other codes": ("layer.weight._data", lambda t: t.short(), "layer.weight._data has shape"),
}


@pytest.mark.parametrize("name", QUANTO_DAMAGE)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    part, change, says = QUANTO_DAMAGE[name]
    tensors = layer_of_quanto()
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
