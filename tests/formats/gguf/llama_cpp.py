"""Models of transformers written as llama.cpp does: names by gguf's own map, rows of q and k permuted, and so on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from qtorch.checkpoint.formats.gguf.block_types import TYPES
from tests.formats.gguf.random_blocks import random_bytes, write

ARCHITECTURES = dict(gguf.MODEL_ARCH_NAMES)
BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""What gguf can quantize; blocks of the others are random."""


def permuted(weight: Tensor, heads: int) -> Tensor:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def config_metadata(config: Any, architecture: str) -> dict[str, Any]:
    entries = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "vocab_size": config.vocab_size,
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    if getattr(config, "head_dim", None):
        entries |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        entries |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if getattr(config, "moe_intermediate_size", None):
        entries["expert_feed_forward_length"] = config.moe_intermediate_size
    if getattr(config, "sliding_window", None):
        entries["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{key}": value for key, value in entries.items()}


def stored_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    """The tensors of a model, by name in the file."""
    config = model.config
    arch = next(arch for arch, name in ARCHITECTURES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if "experts.gate_up_proj" in name:
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, 1)
            stored |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        if "experts.down_proj" in name:
            stored[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
            continue
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        stored[found] = tensor
    return stored


def save(model: nn.Module, path: Path, architecture: str, kinds: Mapping[str, str], default: str = "Q8_0") -> Path:
    """Write a model.

    Args:
        kinds: part of a name in the file -> type; matrices that none of them is in have the type `default`.
    """
    tensors = {}
    for name, tensor in stored_tensors(model, architecture).items():
        data = tensor.detach().float().contiguous().numpy()
        kind = next((kind for part, kind in kinds.items() if part in name), default)
        if tensor.dim() < 2 or "gate_inp" in name:
            kind = "F32"
        number = GGMLQuantizationType[kind]
        if kind in BY_GGUF:
            data = gguf.quants.quantize(data, number)
        elif kind not in ("F32", "F16"):
            data = random_bytes(TYPES[int(number)], data.shape, len(tensors), scale=2e-4 if "XS" in kind else 1e-3)
        elif kind == "F16":
            data = data.astype(np.float16)
        tensors[name] = data, None if kind in ("F32", "F16") else number
    return write(path, tensors, architecture, config_metadata(model.config, architecture))


def numbers(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if hasattr(tensor, "scheme") else tensor.detach().float()
