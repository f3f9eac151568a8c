"""Tiny random models with adapters on quantized weights."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import qtorch
from tests.zoo.architectures import built

RECIPES = {
    "int8": qtorch.int8_weight_only(),
    "int4": qtorch.int4_weight_only(group_size=32),
    "int8_dynamic": qtorch.int8_dynamic_activation_int8_weight(),
    "nf4": qtorch.nf4_weight_only(group_size=32),
}

IDS = torch.randint(1, 128, (2, 8), generator=torch.Generator().manual_seed(5))
TARGETS = ["q_proj", "v_proj", "down_proj"]

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
OF_EXPERTS = ("mixtral", "qwen3_moe")


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return built("llama", **{**SIZES, **options})[0].to(dtype)


def quantized_llama(recipe: str = "int8", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = llama(dtype, **options)
    qtorch.quantize_(model, {"lm_head": None, r".*": RECIPES[recipe]})
    return model


def moe(name: str, implementation: str = "grouped_mm") -> Any:
    return built(name, **SIZES, experts_implementation=implementation)[0]


def randomized(model: torch.nn.Module, size: float = 0.05) -> torch.nn.Module:
    """Random adapters, as after training: LoRA's B is zero at the start."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = torch.randn_like(parameter) * size
    return model.eval()


def adapted(base: torch.nn.Module, **options: Any) -> Any:
    return randomized(get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})))


def output(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def base_of(model: Any, layer: str) -> torch.nn.Module:
    """The quantized module below an adapter."""
    return model.get_submodule(f"base_model.model.{layer}").get_base_layer()


def merge_and_unmerge(model: Any, run: Callable[[], torch.Tensor], tolerance: float = 1e-5) -> None:
    """Merged weights give the outputs up to a tolerance, and weights that are unmerged the same bits."""
    y = run()
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(run(), y, rtol=0, atol=tolerance)
        model.unmerge_adapter()
        assert torch.equal(run(), y)
