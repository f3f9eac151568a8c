"""transformers, with compressed-tensors, loads what is written; and `load_quantized` what it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qtorch
from qtorch import explain, int8_weight_only, load_quantized, quantize_, recipes_for_vllm, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import WeightRecipe
from tests.formats.compressed_tensors import judge

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

IDS = torch.arange(1, 13).reshape(1, 12)

pytestmark = pytest.mark.slow


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **HEADS, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()


def llama(**options: Any) -> Any:
    return made("Llama", intermediate_size=128, num_hidden_layers=2, **options)


def qwen3_moe() -> Any:
    return made("Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def mixtral() -> Any:
    return made("Mixtral", num_local_experts=4)


def floats(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: value.dequantize() if isinstance(value, QuantizedTensor) else value for name, value in named}


def check_equal(loaded: torch.nn.Module, model: torch.nn.Module) -> None:
    theirs = floats(loaded)
    for name, value in floats(model).items():
        assert torch.equal(theirs[name], value), name


def quantized(model: Any, recipe: WeightRecipe, folder: Path) -> Any:
    quantize_(model, recipes_for_vllm(model, recipe))
    save_quantized(model, folder, format="compressed-tensors")
    return model


def pretrained(folder: Path, **options: Any) -> Any:
    """The model of transformers, which its first call has decompressed."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    loaded(IDS)
    return loaded


def generate(model: Any) -> torch.Tensor:
    generated: torch.Tensor = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return generated


WEIGHT_ONLY = [
    int8_weight_only(), qtorch.intx_weight_only("int4", group_size=32), qtorch.intx_weight_only("int3", group_size=32),
    qtorch.float8_weight_only(), qtorch.mxfp4_weight_only(), qtorch.mxfp8_weight_only(), qtorch.nvfp4_weight_only(),
]  # fmt: skip
DYNAMIC = [
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.float8_dynamic_activation_float8_weight(),
]


@pytest.mark.parametrize("recipe", [*WEIGHT_ONLY, *DYNAMIC], ids=str)
def test_from_pretrained_has_the_same_numbers(recipe: WeightRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = quantized(llama(), recipe, folder)
    loaded = pretrained(folder)
    check_equal(loaded, model)
    if recipe in WEIGHT_ONLY:
        # The same weights, and kernels of torch on both sides: the same numbers to the last bit.
        dequantized = llama()
        load_quantized(dequantized, folder)
        qtorch.dequantize_(dequantized)
        with torch.no_grad():
            difference = (loaded(IDS).logits - dequantized(IDS).logits).abs().max()
            own = (loaded(IDS).logits - model(IDS).logits).abs().max()
        # Sums in bf16 in another order: logits of about 0.5, with 8 bits, after two layers.
        assert float(difference) <= 2**-6
        assert float(own) <= 2**-6


def test_asymmetric_weights_mixtral_and_tied_weights(tmp_path: Path) -> None:
    """compressed-tensors 0.20 makes parameters for unpacked zero points; its decompression is right."""
    folder = tmp_path / "model"
    model = quantized(llama(), qtorch.int4_weight_only(group_size=32), folder)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = pretrained(folder, quantization_config=config)
    check_equal(loaded, model)
    quantized(mixtral(), int8_weight_only(), tmp_path / "mixtral")
    names = judge.decompress(tmp_path / "mixtral").keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    config = json.loads((tmp_path / "mixtral" / "config.json").read_text())
    assert "model.layers.0.block_sparse_moe.gate" in config["quantization_config"]["ignore"]
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (tmp_path / "mixtral" / "generation_config.json").is_file()
    folder = tmp_path / "tied"
    model = quantized(llama(tie_word_embeddings=True), qtorch.intx_weight_only("int4", group_size=32), folder)
    again = llama(tie_word_embeddings=True)
    load_quantized(again, folder)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(generate(again), generate(model))
    loaded = pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("make", [qwen3_moe, mixtral])
@pytest.mark.parametrize(
    "recipe", [int8_weight_only(), qtorch.intx_weight_only("int4", group_size=32), qtorch.mxfp4_weight_only()], ids=str
)
def test_experts_are_written_one_by_one(make: Any, recipe: WeightRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = quantized(make(), recipe, folder)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, QuantizedTensor)
    loaded = pretrained(folder)
    check_equal(loaded, model)


INT4 = qtorch.int4_weight_only(group_size=32)
EXPERTS = [int8_weight_only(), qtorch.float8_weight_only(), qtorch.nvfp4_weight_only(), INT4, DYNAMIC[2]]


@pytest.mark.parametrize(("make", "recipe"), [
    *[pytest.param(llama, each, id=f"llama {each}") for each in (*WEIGHT_ONLY, *DYNAMIC, EXPERTS[3])],
    *[pytest.param(make, each, id=f"{make.__name__} {each}") for make in (qwen3_moe, mixtral) for each in EXPERTS],
])  # fmt: skip
def test_load_quantized_is_the_model_that_was_saved(make: Any, recipe: WeightRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if make is not llama and recipe == qtorch.float8_weight_only():
        with pytest.raises(ValueError, match=r"experts\.0\..*vLLM has no scheme for weights float8 per channel"):
            quantized(make(), recipe, folder)
        return
    model = quantized(make(), recipe, folder)
    again = make()
    load_quantized(again, folder)
    assert [each.kernel for each in explain(again)] == [each.kernel for each in explain(model)]
    assert torch.equal(generate(again), generate(model))
    decompressed = judge.decompress(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignored = [name for name in config["ignore"] if not name.startswith("re:")]
    assert "lm_head" in ignored
    assert "model.embed_tokens" in ignored
    assert not decompressed.keys() & {f"{name}.weight" for name in ignored}
    assert len(decompressed) == {llama: 14, qwen3_moe: 16, mixtral: 16}[make]
