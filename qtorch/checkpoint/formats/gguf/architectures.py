"""The architectures of GGUF: names of llama.cpp and of transformers, in both directions, from one table.

Each architecture has a table of names, and of what llama.cpp does to the tensors when it writes a file. It permutes the
rows of q and k in some, and adds 1 to the norms of gemma, which transformers adds when it computes. It keeps the
experts of a layer in three tensors, transformers in two: gate and up are joined.

Source: `convert_hf_to_gguf.py` of llama.cpp, and `modeling_gguf_pytorch_utils.py` of transformers, with which the tests
compare.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LLAMA = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

_FUSED = ("ffn_gate_exps", "ffn_up_exps")
"""The experts that transformers has in one parameter, gate first, joined along the rows."""

_JOINED = ".experts.gate_up_proj"

_DERIVED = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that transformers computes from its config."""


@dataclass(frozen=True)
class Architecture:
    """Names within a layer, of llama.cpp -> of transformers, without ".weight" and ".bias"; the `model_type`s of
    config.json; whether the rows of q and k are permuted, and what was added to the weights of norms."""

    layer: Mapping[str, str]
    model_types: tuple[str, ...]
    permutes: bool = False
    norm_offset: float = 0.0

    @property
    def has_experts(self) -> bool:
        """Whether layers may have experts."""
        return "ffn_gate_inp" in self.layer


ARCHITECTURES = {
    "llama": Architecture(_LLAMA | _EXPERTS, ("llama", "mistral", "mixtral"), permutes=True),
    "qwen2": Architecture(_LLAMA, ("qwen2",)),
    "qwen2moe": Architecture(_LLAMA | _EXPERTS | _SHARED_EXPERT, ("qwen2_moe",)),
    "qwen3": Architecture(_LLAMA | _NORMS_OF_HEADS, ("qwen3",)),
    "qwen3moe": Architecture(_LLAMA | _NORMS_OF_HEADS | _EXPERTS, ("qwen3_moe",)),
    "gemma": Architecture(_LLAMA, ("gemma",), norm_offset=1.0),
    "gemma2": Architecture(_GEMMA2, ("gemma2",), norm_offset=1.0),
    "gemma3": Architecture(_GEMMA2 | _NORMS_OF_HEADS, ("gemma3_text",), norm_offset=1.0),
    "phi3": Architecture(_PHI3, ("phi3",)),
}


class Parameter(NamedTuple):
    """A parameter of transformers, made from stored tensors, which are joined along their rows. The rows may be
    permuted in the order of `heads`, `subtract` was added to each element, and a matrix of one row may be a vector in
    the file (`is_row`)."""

    stored: tuple[str, ...]
    heads: int = 0
    subtract: float = 0.0
    is_row: bool = False


def names_of(metadata: Mapping[str, Any], stored: Iterable[str]) -> tuple[dict[str, Parameter], dict[str, str], str]:
    """The parameters of a file, further names of some, and what to know where a model has other names."""
    stored = [name for name in stored if not _DERIVED.fullmatch(name)]
    called = metadata.get("general.architecture")
    known = ARCHITECTURES.get(called) if isinstance(called, str) else None
    if known is None:
        note = (
            f"tensors have their names of llama.cpp, since the architecture {called!r:.40} is not one of "
            f"{', '.join(ARCHITECTURES)}"
        )
        return {name: Parameter((name,)) for name in stored}, {}, note
    parameters: dict[str, Parameter] = {}
    for name in stored:
        new, parameter = parameter_of(name, known, metadata)
        if new in parameters:
            if not new.endswith(_JOINED):
                raise ValueError(f"{name} and {', '.join(parameters[new].stored)} are both {new}")
            parameter = parameter._replace(stored=tuple(sorted(parameters[new].stored + parameter.stored)))
        parameters[new] = parameter
    for new, parameter in parameters.items():
        if new.endswith(_JOINED) and len(parameter.stored) != len(_FUSED):
            raise ValueError(f"{new} needs the gate and the up of the experts, got {', '.join(parameter.stored)}")
    aliases = {}
    if "lm_head.weight" not in parameters and "model.embed_tokens.weight" in parameters:
        # llama.cpp stores tied weights once.
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    note = f"names are those that transformers has for the architecture {called}; others are as llama.cpp has them"
    return parameters, aliases, note


def stored_names(name: str, known: Architecture) -> tuple[str, ...]:
    """The tensors, one after the other along the rows, that hold a parameter of transformers: the inverse of the names
    of `parameter_of`; none for buffers that are computed from the config."""
    if name.endswith("rotary_emb.inv_freq"):
        return ()
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        found = [f"{stored}.{kind}" for stored, module in _WHOLE.items() if module == stem]
    else:
        layer, rest = match.groups()
        stem, _, kind = rest.rpartition(".")
        found = [f"blk.{layer}.{stored}.{kind}" for stored, module in known.layer.items() if module == stem]
        if known.has_experts and stem == "mlp.experts":
            parts = {"gate_up_proj": _FUSED, "down_proj": ("ffn_down_exps",)}.get(kind, ())
            found = [f"blk.{layer}.{part}.weight" for part in parts]
    if not found:
        raise ValueError(f"{name} has no name in GGUF, where {', '.join(known.model_types)} have no such parameter")
    return tuple(found)


def parameter_of(name: str, known: Architecture, metadata: Mapping[str, Any]) -> tuple[str, Parameter]:
    """(name in transformers, how it is made) of a stored tensor."""
    stem, _, kind = name.rpartition(".")
    subtract = known.norm_offset if stem.endswith("norm") and kind == "weight" else 0.0
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}", Parameter((name,), subtract=subtract)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None:
        return name, Parameter((name,))
    layer, part = match.groups()
    if kind == "weight" and known.has_experts and part.endswith("_exps"):
        # Parameters, not modules: their names have no ".weight".
        of_experts = "gate_up_proj" if part in _FUSED else "down_proj"
        return f"model.layers.{layer}.mlp.experts.{of_experts}", Parameter((name,))
    if part not in known.layer:
        return name, Parameter((name,))
    heads = _heads(metadata, int(layer), part) if known.permutes and part in ("attn_q", "attn_k") else 0
    is_row = part == "ffn_gate_inp_shexp"
    return f"model.layers.{layer}.{known.layer[part]}.{kind}", Parameter((name,), heads, subtract, is_row)


def _heads(metadata: Mapping[str, Any], layer: int, part: str) -> int:
    """The number of attention heads of q or k in a layer."""
    called = metadata["general.architecture"]
    value = metadata.get(key := f"{called}.attention.head_count")
    if part == "attn_k":
        value = metadata.get(other := f"{called}.attention.head_count_kv", value)
        key = other
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else None
    if type(value) is not int or value < 1:
        raise ValueError(f"the rows of {part} are permuted by heads, whose number {key} is {value!r:.40}")
    return value


def undo_permutation(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of `heads` heads from the order of llama.cpp to that of transformers.

    Rotary embeddings turn pairs of elements of a head: in transformers i and i + d/2, in llama.cpp 2 i and 2 i + 1. So
    llama.cpp stores the rows of a head, d of them, as 0, d/2, 1, d/2 + 1, ... A row of blocks moves as it is.
    """
    if rows.shape[0] % (2 * heads):
        raise ValueError(f"{rows.shape[0]} rows are not an even number for each of {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def permute(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `undo_permutation`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)
