"""FP8 in blocks, rows and tensors (DeepSeek, transformers, Model Optimizer) and NVFP4, against plain loops."""

import json
from pathlib import Path

import pytest
import torch

from tests.formats.folders import check, load, plain_tensors, quantized_config, refused, to_dtype, write

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(*shape: int) -> torch.Tensor:
    """Random codes without NaN."""
    return torch.randn(shape).to(torch.float8_e4m3fn)


def modelopt(tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str = "NVFP4") -> Path:
    return write(tmp_path / "model", tensors, 2, quantized_config("modelopt", "bfloat16", quant_algo=algorithm))


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def by_blocks(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    values, factors = codes.float().tolist(), scale.float().tolist()
    rows = [[value * factors[o // block[0]][i // block[1]] for i, value in enumerate(r)] for o, r in enumerate(values)]
    return to_dtype(rows, dtype)


@pytest.mark.parametrize(("shape", "kept"), [((32, 64), (16, 32)), ((40, 64), (8, 32)), ((24, 48), (8, 16))])
def test_blocks_of_deepseek(shape: tuple[int, int], kept: tuple[int, int], tmp_path: Path) -> None:
    """Also where the last block of an axis is shorter: DeepSeek-V3 has 576 outputs in blocks of 128."""
    block = (16, 32)
    codes, scale = e4m3(*shape), torch.rand(blocks(shape, block)) + 0.1
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scale, **plain_tensors(shape[1], torch.bfloat16)}
    config = quantized_config("fp8", "bfloat16", fmt="e4m3", weight_block_size=list(block))
    folder = write(tmp_path / "model", tensors, 2, config)
    weight = check(folder, by_blocks(codes, scale, block, torch.bfloat16), "weight_only_mm", 8.5)
    assert weight.scheme.weight.block_size(shape) == kept


def test_sizes_of_blocks_and_powers_of_two(tmp_path: Path) -> None:
    codes, scale = e4m3(256, 128), torch.rand(2, 1) + 0.1
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scale, **plain_tensors(128, torch.bfloat16)}
    folder = write(tmp_path / "model", tensors, 1, quantized_config("fp8", "bfloat16"))
    wanted = by_blocks(codes, scale, (128, 128), torch.bfloat16)
    assert torch.equal(load(folder, (256, 128)).dequantize(), wanted)
    tensors = {"layer.weight": e4m3(32, 64), "layer.weight_scale_inv": torch.ones(2, 1)}
    folder = write(tmp_path / "model", tensors, 1, quantized_config("fp8", weight_block_size=[16, 32]))
    refused(folder, (32, 64), r"layer.weight_scale_inv has shape \(2, 1\).*its format says \(2, 2\)")
    # DeepSeek-V3.1's scale_fmt "ue8m0".
    codes = e4m3(32, 64)
    scale = (2.0 ** torch.randint(-6, 6, (2, 2))).to(torch.float8_e8m0fnu)
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scale, **plain_tensors(64, torch.bfloat16)}
    config = quantized_config("fp8", "bfloat16", weight_block_size=[16, 32])
    wanted = by_blocks(codes, scale, (16, 32), torch.bfloat16)
    check(write(tmp_path / "model", tensors, 1, config), wanted, "weight_only_mm", 8.1)


def test_scales_of_zero(tmp_path: Path) -> None:
    """Scales are positive here, but reals are zero all the same."""
    tensors = nvfp4()
    tensors["layer.weight_scale"][3, 1] = 0
    folder = modelopt(tmp_path, tensors)
    weight = load(folder, (32, 64)).dequantize()
    assert torch.equal(weight, by_nvfp4(tensors))
    assert not weight[3, 16:32].any()
    tensors = {**nvfp4(), "layer.pre_quant_scale": torch.ones(64)}
    folder = modelopt(tmp_path, tensors)
    refused(folder, (32, 64), r"layer.pre_quant_scale multiplies the input of layer.weight")


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt"])
@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1)])
def test_one_scale_for_the_tensor_or_for_each_row(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    codes, scale = e4m3(32, 64), torch.rand(shape) + 0.1
    tensors = {
        "layer.weight": codes, "layer.weight_scale": scale, "layer.input_scale": torch.tensor(0.5),
        **plain_tensors(64, torch.bfloat16),
    }  # fmt: skip
    config = quantized_config(method, "bfloat16", **({"quant_algo": "FP8"} if method == "modelopt" else {}))
    factors = scale.reshape(-1, 1).expand(32 if scale.numel() == 1 else -1, 1)
    wanted = by_blocks(codes, factors, (1, 64), torch.bfloat16)
    check(write(tmp_path / "model", tensors, 1, config), wanted, "weight_only_mm", 8.5)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2, 1)])
