"""Batches of tokens, for calibration, from texts and the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH_TOKENS = 4096
"""Tokens of a batch, padding included, unless one piece is longer."""

SUFFIXES = (".txt", ".md", ".text", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml")
"""Files of a folder that are texts."""


def read_texts(path: Path) -> list[str]:
    """The text of a file, or those of all text files of a folder in the order of their names."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if not any(text.strip() for text in texts):
        kinds = "" if path.is_file() else f"; a folder of texts has files that end in {', '.join(SUFFIXES)}"
        raise ValueError(f"{path}: there is no text{kinds}")
    return texts


def token_batches(
    texts: Iterable[str], tokenizer: Any, *, length: int = 512, tokens: int | None = None
) -> list[dict[str, Tensor]]:
    """``input_ids`` and ``attention_mask``, (sequences, tokens) int64, of all texts.

    Each text is cut into pieces of at most `length` tokens, each with the special tokens of the tokenizer. Pieces of
    one batch are padded to the longest on the right; the mask keeps padding out of the statistics.

    Args:
        tokenizer: of transformers.
        length: tokens of a piece.
        tokens: stop after so many tokens; by default all are used.

    Raises:
        TypeError: `texts` is one string.
        ValueError: there is no token, or `length` or `tokens` is less than 2.
    """
    if isinstance(texts, str):
        raise TypeError("token_batches: takes a list of texts, got one text; write [text]")
    if length < 2 or (tokens is not None and tokens < 2):
        raise ValueError(f"token_batches: length and tokens are 2 or more, got length={length}, tokens={tokens}")
    pieces: list[list[int]] = []
    left = tokens
    for text in texts:
        for piece in _pieces(text, tokenizer, length):
            piece = piece if left is None else piece[:left]
            if len(piece) > 1:
                pieces.append(piece)
                left = None if left is None else left - len(piece)
        if left is not None and left < 2:
            break
    if not pieces:
        raise ValueError("token_batches: the texts have no tokens")
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    batches, batch = [], pieces[:1]
    for piece in pieces[1:]:
        if (len(batch) + 1) * max(map(len, [*batch, piece])) > BATCH_TOKENS:
            batches.append(_padded(batch, pad))
            batch = []
        batch.append(piece)
    return [*batches, _padded(batch, pad)]


def _pieces(text: str, tokenizer: Any, length: int) -> list[list[int]]:
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        return [list(piece) for piece in found]
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _padded(pieces: list[list[int]], pad: int) -> dict[str, Tensor]:
    longest = max(map(len, pieces))
    rows = [piece + [pad] * (longest - len(piece)) for piece in pieces]
    mask = [[1] * len(piece) + [0] * (longest - len(piece)) for piece in pieces]
    return {
        "input_ids": torch.tensor(rows, dtype=torch.int64, device="cpu"),
        "attention_mask": torch.tensor(mask, dtype=torch.int64, device="cpu"),
    }


def are_texts(data: Any) -> bool:
    """Whether `data` is a list of texts rather than batches."""
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str) for item in data)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    return type(batch)(on_device(value, device) for value in batch) if isinstance(batch, tuple | list) else batch
