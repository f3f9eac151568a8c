"""AWQ against the converter of compressed-tensors, and against plain loops."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.formats.folders import check, load, plain_tensors, quantized_config, refused, to_dtype, write

OUTPUTS, INPUTS, GROUP = 32, 64, 32
SHAPE = OUTPUTS, INPUTS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each nibble, from the lowest."""


def layer() -> dict[str, Tensor]:
    words = torch.randint(-(2**31), 2**31, (INPUTS + INPUTS // GROUP, OUTPUTS // 8)).to(torch.int32)
    return {
        "layer.qweight": words[:INPUTS],
        "layer.qzeros": words[INPUTS:],
        "layer.scales": (torch.rand(INPUTS // GROUP, OUTPUTS) + 0.01).half(),
        **plain_tensors(INPUTS, torch.float16),
    }


def config(**more: object) -> dict[str, object]:
    return quantized_config("awq", **{"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, **more})


def folder(tmp_path: Path, tensors: dict[str, Tensor], **more: object) -> Path:
    return write(tmp_path / "model", tensors, 2, config(**more))


def outputs(words: Tensor) -> list[int]:
    """The outputs in a row of words."""
    found = [0] * (8 * len(words))
    for w, word in enumerate(words.tolist()):
        for i, output in enumerate(ORDER):
            found[8 * w + output] = (word >> (4 * i)) & 0xF
    return found


def test_awq_by_plain_loops(tmp_path: Path) -> None:
    tensors = layer()
    codes, zeros = ([outputs(row) for row in tensors[f"layer.{name}"]] for name in ("qweight", "qzeros"))
    scales = tensors["layer.scales"].tolist()
    values = [
        [scales[i // GROUP][o] * (codes[i][o] - zeros[i // GROUP][o]) for i in range(INPUTS)] for o in range(OUTPUTS)
    ]
    check(folder(tmp_path, tensors), to_dtype(values, torch.float16), "cpu_weight_only_mm", 4.75)


def test_awq_by_compressed_tensors(tmp_path: Path) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    tensors = layer()
    converter = converters.AutoAWQConverter(group_size=GROUP, targets=["re:.*layer"])
    converted = converter.process({name: t.clone() for name, t in tensors.items() if name.startswith("layer.")})
    scheme = converter.update_config(None).config_groups["config_group_0"]
    parts = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    made = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)
    weight = load(folder(tmp_path, tensors), SHAPE)
    assert torch.equal(weight.dequantize(), made["weight"])


def test_auto_round_in_the_packing_of_awq(tmp_path: Path) -> None:
    tensors = layer()
    wanted = load(write(tmp_path / "awq", tensors, 1, config()), SHAPE).dequantize()
    of_auto_round = quantized_config("auto-round", bits=4, group_size=GROUP, packing_format="auto_round:auto_awq")
    check(write(tmp_path / "model", tensors, 1, of_auto_round), wanted, "cpu_weight_only_mm", 4.75)


@pytest.mark.parametrize(("more", "says"), [
    ({"version": "gemv"}, "AWQ of version 'gemv' is not read, only 'gemm'"),
    ({"bits": 3}, "AWQ of 3 bits is not read, only 4"),
])  # fmt: skip
def test_other_packings_are_refused_by_name(more: dict[str, object], says: str, tmp_path: Path) -> None:
    refused(folder(tmp_path, layer(), **more), SHAPE, f"model: {says}")


@pytest.mark.parametrize("name", ["qzeros", "scales"])
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    tensors = layer()
    tensors[f"layer.{name}"] = tensors[f"layer.{name}"][:, 1:]
    refused(folder(tmp_path, tensors), SHAPE, f"safetensors: layer.{name} has shape")
    del tensors[f"layer.{name}"]
    refused(folder(tmp_path, tensors), SHAPE, f"model: layer.{name} is missing")


def test_the_configuration_of_former_versions(tmp_path: Path) -> None:
    tensors = layer()
    wanted = load(write(tmp_path / "new", tensors, 1, config()), SHAPE).dequantize()
    former = write(tmp_path / "model", tensors, 1, {"torch_dtype": "float16"})
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    (former / "quant_config.json").write_text(json.dumps(settings))
    assert torch.equal(load(former, SHAPE).dequantize(), wanted)