def test_blocks_of_modelopt(shape: tuple[int, ...], tmp_path: Path) -> None:
    codes, scale = e4m3(256, 160), torch.rand(2, 2) + 0.1
    stored = {"layer.weight": codes, "layer.weight_scale": scale.reshape(shape)}
    folder = modelopt(tmp_path, {**stored, **plain_tensors(160, torch.bfloat16)}, "FP8_PB_WO")
    check(folder, by_blocks(codes, scale, (128, 128), torch.bfloat16), "weight_only_mm", 8.1)


def nvfp4(outputs: int = 32, inputs: int = 64) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
        "layer.weight_scale": (torch.rand(outputs, inputs // 16) * 400 + 1).to(torch.float8_e4m3fn),
        "layer.weight_scale_2": torch.tensor(0.00037),
        "layer.input_scale": torch.tensor(0.5),
        "layer.k_proj.k_scale": torch.tensor(1.0),
        **plain_tensors(inputs, torch.bfloat16),
    }


def by_nvfp4(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each product rounded to fp32, the scales first."""
    packed, scale = tensors["layer.weight"].tolist(), tensors["layer.weight_scale"].float()
    factors = (scale * tensors["layer.weight_scale_2"]).tolist()
    rows = []
    for o, row in enumerate(packed):
        nibbles = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        signed = [(-1.0) ** (n >> 3) * E2M1[n & 7] for n in nibbles]
        rows.append([value * factors[o][i // 16] for i, value in enumerate(signed)])
    return to_dtype(rows, torch.bfloat16)


def settings(folder: Path, algorithm: str) -> None:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


@pytest.mark.parametrize("beside", [False, True])
def test_nvfp4_of_modelopt(beside: bool, tmp_path: Path) -> None:
    """With the settings in config.json, or in hf_quant_config.json as former versions wrote."""
    tensors = nvfp4()
    config = {"dtype": "bfloat16"} if beside else quantized_config("modelopt", "bfloat16", quant_algo="NVFP4")
    folder = write(tmp_path / "model", tensors, 2, config)
    if beside:
        settings(folder, "NVFP4")
    check(folder, by_nvfp4(tensors), "packed_weight_mm", 4.6)


DAMAGE = {
    "negative": (("weight_scale", lambda t: (-t.float()).to(t.dtype)), "one of its scales is negative or NaN"),
    "NaN": (("weight_scale", lambda t: torch.full_like(t, 0x7F, dtype=torch.uint8).view(t.dtype)), "negative or NaN"),
    "no factor": (("weight_scale_2", lambda t: t * 0), "the scale of its scales is 0.0"),
    "infinite": (("weight_scale_2", lambda t: t / 0), "the scale of its scales is inf"),
    "factors": (("weight_scale_2", lambda t: torch.ones(2)), "layer.weight_scale_2 has shape"),
    "few scales": (("weight_scale", lambda t: t[:, 1:]), "layer.weight_scale has shape"),
    "other codes": (("weight", lambda t: t.view(torch.int8)), "layer.weight has shape"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    (part, change), says = DAMAGE[name]
    tensors = nvfp4()
    tensors[f"layer.{part}"] = change(tensors[f"layer.{part}"])
    folder = modelopt(tmp_path, tensors)
    refused(folder, (32, 64), f"safetensors: (layer.weight: )?.*{says}")


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "INT4_AWQ"])
def test_other_algorithms_are_refused_by_name(algorithm: str, tmp_path: Path) -> None:
    folder = modelopt(tmp_path, nvfp4(), algorithm)
    refused(folder, (32, 64), f"model: quant_algo is '{algorithm}', which is not read; known: NVFP4")


@pytest.mark.parametrize("block", [[128], "128", [0, 128], [128, 128.0]])
def test_damaged_block_sizes_are_named(block: object, tmp_path: Path) -> None:
    tensors = {"layer.weight": e4m3(32, 64), "layer.weight_scale_inv": torch.ones(1, 1)}
    folder = write(tmp_path / "model", tensors, 1, quantized_config("fp8", weight_block_size=block))
    refused(folder, (32, 64), "model: weight_block_size is")
