"""The tokenizer of a folder of transformers as the metadata of GGUF that llama.cpp tokenizes with.

Two kinds of `tokenizer.json` are written, both of byte pairs: those on bytes ("gpt2": GPT-2, Llama 3, Qwen), which are
known by how they split texts first, and those on characters with bytes for the rest ("llama": SentencePiece of Llama 2,
Mistral and Gemma), whose scores follow from the order of merges. Special tokens and templates are those that
`gguf.SpecialVocab` finds.

Source: `TextModel.get_vocab_base` and `_create_vocab_sentencepiece` of llama.cpp, `conversion/base.py`; the expressions
are in `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....primitives.files import read_json

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
        raise ValueError(
            f"{folder / TOKENIZER}: a {model.get('type')} tokenizer; those of byte pairs (BPE) are written"
        )
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
    raise ValueError(
        f"{folder / TOKENIZER}: it splits texts in a way that has no name here; known are those of {known}"
    )
