"""What llama.cpp has to know of a model beside its tensors, from the config.json of transformers.

Of some numbers llama.cpp has no key, but computes with one value; a model with another is refused by name.

Source: `conversion/*.py` and `src/models/*.cpp` of llama.cpp; frequencies of llama3 are those of
`transformers.modeling_rope_utils`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ....primitives.files import read_json
from .architectures import ARCHITECTURES

Config = Mapping[str, Any]

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GEMMA = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_FURTHER = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": {"attention.sliding_window": "sliding_window"}}
_OTHER_NAMES = {"num_local_experts": "num_experts", "num_key_value_heads": "num_attention_heads"}
"""Names in config.json where the first is missing."""

_FIXED: dict[str, dict[str, Any]] = {
    "qwen2moe": {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
}
"""The values with which llama.cpp computes."""

_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh", "gemma3": "gelu_pytorch_tanh"}
_WHOLE_HEADS = ("qwen2", "qwen2moe", "phi3")
"""Whose heads have hidden_size elements together."""

_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every so many layers attention is not that of a sliding window."""

_SCALING = {"linear": "linear", "yarn": "yarn", "longrope": "longrope", "default": None, "llama3": None}
_YARN = {
    "yarn_ext_factor": "extrapolation_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def architecture_of(config: Config) -> str:
    """The architecture of GGUF of a model with this config.json."""
    model_type = config.get("model_type")
    for name, architecture in ARCHITECTURES.items():
        if model_type in architecture.model_types:
            return name
    known = ", ".join(each for architecture in ARCHITECTURES.values() for each in architecture.model_types)
    raise ValueError(f"model_type {model_type!r:.40} of config.json has no architecture; known are {known}")


def metadata_of(config: Config) -> dict[str, Any]:
    """The keys of a model with this config.json, which must have the names of a model of text.

    Raises:
        ValueError: the architecture is not known, or llama.cpp would compute something else.
    """
    called = architecture_of(config)
    _check(config, called)
    names = {**_KEYS, **(_EXPERTS if ARCHITECTURES[called].has_experts else {}), **_FURTHER.get(called, {})}
    found = {key: config.get(name, config.get(_OTHER_NAMES.get(name, ""))) for key, name in names.items()}
    if missing := [names[key] for key in ("block_count", "attention.head_count") if not isinstance(found[key], int)]:
        raise ValueError(f"config.json has no {missing[0]}")
    if found["attention.key_length"] is None:
        found["attention.key_length"] = found["attention.value_length"] = _head_size(config)
    found["rope.dimension_count"] = _rotated(config)
    if called == "phi3":
        found["attention.sliding_window"] = found["attention.sliding_window"] or 0
    for scope, rope in _ropes(config).items():
        found[f"rope.freq_base{scope}"] = float(rope.get("rope_theta", 10000.0))
        if not scope:
            found |= _scaling(rope, config)
    known = {f"{called}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": called, **known}


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rotated(config: Config) -> int:
    factor = _ropes(config)[""].get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return int(factor * _head_size(config))


def _check(config: Config, called: str) -> None:
    fixed = {"hidden_act": _ACTIVATIONS.get(called, "silu"), **_FIXED.get(called, {})}
    found = {name: config.get(name, value) for name, value in fixed.items()}
    found["hidden_act"] = config.get("hidden_activation") or found["hidden_act"]
    if called in _WHOLE_HEADS:
        fixed["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        found["head_dim"] = _head_size(config)
    if period := _PERIODS.get(called):
        layers = config.get("num_hidden_layers") or 0
        kinds = ("sliding_attention", "full_attention")
        fixed["layer_types"] = [kinds[(index + 1) % period == 0] for index in range(layers)]
        found["layer_types"] = config.get("layer_types") or fixed["layer_types"]
        sizes = (_head_size(config), config["hidden_size"] // config["num_attention_heads"])
        found["query_pre_attn_scalar"] = config.get("query_pre_attn_scalar", sizes[0])
        # The second is that of the models of 27 billion parameters.
        fixed["query_pre_attn_scalar"] = sizes[found["query_pre_attn_scalar"] == sizes[1]]
    for name, value in fixed.items():
        if found[name] not in (value, None):
            of_config = f"{name} of config.json is {found[name]!r:.80}"
            raise ValueError(f"{of_config}; llama.cpp computes {called} with {value!r:.80}")


def _ropes(config: Config) -> dict[str, Mapping[str, Any]]:
    """The parameters of rotary embeddings, "" -> of all layers, or those of full attention; "_swa" -> of others."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in given:
        return {"": given["full_attention"], "_swa": given["sliding_attention"]}
    top = {name: config[name] for name in ("rope_theta",) if config.get(name) is not None}
    found: dict[str, Mapping[str, Any]] = {"": {**top, **given}}
    if config.get("rope_local_base_freq") is not None:
        found["_swa"] = {"rope_theta": config["rope_local_base_freq"]}
    return found


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _scaling(rope: Mapping[str, Any], config: Config) -> dict[str, Any]:
    kind = _kind(rope)
    if kind not in _SCALING:
        raise ValueError(f"rotary embeddings of the type {kind!r:.40} are not written; known are {', '.join(_SCALING)}")
    if _SCALING[kind] is None:
        return {}
    found: dict[str, Any] = {"type": _SCALING[kind]}
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if kind == "longrope":
        extension = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0
        found |= {"original_context_length": original, "attn_factor": rope.get("attention_factor") or factor}
    else:
        found["factor"] = float(rope["factor"])
    if kind == "yarn":
        found["original_context_length"] = original or config["max_position_embeddings"]
        found |= {key: float(rope[name]) for key, name in _YARN.items() if rope.get(name) is not None}
    return {f"rope.scaling.{key}": value for key, value in found.items()}


def derived_tensors(config: Config) -> dict[str, torch.Tensor]:
    """Tensors of the file, fp32, that transformers computes from the config: divisors of frequencies, one for each pair
    of elements of a head that are rotated."""
    rope = _ropes(config)[""]
    kind, size = _kind(rope), _rotated(config)
    if kind == "longrope":
        return {
            f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"], dtype=torch.float32, device="cpu")
            for name in ("long", "short")
        }
    if kind != "llama3":
        return {}
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / factor + smooth)}


# The tokenizer of a folder of transformers as the metadata of GGUF that llama.cpp tokenizes with.
#
# Two kinds of `tokenizer.json` are written, both of byte pairs: those on bytes ("gpt2": GPT-2, Llama 3, Qwen), which
# are known by how they split texts first, and those on characters with bytes for the rest ("llama": SentencePiece of
# Llama 2, Mistral and Gemma), whose scores follow from the order of merges. Special tokens and templates are those that
# `gguf.SpecialVocab` finds.
#
# Source: `TextModel.get_vocab_base` and `_create_vocab_sentencepiece` of llama.cpp, `conversion/base.py`; the
# expressions are in `src/llama-vocab.cpp`.


TOKENIZER = "tokenizer.json"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s|"

SPLITS = {
    _WORDS % "{1,3}": "llama-bpe",
    _WORDS % "": "qwen2",
    _CASES % ("*", "+") + _CASES % ("+", "*") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""The regular expression by which texts are split -> its name in llama.cpp."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""

_LEAST = -1e4
"""The score of a token that no merge makes."""


def write_vocabulary(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokenizer of `folder` to a `GGUFWriter`, with unused tokens up to the vocabulary of the model with this
    config.json; without one, the model takes numbers of tokens only.

    Raises:
        ValueError: the tokenizer is of a kind that is not written, or has more tokens than the model.
    """
    if not (folder / TOKENIZER).is_file():
        writer.add_tokenizer_model("none")
        return
    import gguf

    size, data = config["vocab_size"], read_json(folder / TOKENIZER)
    model = data["model"]
    is_bytes = model.get("type") == "BPE" and not model.get("byte_fallback")
    if model.get("type") != "BPE":
        raise ValueError(f"{folder / TOKENIZER}: a {model.get('type')} tokenizer; those of byte pairs are written")
    tokens = {number: token for token, number in model["vocab"].items()}
    types = {number: _type_of(token, model, is_bytes) for number, token in tokens.items()}
    for added in data.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        if types.get(added["id"]) != UNKNOWN:
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if tokens and max(tokens) >= size:
        raise ValueError(f"{folder / TOKENIZER}: it has the token {max(tokens)}, the model has {size} embeddings")
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    writer.add_tokenizer_pre(_split_of(data, folder) if is_bytes else "default")
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([types.get(number, UNUSED) for number in range(size)])
    if not is_bytes:
        writer.add_token_scores(_scores(model, tokens, size))
        writer.add_add_space_prefix(any(_prepends(step) for step in _steps(data)))
    special = gguf.SpecialVocab(folder, load_merges=is_bytes, n_vocab=size)
    for kind in special.special_token_types:
        if isinstance(number := config.get(f"{kind}_token_id"), int):
            special.special_token_ids.setdefault(kind, number)
    # Without the key, llama.cpp would add one for some kinds.
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _type_of(token: str, model: Mapping[str, Any], is_bytes: bool) -> int:
    if is_bytes:
        return NORMAL
    if token == model.get("unk_token"):
        return UNKNOWN
    return BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL


def _scores(model: Mapping[str, Any], tokens: Mapping[int, str], size: int) -> list[float]:
    """Merges are done in order, and in llama.cpp the one with the highest score is done first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault(merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge), rank)
    return [-float(ranks[tokens[n]]) if tokens.get(n) in ranks else _LEAST * len(ranks) for n in range(size)]


def _steps(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is done to a text before byte pairs are merged."""
    for name in ("normalizer", "pre_tokenizer"):
        step = data.get(name) or {}
        yield from step.get("normalizers") or step.get("pretokenizers") or [step]


def _prepends(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")


def _split_of(data: Mapping[str, Any], folder: Path) -> str:
    """The name in llama.cpp of how texts are split before bytes are merged."""
    for step in _steps(data):
        if step.get("type") == "ByteLevel" and step.get("use_regex", True):
            return "gpt-2"
        if step.get("type") == "Split" and (name := SPLITS.get(step["pattern"].get("Regex"))):
            return name
    known = ", ".join(["gpt-2", *SPLITS.values()])
    raise ValueError(f"{folder / TOKENIZER}: it splits texts in a way that has no name here, want one of {known}")
