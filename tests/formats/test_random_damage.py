"""Folders of other packages, damaged at random: loading raises `ValueError` and names the folder, or succeeds.

What succeeds has a weight of the right shape, whose tensors are those of its scheme; a kernel runs on it.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtorch import load_quantized
from qtorch.dtypes import QuantizedTensor
from tests.formats import test_awq, test_float8, test_gptq, test_hqq, test_torchao
from tests.formats.folders import Layer, plain_tensors, quantized_config, write

CASES = 40


def gptq(path: Path) -> Path:
    config = quantized_config("gptq", bits=4, group_size=32, checkpoint_format="gptq_v2")
    return write(path, test_gptq.layer(4, 3), 1, config)


def awq(path: Path) -> Path:
    return write(path, test_awq.layer(), 1, test_awq.config())


def hqq(path: Path) -> Path:
    return write(path, test_hqq.layer(3), 1, quantized_config("hqq"))


def deepseek(path: Path) -> Path:
    stored = {"layer.weight": test_float8.e4m3(32, 64), "layer.weight_scale_inv": torch.rand(2, 2)}
    config = quantized_config("fp8", "bfloat16", weight_block_size=[16, 32])
    return write(path, {**stored, **plain_tensors(64, torch.bfloat16)}, 1, config)


def modelopt(path: Path) -> Path:
    return write(path, test_float8.nvfp4(), 1, quantized_config("modelopt", "bfloat16", quant_algo="NVFP4"))


def torchao(path: Path) -> Path:
    parts, attributes = test_torchao.int8()
    entry = {"_type": "Int8Tensor", "_data": attributes}
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain_tensors(64, torch.bfloat16)
    metadata = {"layer.weight": json.dumps(entry), "tensor_names": json.dumps(["layer.weight"])}
    return write(path, tensors, 1, quantized_config("torchao", "bfloat16"), metadata)


def bitsandbytes(path: Path) -> Path:
    pytest.importorskip("bitsandbytes")
    from tests.formats import test_bitsandbytes

    tensors, _ = test_bitsandbytes.layer("nf4", True)
    return write(path, tensors, 1, quantized_config("bitsandbytes", "bfloat16"))


SHAPES: dict[Callable[[Path], Path], tuple[int, int]] = {
    gptq: (32, 96),
    awq: (32, 64),
    hqq: (32, 64),
    deepseek: (32, 64),
    modelopt: (32, 64),
    torchao: (24, 64),
    bitsandbytes: (24, 128),
}

JUNK: list[Any] = [None, -1, 0, 7, 2**70, 0.5, float("nan"), "", "gptq", [], [0], {}, {"a": 1}, True, [2**40, 2**40]]


def damaged(tensor: Tensor, chance: random.Random) -> Tensor | None:
    changes: list[Callable[[], Tensor | None]] = [
        lambda: None,
        lambda: tensor.reshape(-1),
        lambda: tensor[:-1] if tensor.dim() else tensor.reshape(1),
        lambda: torch.cat([tensor.reshape(-1).view(torch.uint8)] * 2).view(tensor.dtype),
        lambda: tensor.view(torch.uint8) if tensor.dim() else tensor,
        lambda: tensor.float(),
        lambda: torch.zeros(0, dtype=tensor.dtype),
        lambda: torch.zeros(tensor.shape, dtype=torch.uint8).reshape(-1, *[1] * chance.randint(0, 3)),
        lambda: torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape),
    ]
    return chance.choice(changes)()


def damage(folder: Path, chance: random.Random) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    kind = chance.randrange(4)
    if kind == 0:
        data = json.loads(config.read_text())
        part = chance.choice([data, data["quantization_config"]])
        part[chance.choice(sorted(part))] = chance.choice(JUNK)
        config.write_text(json.dumps(data))
    elif kind == 1:
        whole = bytearray(file.read_bytes())
        for _ in range(chance.randint(1, 4)):
            whole[chance.randrange(len(whole))] = chance.randrange(256)
        file.write_bytes(whole[: chance.choice([len(whole), len(whole), chance.randrange(len(whole))])])
    else:
        header = file.read_bytes()
        length = int.from_bytes(header[:8], "little")
        metadata = json.loads(header[8 : 8 + length])["__metadata__"]
        tensors = load_file(file)
        name = chance.choice([name for name in sorted(tensors) if name.startswith("layer")])
        changed = damaged(tensors.pop(name), chance)
        if changed is not None:
            tensors[name] = changed.contiguous()
        save_file(tensors, file, metadata)


def error(model: Layer, folder: Path) -> str | None:
    """What loading says; None if it succeeds."""
    try:
        load_quantized(model, folder)
    except ValueError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize("build", SHAPES, ids=lambda build: build.__name__)
def test_random_damage(build: Callable[[Path], Path], tmp_path: Path) -> None:
    chance, shape = random.Random(build.__name__), SHAPES[build]
    refused = 0
    for case in range(CASES):
        folder = build(tmp_path / str(case))
        damage(folder, chance)
        model = Layer(*shape)
        before = model.layer.weight
        if (says := error(model, folder)) is not None:
            assert str(folder) in says
            assert model.layer.weight is before
            refused += 1
            continue
        weight = model.layer.weight
        assert tuple(weight.shape) == shape
        if isinstance(weight, QuantizedTensor):
            assert weight.dequantize().shape == shape
            model(torch.randn(2, shape[1], dtype=weight.dtype))
    assert refused > CASES // 4
