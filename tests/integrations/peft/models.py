"""Tiny random models with adapters on quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import qtorch

RECIPES = {
    "int8": qtorch.int8_weight_only(),
    "int4": qtorch.int4_weight_only(group_size=32),
    "int8_dynamic": qtorch.int8_dynamic_activation_int8_weight(),
    "nf4": qtorch.nf4_weight_only(group_size=32),
}

IDS = torch.randint(1, 128, (2, 8), generator=torch.Generator().manual_seed(5))
TARGETS = ["q_proj", "v_proj", "down_proj"]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
OF_EXPERTS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    ),
}


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).to(dtype).eval()


def quantized_llama(recipe: str = "int8", dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    model = llama(dtype, **options)
    qtorch.quantize_(model, {"lm_head": None, r".*": RECIPES[recipe]})
    return model


def moe(name: str, implementation: str = "grouped_mm") -> Any:
    model_class, config_class, options = OF_EXPERTS[name]
    torch.manual_seed(0)
    return model_class(config_class(**{**SIZES, **options}, experts_implementation=implementation)).eval()


def randomized(model: nn.Module, size: float = 0.05) -> nn.Module:
    """Random adapters, as after training: LoRA's B is zero at the start."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = torch.randn_like(parameter) * size
    return model.eval()


def adapted(base: nn.Module, **options: Any) -> Any:
    config = LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})
    return randomized(get_peft_model(base, config))


def output(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def base_of(model: Any, layer: str) -> nn.Module:
    """The quantized module below an adapter."""
    return model.get_submodule(f"base_model.model.{layer}").get_base_layer()
