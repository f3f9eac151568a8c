"""Tiny random models of transformers, with mappings that quantize more than their linear layers."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

from qtorch import int4_weight_only, int8_weight_only
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.transformers import QtorchConfig
from tests.quantize_model import assert_same

__all__ = ["CASES", "EXPERTS", "I4", "I8", "TEXT", "assert_same", "build", "load", "quantized_names", "run"]

I8 = int8_weight_only()
I4 = int4_weight_only(group_size=32)
EXPERTS = r".*\.experts\.(gate_up_proj|down_proj)"

TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Case(NamedTuple):
    """A model, the mapping that is used on the fly, and what `quantize_` needs to do the same."""

    kind: Any
    config: Any
    recipe: dict[str, Any]
    left: dict[str, Any] = {}


CASES: dict[str, Case] = {
    "llama": Case(hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT), {r".*": I4}, {"lm_head": None}),
    "tied_llama": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**TEXT, tie_word_embeddings=True),
        {"model.embed_tokens": I8, r".*": I4},
        {"lm_head": I8},
    ),
    "qwen3_moe": Case(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **TEXT, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, num_key_value_heads=2
        ),
        {EXPERTS: I8, r".*": I4},
        {"lm_head": None},
    ),
    "mixtral_float_experts": Case(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**TEXT, num_local_experts=4, num_key_value_heads=2),
        {r".*": I8},
        {"lm_head": None},
    ),
    "mixtral": Case(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**TEXT, num_local_experts=4, num_key_value_heads=2),
        {EXPERTS: I4, r".*": I8},
        {"lm_head": None},
    ),
    "gpt2": Case(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32),
        {"transformer.wpe": I8, "lm_head": I4},
    ),
    "t5": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2, decoder_start_token_id=0),
        {"shared": I8, r".*": I4},
        # transformers keeps `wo` in fp32; the head is tied to `shared`.
        {"lm_head": I8, r".*\.wo": None},
    ),
    "vit": Case(
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=5,
        ),
        {r".*\.projection": I8, r".*": I4},
    ),
    "whisper": Case(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            vocab_size=64,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=32,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        {r".*\.conv\d": I8, r".*": I4},
        {"proj_out": None},
    ),
}


def load(folder: Path, *args: Any, name: str = "llama", **kwargs: Any) -> Any:
    """The model in `folder`, quantized while it is loaded as `QtorchConfig` says with these arguments."""
    return CASES[name].kind.from_pretrained(folder, quantization_config=QtorchConfig(*args, **kwargs))


def build(name: str) -> Any:
    torch.manual_seed(0)
    return CASES[name].kind(copy.deepcopy(CASES[name].config)).eval()


def run(name: str, model: Any) -> Tensor:
    """What the model generates; the logits of one that does not."""
    if name == "vit":
        return model(torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)).logits
    given = torch.linspace(-1, 1, 16 * 64).view(1, 16, 64) if name == "whisper" else torch.arange(3, 9)[None]
    return model.generate(given, max_new_tokens=5, do_sample=False)


def quantized_names(model: nn.Module) -> set[str]:
    return {
        name for name, tensor in model.named_parameters(remove_duplicate=False) if isinstance(tensor, QuantizedTensor)
    }
