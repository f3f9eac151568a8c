"""Architectures of transformers with small random weights, built from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

VOCABULARY = 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 60, (2, length))


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def text_to_text() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": tokens(7)}


def image(size: int = 16) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


class Architecture(NamedTuple):
    """A class of transformers, its small configuration, and a batch of its data.

    Attributes:
        generates: whether it has `generate` with a static cache.
        compiles: whether the float model is one graph.
    """

    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]] = text
    generates: bool = True
    compiles: bool = True


def _text(**more: Any) -> dict[str, Any]:
    return {**TEXT, **SPECIAL, **more}


def _encoder_decoder(**more: Any) -> dict[str, Any]:
    sides = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    return {"vocab_size": VOCABULARY, "d_model": 32, **both, "decoder_start_token_id": 1, **SPECIAL, **more}


def _decoder(name: str, generates: bool = True, compiles: bool = True, **more: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", _text(**more), text, generates, compiles)


ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3", head_dim=16),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", _text(head_dim=16, sliding_window=8)),
    "phi3": _decoder("Phi3"),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **SPECIAL},
    ),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
    # mixtures of experts
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen2_moe": _decoder(
        "Qwen2Moe", moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": _decoder("Qwen3Moe", head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _decoder("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _text(intermediate_size_mlp=64, head_dim=16, num_local_experts=4, interleave_moe_layer_step=1),
    ),
    "deepseek_v3": _decoder(
        "DeepseekV3",
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "nemotron_h": _decoder(
        "NemotronH",
        layers_block_type=["mamba", "moe", "attention", "moe"],
        num_hidden_layers=4,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        head_dim=16,
    ),
    "granite_moe": _decoder("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "jetmoe": _decoder("JetMoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=1),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_heads": 2,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            **SPECIAL,
        },
        compiles=False,
    ),
    # encoders
    "bert": Architecture("BertForMaskedLM", "BertConfig", _text(max_position_embeddings=64), text, False),
    "modernbert": Architecture(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _text(cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=8),
        text,
        False,
    ),
    "nomic_bert": Architecture(
        "NomicBertForMaskedLM", "NomicBertConfig", _text(max_position_embeddings=64), text, False
    ),
    # encoder-decoders
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        text_to_text,
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        _encoder_decoder(max_position_embeddings=64, forced_eos_token_id=None),
        text_to_text,
    ),
    # vision
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**TEXT, "image_size": 16, "patch_size": 4, "num_labels": 5},
        image(),
        False,
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "num_labels": 5},
        image(32),
        False,
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "max_position_embeddings": 16, **SPECIAL},
            "vision_config": {**TEXT, "image_size": 16, "patch_size": 4},
            "projection_dim": 16,
        },
        lambda: {**text(), **image()()},
        False,
    ),
    # audio
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _encoder_decoder(num_mel_bins=16, max_source_positions=16, max_target_positions=64, begin_suppress_tokens=None),
        lambda: {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": tokens(7)},
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **TEXT,
            "conv_dim": (16, 32),
            "conv_stride": (4, 2),
            "conv_kernel": (8, 4),
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            **SPECIAL,
        },
        lambda: {"input_values": torch.randn(2, 400)},
        False,
    ),
    # state spaces, and hybrids
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 16},
        generates=False,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            **SPECIAL,
        },
        generates=False,
    ),
    "recurrent_gemma": _decoder(
        "RecurrentGemma", False, lru_width=32, attention_window_size=8, num_hidden_layers=3, head_dim=16
    ),
    "jamba": _decoder(
        "Jamba",
        False,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=16,
        use_mamba_kernels=False,
    ),
    "lfm2": _decoder("Lfm2", False, layer_types=["conv", "full_attention"], conv_L_cache=3),
}


def built(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The model of this name with random weights, in eval mode, and a batch."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    config = getattr(hf, architecture.config)(**architecture.options)
    model: nn.Module = getattr(hf, architecture.model)(config).eval()
    for parameter in model.parameters():
        # Zeros and ones, which some models start from, would hide errors.
        if parameter.dim() >= 2 and float(parameter.detach().std()) < 1e-6:
            nn.init.normal_(parameter, std=0.02)
    return model, architecture.batch()


def output_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The main output of the model, without gradients."""
    with torch.no_grad():
        outputs = model(**batch)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if isinstance(found := getattr(outputs, name, None), Tensor):
            return found
    raise AssertionError(f"{type(model).__name__} returns {list(outputs)}")
