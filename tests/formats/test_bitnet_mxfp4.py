"""Packed ternary weights of BitNet and MXFP4 experts of gpt-oss, as transformers computes with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qtorch
from qtorch.checkpoint.streaming.quantize_checkpoint import convert_checkpoint
from qtorch.training import bitnet_training, convert
from tests.formats import folders, test_float8
from tests.formats.folders import check, load, plain_tensors, quantized_config, refused, to_dtype, write

SHAPE = OUTPUTS, INPUTS = 32, 64
PACKED = {"linear_class": "bitlinear"}
FLOATS = {"linear_class": "autobitlinear"}


def layer(dtype: torch.dtype = torch.uint8, scale: float = 0.37) -> dict[str, Tensor]:
    """Random codes, packed or as floats."""
    digits = torch.randint(0, 3, (OUTPUTS // 4, 4, INPUTS))
    packed = (digits * torch.tensor([1, 4, 16, 64]).reshape(1, 4, 1)).sum(1).to(torch.uint8)
    weight = packed if dtype is torch.uint8 else torch.randint(-1, 2, SHAPE).to(dtype)
    of_layer = {"layer.weight": weight, "layer.weight_scale": torch.tensor([scale]).bfloat16()}
    return {**of_layer, **plain_tensors(INPUTS, torch.bfloat16)}


def config(**settings: Any) -> dict[str, Any]:
    return quantized_config("bitnet", "bfloat16", **settings)


def decoded(tensors: dict[str, Tensor], divides: bool) -> Tensor:
    stored, scale = tensors["layer.weight"].tolist(), tensors["layer.weight_scale"].float().item()
    rows = stored
    if tensors["layer.weight"].dtype is torch.uint8:
        rows = [[float((byte >> 2 * part & 3) - 1) for byte in row] for part in range(4) for row in stored]
    factor = torch.tensor(1 / scale).item() if divides else scale
    return to_dtype([[code * factor for code in row] for row in rows], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, PACKED, FLOATS])
def test_layers(settings: dict[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers saves packed weights of BitLinear, and floats of AutoBitLinear, which it also reads packed."""
    tensors = layer(dtype)
    folder = write(tmp_path / "model", tensors, 2, config(**settings))
    weight = check(folder, decoded(tensors, settings != FLOATS), "cpu_int8_mm", 2.6)
    assert weight.scheme.activation is not None


def test_the_scheme_is_that_of_training(tmp_path: Path) -> None:
    """But for the smallest scale of an input."""
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).bfloat16()
    qtorch.quantize_(model, bitnet_training())
    qtorch.quantize_(model, convert())
    trained: Any = model[0].weight
    read = load(write(tmp_path / "model", layer(), 1, config()), SHAPE).scheme
    assert (read.weight, read.layout) == (trained.scheme.weight, trained.scheme.layout)
    assert {str(read.activation)} == {str(trained.scheme.activation)}


