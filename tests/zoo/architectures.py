"""Architectures of transformers with small random weights, built from their configurations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

VOCABULARY = 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 5}
CONVNEXT = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "num_labels": 5}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
MAMBA2 = {"vocab_size": VOCABULARY, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CLIP = {
    "text_config": {**TEXT, "max_position_embeddings": 16, **SPECIAL},
    "vision_config": {**TEXT, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}


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


def _text(
    name: str, *, head: str = "ForCausalLM", config: str = "", generates: bool = True, compiles: bool = True,
    **more: Any,
) -> Architecture:  # fmt: skip
    return Architecture(
        f"{name}{head}", f"{config or name}Config", {**TEXT, **SPECIAL, **more}, text, generates, compiles
    )


def _encoder(name: str, **more: Any) -> Architecture:
    return _text(name, head="ForMaskedLM", generates=False, **more)


def _encoder_decoder(**more: Any) -> dict[str, Any]:
    sides = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    return {"vocab_size": VOCABULARY, "d_model": 32, **both, "decoder_start_token_id": 1, **SPECIAL, **more}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}

ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "llama": _text("Llama"),
    "qwen3": _text("Qwen3", head_dim=16),
    "gemma3": _text("Gemma3", config="Gemma3Text", head_dim=16, sliding_window=8),
    "phi3": _text("Phi3"),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCABULARY, **GPT2, **SPECIAL}),
    "opt": _text("OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
    # mixtures of experts
    "mixtral": _text("Mixtral", num_local_experts=4),
    "qwen2_moe": _text("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=32, num_experts=4),
    "qwen3_moe": _text("Qwen3Moe", **EXPERTS, head_dim=16, num_experts=4),
    "gpt_oss": _text("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "llama4": _text(
        "Llama4",
        config="Llama4Text",
        **{"intermediate_size_mlp": 64, "head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 1},
    ),
    "deepseek_v3": _text(
        "DeepseekV3",
        **{**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "nemotron_h": _text(
        "NemotronH",
        **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "head_dim": 16},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 8},
        **{**EXPERTS, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32},
    ),
    "granite_moe": _text("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "jetmoe": _text("JetMoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=1),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 2, "n_layers": 2, **SPECIAL},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        compiles=False,
    ),
    # encoders
    "bert": _encoder("Bert", max_position_embeddings=64),
    "modernbert": _encoder(
        "ModernBert", cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=8
    ),
    "nomic_bert": _encoder("NomicBert", max_position_embeddings=64),
    # encoder-decoders
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}, text_to_text),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        _encoder_decoder(max_position_embeddings=64, forced_eos_token_id=None),
        text_to_text,
    ),
    "marian": Architecture("MarianMTModel", "MarianConfig", _encoder_decoder(max_position_embeddings=64), text_to_text),
    # vision
    "vit": Architecture("ViTForImageClassification", "ViTConfig", {**TEXT, **IMAGE}, image(), False),
    "convnext": Architecture("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, image(32), False),
    "clip": Architecture("CLIPModel", "CLIPConfig", CLIP, lambda: {**text(), **image()()}, False),
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
            **{**TEXT, **SPECIAL, "conv_dim": (16, 32), "conv_stride": (4, 2), "conv_kernel": (8, 4)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        },
        lambda: {"input_values": torch.randn(2, 400)},
        False,
    ),
    # state spaces, and hybrids
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig", {**STATES, "vocab_size": VOCABULARY, "time_step_rank": 16}, generates=False
    ),
    "mamba2": Architecture("Mamba2ForCausalLM", "Mamba2Config", {**STATES, **SPECIAL, **MAMBA2}, generates=False),
    "recurrent_gemma": _text(
        "RecurrentGemma", generates=False, lru_width=32, attention_window_size=8, num_hidden_layers=3, head_dim=16
    ),
    "jamba": _text(
        "Jamba",
        generates=False,
        **{"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 16},
        use_mamba_kernels=False,
    ),
    "lfm2": _text("Lfm2", generates=False, layer_types=["conv", "full_attention"], conv_L_cache=3),
}


def built(name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The model of this name with random weights, in eval mode, and a batch; `options` of its configuration differ."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    config = getattr(hf, architecture.config)(**{**architecture.options, **options})
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
