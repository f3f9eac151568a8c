"""diffusers: models that are quantized while they are loaded, saved, and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import qtorch
from qtorch.dtypes import ConvWeight, QuantizedTensor

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

from qtorch.integrations.diffusers import QtorchConfig, attach
from tests.quantize_model import assert_same
from tests.refusals import refuses

ALL = {
    r".*\.conv\d?": qtorch.int8_weight_only(),
    r".*\.(to_q|to_k|to_v)": qtorch.int4_weight_only(group_size=32),
    r".*": qtorch.int8_dynamic_activation_int8_weight(),
}


UNET = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 32), "norm_num_groups": 8}


def unet() -> Any:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(**UNET, **blocks, in_channels=3, out_channels=3, attention_head_dim=8).eval()


def conditional() -> Any:
    return diffusers.UNet2DConditionModel(
        **UNET, attention_head_dim=4, cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


def transformer() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8
    ).eval()


def run(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    channels = model.config.in_channels
    x = torch.randn(2, channels, 8, 8, generator=generator).to(model.dtype)
    steps = torch.tensor([3, 7])
    with torch.no_grad():
        if isinstance(model, diffusers.UNet2DConditionModel):
            return model(x, steps, torch.randn(2, 5, 32, generator=generator).to(model.dtype)).sample
        if isinstance(model, diffusers.DiTTransformer2DModel):
            return model(x, steps, class_labels=torch.tensor([1, 2])).sample
        return model(x, steps).sample


MODELS = {"unet": unet, "conditional": conditional, "transformer": transformer}


def quantized(model: Any) -> dict[str, Any]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)}


def check_same(first: Any, second: Any) -> None:
    assert_same(first, second)
    assert torch.equal(run(first), run(second))


def test_the_size_of_a_model_and_of_its_files(tmp_path: Path) -> None:
    model = unet()
    qtorch.quantize_(model, ALL)
    assert model.get_memory_footprint() == qtorch.get_model_size_in_bytes(model)
    transformer().save_pretrained(tmp_path / "transformer")
    config = QtorchConfig(qtorch.int4_weight_only(group_size=16))
    kind = diffusers.DiTTransformer2DModel
    kind.from_pretrained(tmp_path / "transformer", quantization_config=config).save_pretrained(tmp_path / "int4")
    with safe_open(tmp_path / "int4" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        name = "transformer_blocks.0.attn1.to_q.weight"
        assert file.get_tensor(f"{name}_packed").dtype == torch.int32
        assert file.get_tensor(f"{name}_scale").shape == (32, 2)
        assert name not in file.keys()  # noqa: SIM118 (not a mapping)
    written = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "qtorch"
    assert QtorchConfig(**written).recipe == config.recipe


@pytest.mark.parametrize("kind", MODELS)
def test_load_save_load(kind: str, tmp_path: Path) -> None:
    """On the fly the same as `quantize_`; saved and loaded twice without a change."""
    model = MODELS[kind]()
    expected = run(model)
    model.save_pretrained(tmp_path / "float")
    recipe = qtorch.int8_weight_only()
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=QtorchConfig(recipe))
    qtorch.quantize_(model, recipe)
    assert quantized(loaded).keys() == quantized(model).keys()
    check_same(loaded, model)
    assert 15 < qtorch.compute_error(expected, run(loaded)) < 70
    for step in ("first", "second"):
        loaded.save_pretrained(tmp_path / step)
        loaded = type(model).from_pretrained(tmp_path / step)
        assert loaded.hf_quantizer.quantization_config.recipe == recipe
        check_same(loaded, model)


def test_mappings_dtypes_and_skipped_modules(tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path / "float")
    model = diffusers.UNet2DModel.from_pretrained(tmp_path / "float", quantization_config=QtorchConfig(ALL))
    weights = quantized(model)
    assert sum(isinstance(weight, ConvWeight) for weight in weights.values()) > 4
    of_queries = [weight for name, weight in weights.items() if "to_q" in name]
    assert of_queries
    assert all(weight.scheme.layout == qtorch.PackedLayout() for weight in of_queries)
    model.save_pretrained(tmp_path / "quantized", max_shard_size="30KB")
    assert len(list((tmp_path / "quantized").glob("*.safetensors"))) > 2
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "quantized")
    check_same(again, model)
    assert again.hf_quantizer.quantization_config.recipe == ALL
    transformer().save_pretrained(tmp_path / "dit")
    config = QtorchConfig(qtorch.int8_weight_only(), modules_to_not_convert=["proj_out"])
    kind = diffusers.DiTTransformer2DModel
    model = kind.from_pretrained(tmp_path / "dit", quantization_config=config, torch_dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert not [name for name in quantized(model) if "proj_out" in name]
    model.save_pretrained(tmp_path / "quantized_dit")
    again = kind.from_pretrained(tmp_path / "quantized_dit", torch_dtype=torch.bfloat16)
    check_same(again, model)


def test_lora_on_a_quantized_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    conditional().save_pretrained(tmp_path / "float")
    config = QtorchConfig(qtorch.int8_weight_only())
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "float", quantization_config=config)
    before = run(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights="gaussian"))
    assert torch.equal(run(model), before)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.5)
    x, hidden = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32)
    losses = []
    for _ in range(3):
        loss = model(x, torch.tensor([1, 2]), hidden).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert quantized(model)
    model.disable_adapters()
    assert torch.equal(run(model), before)


def test_models_of_quantize_and_errors(tmp_path: Path) -> None:
    model = unet()
    refuses("no weight of this UNet2DModel is quantized", lambda: attach(model))
    qtorch.quantize_(model, qtorch.nf4_weight_only(group_size=32))
    attach(model).save_pretrained(tmp_path)
    check_same(diffusers.UNet2DModel.from_pretrained(tmp_path), model)
    unet().save_pretrained(tmp_path)
    config = QtorchConfig(qtorch.int8_weight_only())
    model = diffusers.UNet2DModel.from_pretrained(tmp_path, quantization_config=config)
    expected = run(model)
    model.dequantize()
    assert not quantized(model)
    assert qtorch.compute_error(expected, run(model)) > 80
    model.save_pretrained(tmp_path / "float")
    assert not quantized(diffusers.UNet2DModel.from_pretrained(tmp_path / "float"))
    unet().save_pretrained(tmp_path)
    load = diffusers.UNet2DModel.from_pretrained
    refuses("QtorchConfig takes a recipe", lambda: QtorchConfig("int8"), TypeError)
    refuses("takes a model of diffusers", lambda: attach(torch.nn.Linear(2, 2)), TypeError)
    for recipe, words in [
        (None, "needs a recipe"),
        ({r".*to_q": qtorch.int4_weight_only(group_size=48)}, r"attentions.*block_size \(1, 48\) does not divide"),
        (qtorch.training.int8_mixed_precision_training(), "cannot be applied while loading"),
    ]:
        refuses(words, lambda recipe=recipe: load(tmp_path, quantization_config=QtorchConfig(recipe)))
    model = load(tmp_path, quantization_config=QtorchConfig(qtorch.int8_weight_only()))
    refuses("is saved as safetensors", lambda: model.save_pretrained(tmp_path / "bin", safe_serialization=False))