DAMAGE: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "a code of 2": ({}, "weight", lambda t: t | 3, "one of its codes is not -1, 0 or 1"),
    "a float": (FLOATS, "weight", lambda t: torch.full(SHAPE, 0.5), "one of its codes is not -1, 0 or 1"),
    "integers": ({}, "weight", lambda t: t.view(torch.int8), "layer.weight has shape"),
    "no scale": ({}, "weight_scale", lambda t: t * 0, "its weight_scale is 0.0"),
    "scales": ({}, "weight_scale", lambda t: t.repeat(2), "layer.weight_scale has shape"),
    "class": ({"linear_class": "linear"}, "weight", lambda t: t, "linear_class is 'linear'; known: bitlinear, auto"),
    "list": ({"linear_class": []}, "weight", lambda t: t, "linear_class is"),
    "norm": ({"use_rms_norm": True}, "weight", lambda t: t, "use_rms_norm puts a norm into each linear layer"),
    "online": (
        {**FLOATS, "quantization_mode": "online"},
        "weight",
        lambda t: t,
        r"its weights are floats. Remove .* bitnet_training",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    settings, part, change, says = DAMAGE[name]
    tensors = layer()
    tensors[f"layer.{part}"] = change(tensors[f"layer.{part}"])
    refused(write(tmp_path / "model", tensors, 1, config(**settings)), SHAPE, f"model.*{says}")


# --- models of transformers ---
IDS = torch.arange(18).reshape(2, 9) * 5


def by_transformers(linear_class: str, dtype: torch.dtype, folder: Path) -> Any:
    """A random model, as transformers packs and saves it, and loads it again."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model: Any = transformers.BitNetForCausalLM(transformers.BitNetConfig(**sizes, **more)).to(dtype)
    settings = transformers.BitNetQuantConfig(linear_class=linear_class, modules_to_not_convert=["lm_head"])
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight, key = module.weight.detach().float(), f"{name}.weight"
            scale = weight.abs().mean()
            codes = (weight / scale).round().clamp(-1, 1)
            packs = linear_class == "bitlinear"
            state[key] = bitnet.pack_weights(codes) if packs else codes.to(dtype)
            state[f"{key}_scale"] = (1 / scale if packs else scale).reshape(1).to(dtype)
    model = bitnet.replace_with_bitnet_linear(model, ["lm_head"], settings).to_empty(device="cpu")
    model.load_state_dict(state)
    model.config.quantization_config, model.config.dtype = settings, dtype
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def loaded(theirs: Any, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(theirs.config, dtype=theirs.dtype)
    return qtorch.load_quantized(model, folder).eval()


@pytest.fixture
def eager() -> Any:
    """transformers compiles the functions of its layers, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_a_model_computes_as_in_transformers(linear_class: str, eager: None, tmp_path: Path) -> None:
    """To rounding in fp32. In bfloat16, transformers rounds between its steps as well."""
    for dtype, least in ((torch.float32, 110), (torch.bfloat16, 28)):
        theirs = by_transformers(linear_class, dtype, tmp_path / f"{dtype}")
        ours = loaded(theirs, tmp_path / f"{dtype}")
        assert sum(isinstance(weight, qtorch.dtypes.QuantizedTensor) for weight in ours.parameters()) == 14
        one, other = theirs.model.layers[0].mlp.up_proj, ours.model.layers[0].mlp.up_proj
        x = torch.randn(9, 64, dtype=dtype)
        x[3], x[4] = 0, x[4] * 1e-7
        with torch.no_grad():
            assert qtorch.compute_error(theirs(IDS).logits, ours(IDS).logits) > least
            assert qtorch.compute_error(one(x), other(x)) > least
            assert qtorch.compute_error(one(x[4]), other(x[4])) > least


@pytest.mark.slow
def test_adapters_train_and_the_model_is_saved(eager: None, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = by_transformers("bitlinear", torch.float32, tmp_path / "theirs")
    ours = loaded(theirs, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "converted", format="transformers")
    with torch.no_grad():
        y = ours(IDS).logits
        for folder in ("ours", "converted"):
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert torch.equal(again(IDS).logits, y)
    model = peft.get_peft_model(ours, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    losses = folders.losses_in_training(model, IDS)
    assert losses[-1] < losses[0] - 0.02


MXFP4_SHAPE = 3, 64, 24
"""Experts, inputs, outputs."""


def packed(experts: int, inputs: int, outputs: int, low: int = 110, high: int = 124) -> dict[str, Tensor]:
    """Random blocks and scales, of the stored numbers from `low` to `high`."""
    return {
        "blocks": torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8),
        "scales": torch.randint(low, high + 1, (experts, outputs, inputs // 32), dtype=torch.uint8),
    }


def layer_of_mxfp4(low: int = 110, high: int = 124) -> dict[str, Tensor]:
    parts = {f"layer.weight_{name}": part for name, part in packed(*MXFP4_SHAPE, low, high).items()}
    return {**parts, **plain_tensors(MXFP4_SHAPE[1], torch.bfloat16)}


def decoded_of_mxfp4(tensors: dict[str, Tensor]) -> Tensor:
    blocks, scales = tensors["layer.weight_blocks"].tolist(), tensors["layer.weight_scales"].tolist()
    rows = []
    for matrix, of_matrix in zip(blocks, scales, strict=True):
        for row, exponents in zip(matrix, of_matrix, strict=True):
            values = []
            for block, exponent in zip(row, exponents, strict=True):
                nibbles = [nibble for byte in block for nibble in (byte & 15, byte >> 4)]
                values += [(-1.0) ** (n >> 3) * test_float8.E2M1[n & 7] * 2.0 ** (exponent - 127) for n in nibbles]
            rows.append(values)
    experts, inputs, outputs = MXFP4_SHAPE
    return to_dtype(rows, torch.bfloat16).reshape(experts, outputs, inputs).mT.contiguous()


@pytest.mark.parametrize("with_method", [True, False])
def test_experts(with_method: bool, tmp_path: Path) -> None:
    """Also recognized by the names that gpt-oss gives its tensors."""
    tensors = layer_of_mxfp4()
    folder = write(tmp_path / "model", tensors, 2, quantized_config("mxfp4", "bfloat16"))
    assert isinstance(check(folder, decoded_of_mxfp4(tensors), "", 4.3), qtorch.dtypes.TransposedWeight)
    if not with_method:
        names = {f"mlp.experts.down_proj_{part}": tensors[f"layer.weight_{part}"] for part in ("blocks", "scales")}
        with qtorch.checkpoint.sources.open_source(write(tmp_path / "other", names)) as source:
            assert torch.equal(source.tensor("mlp.experts.down_proj").dequantize(), decoded_of_mxfp4(tensors))


MXFP4_DAMAGE: dict[str, tuple[str, Any, str]] = {
    "NaN": ("scales", lambda t: torch.full_like(t, 255), "one of its scales is 255"),
    "few scales": ("scales", lambda t: t[:, 1:], "layer.weight_scales has shape"),
    "short blocks": ("blocks", lambda t: t[..., :8], r"layer.weight_blocks has shape .* \(any, any, any, 16\)"),
    "other codes": ("blocks", lambda t: t.view(torch.int8), "layer.weight_blocks has shape"),
    "a matrix": ("blocks", lambda t: t[0], "layer.weight_blocks has shape"),
}


@pytest.mark.parametrize("name", MXFP4_DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    part, change, says = MXFP4_DAMAGE[name]
    tensors = layer_of_mxfp4()
    tensors[f"layer.weight_{part}"] = change(tensors[f"layer.weight_{part}"])
    folder = write(tmp_path / "model", tensors, 1, quantized_config("mxfp4", "bfloat16"))
    refused(folder, MXFP4_SHAPE, f"safetensors: (layer.weight: )?.*{says}")


def test_missing_scales_and_those_of_transformers(tmp_path: Path) -> None:
    tensors = layer_of_mxfp4()
    del tensors["layer.weight_scales"]
    refused(write(tmp_path / "m", tensors, 1, quantized_config("mxfp4")), MXFP4_SHAPE, "layer.weight_scales is missing")
    # Bit for bit with the sign of zeros, of every code with every scale.
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


# --- a model of transformers ---
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


def loaded_of_mxfp4(config: Any, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return qtorch.load_quantized(model, folder).eval()


def test_gpt_oss_computes_as_dequantized_by_transformers(tmp_path: Path) -> None:
    """Loaded, with each implementation of experts, saved, and loaded again by transformers."""
    config = gpt_oss(tmp_path)
    transformers = pytest.importorskip("transformers")
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    ours = loaded_of_mxfp4(config, tmp_path)
    packed = [name for name, weight in ours.named_parameters() if isinstance(weight, qtorch.dtypes.TransposedWeight)]
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
    model = peft.get_peft_model(loaded_of_mxfp4(config, tmp_path), peft.LoraConfig(r=4, **targets))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = folders.losses_in_training(model, IDS)
    assert losses[-1] < losses[0] - 0.02
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert all("lora_" in name for name in changed)
    assert any("experts" in name for name in changed)
