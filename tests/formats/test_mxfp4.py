"""MXFP4 experts of gpt-oss: against plain loops, and against what transformers dequantizes them to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qtorch
from qtorch import load_quantized
from qtorch.checkpoint.streaming.quantize_checkpoint import convert_checkpoint
from qtorch.dtypes.transposed_weight import TransposedWeight
from tests.formats.folders import (
    check,
    load,
    losses_in_training,
    plain_tensors,
    quantized_config,
    refused,
    to_dtype,
    write,
)
from tests.formats.test_float8 import E2M1

SHAPE = 3, 64, 24
"""Experts, inputs, outputs."""


def packed(experts: int, inputs: int, outputs: int, low: int = 110, high: int = 124) -> dict[str, Tensor]:
    """Random blocks and scales, of the stored numbers from `low` to `high`."""
    return {
        "blocks": torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8),
        "scales": torch.randint(low, high + 1, (experts, outputs, inputs // 32), dtype=torch.uint8),
    }


def layer(low: int = 110, high: int = 124) -> dict[str, Tensor]:
    parts = {f"layer.weight_{name}": part for name, part in packed(*SHAPE, low, high).items()}
    return {**parts, **plain_tensors(SHAPE[1], torch.bfloat16)}


def decoded(tensors: dict[str, Tensor]) -> Tensor:
    blocks, scales = tensors["layer.weight_blocks"].tolist(), tensors["layer.weight_scales"].tolist()
    rows = []
    for matrix, of_matrix in zip(blocks, scales, strict=True):
        for row, exponents in zip(matrix, of_matrix, strict=True):
            values = []
            for block, exponent in zip(row, exponents, strict=True):
                nibbles = [nibble for byte in block for nibble in (byte & 15, byte >> 4)]
                values += [(-1.0) ** (n >> 3) * E2M1[n & 7] * 2.0 ** (exponent - 127) for n in nibbles]
            rows.append(values)
    experts, inputs, outputs = SHAPE
    return to_dtype(rows, torch.bfloat16).reshape(experts, outputs, inputs).mT.contiguous()


@pytest.mark.parametrize("with_method", [True, False])
def test_experts(with_method: bool, tmp_path: Path) -> None:
    """Also recognized by the names that gpt-oss gives its tensors."""
    tensors = layer()
    folder = write(tmp_path / "model", tensors, 2, quantized_config("mxfp4", "bfloat16"))
    assert isinstance(check(folder, decoded(tensors), "", 4.3), TransposedWeight)
    if not with_method:
        names = {f"mlp.experts.down_proj_{part}": tensors[f"layer.weight_{part}"] for part in ("blocks", "scales")}
        with qtorch.checkpoint.sources.open_source(write(tmp_path / "other", names)) as source:
            assert torch.equal(source.tensor("mlp.experts.down_proj").dequantize(), decoded(tensors))


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "NaN": ("scales", lambda t: torch.full_like(t, 255), "one of its scales is 255"),
    "few scales": ("scales", lambda t: t[:, 1:], "layer.weight_scales has shape"),
    "short blocks": ("blocks", lambda t: t[..., :8], r"layer.weight_blocks has shape .* \(any, any, any, 16\)"),
    "other codes": ("blocks", lambda t: t.view(torch.int8), "layer.weight_blocks has shape"),
    "a matrix": ("blocks", lambda t: t[0], "layer.weight_blocks has shape"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    part, change, says = DAMAGE[name]
    tensors = layer()
    tensors[f"layer.weight_{part}"] = change(tensors[f"layer.weight_{part}"])
    folder = write(tmp_path / "model", tensors, 1, quantized_config("mxfp4", "bfloat16"))
    refused(folder, SHAPE, f"safetensors: (layer.weight: )?.*{says}")


def test_missing_scales_are_named(tmp_path: Path) -> None:
    tensors = layer()
    del tensors["layer.weight_scales"]
    refused(write(tmp_path / "model", tensors, 1, quantized_config("mxfp4")), SHAPE, "layer.weight_scales is missing")


# --- a model of transformers ---

IDS = torch.arange(18).reshape(2, 9) * 5


def gpt_oss(folder: Path) -> Any:
    """The config of a folder that transformers saved, with experts in place of its own that are MXFP4. Scales are near
    those of a trained model in one layer, and of the whole range of bfloat16 in the other."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = transformers.GptOssConfig(
        **sizes, **heads, **rope, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts = packed(*tensors.pop(name).shape, 112, 123)
        tensors |= {f"{name}_{part}": value for part, value in parts.items()}
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write(folder, tensors, 1, settings)
    return config


def loaded(config: Any, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return load_quantized(model, folder).eval()


def test_all_scales_are_those_of_transformers(tmp_path: Path) -> None:
    """Bit for bit with the sign of zeros, of every code with every scale."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16)
    for dtype in (torch.bfloat16, torch.float32):
        wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        stored = {"layer.weight_blocks": blocks, "layer.weight_scales": scales, **plain_tensors(512, dtype)}
        folder = write(tmp_path / f"{dtype}", stored, 1, quantized_config("mxfp4", f"{dtype}"))
        got = load(folder, (1, 512, 255)).dequantize()
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        assert torch.equal(got.view(bits), wanted.view(bits))


def test_gpt_oss_computes_as_dequantized_by_transformers(tmp_path: Path) -> None:
    """Loaded, with each implementation of experts, saved, and loaded again by transformers."""
    config = gpt_oss(tmp_path)
    transformers = pytest.importorskip("transformers")
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    ours = loaded(config, tmp_path)
    packed = [name for name, weight in ours.named_parameters() if isinstance(weight, TransposedWeight)]
    assert len(packed) == 4
    for name, weight in ours.named_parameters():
        value = weight.dequantize() if name in packed else weight
        assert torch.equal(value.view(torch.int16), theirs.get_parameter(name).view(torch.int16)), name
    with torch.no_grad():
        wanted = theirs(IDS).logits.double()
        for implementation in (None, "eager", "grouped_mm"):
            if implementation:
                ours.set_experts_implementation(implementation)
            y = ours(IDS).logits
            assert (y - wanted).norm() < 0.02 * wanted.norm(), implementation
        ours.save_pretrained(tmp_path / "ours")
        convert_checkpoint(tmp_path, tmp_path / "converted", format="transformers")
        for folder in ("ours", "converted"):
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert all(again.get_parameter(n).scheme == ours.get_parameter(n).scheme for n in packed)
            assert all(torch.equal(again.get_parameter(n).dequantize(), theirs.get_parameter(n)) for n in packed)
            again.set_experts_implementation("grouped_mm")
            assert torch.equal(again(IDS).logits, y)


@pytest.mark.slow
def test_adapters_train_on_packed_experts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = gpt_oss(tmp_path)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = peft.get_peft_model(loaded(config, tmp_path), peft.LoraConfig(r=4, **targets))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = losses_in_training(model, IDS)
    assert losses[-1] < losses[0] - 0.02
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert all("lora_" in name for name in changed)
    assert any("experts" in name for name in changed)
