"""torchao's classes, stored as its `flatten_tensor_state_dict` stores them, against plain loops from its formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtorch import load_quantized
from tests.formats.folders import Layer, check, load, plain_tensors, quantized_config, refused, to_dtype, write
from tests.formats.test_float8 import E2M1, e4m3

OUTPUTS, INPUTS, GROUP = 24, 64, 32
SHAPE = OUTPUTS, INPUTS


def dtype_entry(dtype: torch.dtype) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}


BF16 = dtype_entry(torch.bfloat16)


def folder(
    path: Path, kind: str, parts: dict[str, Tensor], attributes: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Path:
    plain = plain_tensors(INPUTS, dtype)
    entry = {"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)}
    metadata = {name: json.dumps({"_type": "Tensor"}) for name in plain} | {"layer.weight": json.dumps(entry)}
    metadata["tensor_names"] = json.dumps(["layer.weight", *plain])
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain
    config = quantized_config("torchao", str(dtype).removeprefix("torch."))
    return write(path / "model", tensors, 2, config, metadata)


def affine(codes: Any, scale: Any, zero: Any, block: tuple[int, int], dtype: torch.dtype, order: str = "int") -> Tensor:
    def real(o: int, i: int, q: float) -> float:
        s, z = (t[o // block[0]][i // block[1]] for t in (scale, zero))
        return (q - z) * s if order == "int" else q * s + z

    return to_dtype([[real(o, i, q) for i, q in enumerate(row)] for o, row in enumerate(codes)], dtype)


def zeros(scale: Tensor) -> list[list[float]]:
    return torch.zeros(scale.shape).tolist()


@pytest.mark.parametrize("block", [(1, INPUTS), SHAPE, (1, GROUP), (8, GROUP)])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int8(block: tuple[int, int], with_zeros: bool, tmp_path: Path) -> None:
    shape = OUTPUTS // block[0], INPUTS // block[1]
    parts = {
        "qdata": torch.randint(-128, 128, SHAPE, dtype=torch.int8),
        "scale": torch.rand(shape) + 0.01,
    }
    if with_zeros:
        parts["zero_point"] = torch.randint(-128, 128, shape, dtype=torch.int8)
    attributes = {"block_size": list(block), "dtype": BF16, "act_quant_kwargs": None}
    zero = parts["zero_point"].tolist() if with_zeros else zeros(parts["scale"])
    wanted = affine(parts["qdata"].tolist(), parts["scale"].tolist(), zero, block, torch.bfloat16)
    kernel = "weight_only_mm" if block[0] == 8 else "cpu_weight_only_mm"
    check(folder(tmp_path, "Int8Tensor", parts, attributes), wanted, kernel, 9.3)


@pytest.mark.parametrize("float_zeros", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_intx(bits: int, float_zeros: bool, tmp_path: Path) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    shape = OUTPUTS, INPUTS // GROUP
    zero = torch.randn(shape).bfloat16() if float_zeros else torch.randint(low, high, shape, dtype=torch.int8)
    parts = {
        "qdata": torch.randint(low, high, SHAPE, dtype=torch.int8),
        "scale": (torch.rand(shape) + 0.01).bfloat16(),
        "zero_point": zero,
    }
    kind = dtype_entry(getattr(torch, f"int{bits}"))
    attributes = {"target_dtype": kind, "block_size": [1, GROUP], "dtype": BF16, "activation_quantization": None}
    scale = parts["scale"].tolist()
    wanted = affine(parts["qdata"].tolist(), scale, zero.tolist(), (1, GROUP), torch.bfloat16)
    check(folder(tmp_path, "IntxUnpackedToInt8Tensor", parts, attributes), wanted, "cpu_weight_only_mm", bits + 1)


def nibbles(packed: Tensor) -> list[list[int]]:
    return [[n for byte in row for n in (byte & 15, (byte >> 4) & 15)] for row in packed.tolist()]


@pytest.mark.parametrize(("group", "kept"), [(32, 32), (48, 16), (64, 64)])
def test_int4(group: int, kept: int, tmp_path: Path) -> None:
    """Also where the last group of a row is shorter."""
    shape = -(-INPUTS // group), OUTPUTS
    parts = {
        "qdata": torch.randint(-128, 128, (OUTPUTS, INPUTS // 2), dtype=torch.int8),
        "scale": (torch.rand(shape) + 0.01).bfloat16(),
        "zero_point": torch.randn(shape).bfloat16(),
    }
    attributes = {"block_size": [1, group], "shape": [OUTPUTS, INPUTS]}
    codes = [[n - 16 if n > 7 else n for n in row] for row in nibbles(parts["qdata"])]
    scale, zero = (parts[name].T.tolist() for name in ("scale", "zero_point"))
    wanted = affine(codes, scale, zero, (1, group), torch.bfloat16, "real")
    weight = check(folder(tmp_path, "Int4Tensor", parts, attributes), wanted, "cpu_weight_only_mm", 4 + 32 / kept)
    assert weight.scheme.weight.granularity.group_size == kept


@pytest.mark.parametrize("block", [(1, INPUTS), SHAPE, (8, GROUP)])
def test_float8(block: tuple[int, int], tmp_path: Path) -> None:
    shape = OUTPUTS // block[0], INPUTS // block[1]
    parts = {"qdata": e4m3(*SHAPE), "scale": torch.rand(shape) + 0.01}
    preference = {"_type": "KernelPreference", "_data": "AUTO"}
    attributes = {"block_size": list(block), "dtype": BF16, "kernel_preference": preference}
    scale = parts["scale"].tolist()
    wanted = affine(parts["qdata"].float().tolist(), scale, zeros(parts["scale"]), block, torch.bfloat16)
    check(folder(tmp_path, "Float8Tensor", parts, attributes), wanted, "weight_only_mm", 8.6)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float4_e2m1fn_x2"])
def test_mx(element: str, tmp_path: Path) -> None:
    scale = (2.0 ** torch.randint(-9, 9, (OUTPUTS, INPUTS // 32))).to(torch.float8_e8m0fnu)
    if element == "float8_e4m3fn":
        codes = e4m3(*SHAPE)
        values = codes.float().tolist()
    else:
        codes = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8)
        values = [[(-1.0) ** (n >> 3) * E2M1[n & 7] for n in row] for row in nibbles(codes)]
    elements = {"_type": "torch.dtype", "_data": element}
    attributes = {"elem_dtype": elements, "block_size": 32, "orig_dtype": BF16, "is_swizzled_scales": False}
    wanted = affine(values, scale.float().tolist(), zeros(scale), (1, 32), torch.bfloat16)
    made = folder(tmp_path, "MXTensor", {"qdata": codes, "scale": scale}, attributes)
    packed = codes.dtype is torch.uint8
    check(made, wanted, "packed_weight_mm" if packed else "weight_only_mm", 4.25 if packed else 8.25)


@pytest.mark.parametrize("factor", [None, 0.0007])
def test_nvfp4(factor: float | None, tmp_path: Path) -> None:
    parts = {
        "qdata": torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8),
        "scale": (torch.rand(OUTPUTS, INPUTS // 16) * 400 + 1).to(torch.float8_e4m3fn),
    }
    scale = parts["scale"].float()
    if factor is not None:
        parts["per_tensor_scale"] = torch.tensor(factor)
        scale = scale * parts["per_tensor_scale"]
    values = [[(-1.0) ** (n >> 3) * E2M1[n & 7] for n in row] for row in nibbles(parts["qdata"])]
    attributes = {"block_size": 16, "orig_dtype": BF16, "is_swizzled_scales": False}
    wanted = affine(values, scale.tolist(), zeros(scale), (1, 16), torch.bfloat16)
    check(folder(tmp_path, "NVFP4Tensor", parts, attributes), wanted, "packed_weight_mm", 4.6)


def int8() -> tuple[dict[str, Tensor], dict[str, Any]]:
    parts = {"qdata": torch.randint(-8, 8, SHAPE, dtype=torch.int8), "scale": torch.rand(OUTPUTS, 1)}
    return parts, {"block_size": [1, INPUTS], "dtype": BF16}


def test_a_file_without_a_configuration_is_recognized(tmp_path: Path) -> None:
    parts, attributes = int8()
    made = folder(tmp_path, "Int8Tensor", parts, attributes)
    wanted = load(made, SHAPE).dequantize()
    entry = {"_type": "Int8Tensor", "_data": attributes}
    metadata = {"tensor_names": json.dumps(["layer.weight"]), "layer.weight": json.dumps(entry)}
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain_tensors(INPUTS, torch.bfloat16)
    file = write(tmp_path / "alone", tensors, 1, None, metadata) / "model.safetensors"
    assert torch.equal(load_quantized(Layer(*SHAPE), file).layer.weight.dequantize(), wanted)


DAMAGE: dict[str, tuple[str, dict[str, Tensor], dict[str, Any], str]] = {
    "a class in the order of a device": ("Int4TilePackedTo4dTensor", {}, {},
        "a Int4TilePackedTo4dTensor of torchao, is"),
    "scales in the order of a device": ("NVFP4Tensor", {}, {"is_swizzled_scales": True}, "has scales in the order of"),
    "a scaled input": ("Int8Tensor", {"act_pre_scale": torch.ones(INPUTS)}, {}, "scales the input of its layer"),
    "no block": ("Int8Tensor", {}, {"block_size": [1]}, r"has the block_size \[1\]"),
    "a block of zero": ("Int8Tensor", {}, {"block_size": [0, 64]}, r"has the block_size \[0, 64\]"),
    "a block that does not divide": ("Int8Tensor", {}, {"block_size": [1, 48]}, "which does not divide"),
    "few scales": ("Int8Tensor", {"scale": torch.ones(OUTPUTS, 2)}, {}, "layer._weight_scale has shape"),
    "another dtype": ("Int8Tensor", {}, {"dtype": {"_data": "int8"}}, "has the dtype 'int8'"),
    "no dtype": ("Int8Tensor", {}, {"dtype": None}, "has the dtype 'None'"),
    "wide codes": ("IntxUnpackedToInt8Tensor", {"zero_point": torch.zeros(OUTPUTS, 1, dtype=torch.int8)},
        {"target_dtype": {"_data": "int3"}}, "qdata reaches from -8 to 7, int3 does not"),
    "another width": ("IntxUnpackedToInt8Tensor", {}, {"target_dtype": "int32"}, "has the target_dtype 'int32'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    kind, more, change, says = DAMAGE[name]
    parts, attributes = int8()
    made = folder(tmp_path, kind, {**parts, **more}, {**attributes, **change})
    refused(made, SHAPE, f"model.*{says}")


@pytest.mark.parametrize("text", ["{", '{"_type": 3}', '{"_type": "Int8Tensor", "_data": []}'])
def test_damaged_metadata_are_named(text: str, tmp_path: Path) -> None:
    tensors = plain_tensors(INPUTS, torch.bfloat16)
    made = write(tmp_path / "model", tensors, 1, quantized_config("torchao"), {"layer.weight": text})
    refused(made, SHAPE, r"model: the metadata of layer\.weight")
