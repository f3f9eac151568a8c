"""Calibration data, and running a model on it; batches of tokens from texts and the tokenizer of a model."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .captures import Use, UseRecorder
from .statistics import Statistic, Statistics, Sum

NO_BATCH = "calibration: there is no batch; it needs at least one batch"


class StopForward(Exception):
    """Ends a forward whose rest is not needed."""


@dataclass(frozen=True, eq=False)
class Data:
    """Batches of inputs of a model, and how to call it with one; see `calibrated`."""

    batches: Iterable[Any]
    forward: Callable[[nn.Module, Any], Any] | None = None
    mask: Callable[[Any], Tensor] | None = None

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Run `model` on one batch; an exception says on which."""
        try:
            if self.forward is not None:
                return self.forward(model, batch)
            if isinstance(batch, Mapping):
                return model(**batch)
            return model(*batch) if isinstance(batch, tuple | list) else model(batch)
        except StopForward:
            raise
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"calibration: the model was called with the batch {_described(batch)}")
            raise

    def mask_of(self, batch: Any) -> Tensor | None:
        """The tokens that count, bool, or None if all do."""
        mask = self.mask(batch) if self.mask is not None else None
        if self.mask is None and isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def checked(self) -> list[Any]:
        """All batches, whose masks fit the ids and leave some token.

        Raises:
            ValueError: they do not; there is no batch, or an empty one; or `batches` is itself one batch.
        """
        if isinstance(self.batches, Tensor | Mapping | str) or not isinstance(self.batches, Iterable):
            raise ValueError(f"calibration: batches is a list of inputs, got {_described(self.batches)}; write [batch]")
        batches = list(self.batches)
        if not batches:
            raise ValueError(NO_BATCH)
        if self.forward is None and are_texts(batches):
            raise ValueError("calibration: the batches are texts; give what a tokenizer makes of them: input_ids, ...")
        masks = [self.mask_of(batch) for batch in batches]
        for index, (batch, mask) in enumerate(zip(batches, masks, strict=True)):
            tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
            if tensors and not any(tensor.numel() for tensor in tensors):
                raise ValueError(f"calibration: batch {index} is empty: {_described(batch)}")
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            if isinstance(ids, Tensor) and mask is not None and mask.shape != ids.shape:
                has = f"has a mask of shape {tuple(mask.shape)}"
                raise ValueError(f"calibration: batch {index} {has}: {_described(batch)}")
        if all(mask is not None and not mask.any() for mask in masks):
            raise ValueError("calibration: the masks of all batches are zero everywhere, so no token counts; 1 counts")
        return batches


def _described(batch: Any) -> str:
    """A batch in short: the types and shapes of its tensors."""
    if isinstance(batch, Tensor):
        return f"a tensor of {str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_described(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(_described, batch)) + ")"
    return f"{batch!r:.40}"


def _leaves(value: Any) -> list[Any]:
    """What is in a batch or an output, also where it is a mapping that `torch.utils._pytree` does not know."""
    leaves: list[Any] = []
    for leaf in torch.utils._pytree.tree_leaves(value):
        leaves += torch.utils._pytree.tree_leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return leaves


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in the output of a model or a block that are in floating point."""
    return [leaf for leaf in _leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """In eval mode and without the caches of generation; afterwards each module has its own mode again."""
    training = [(module, module.training) for module in model.modules()]
    # The decoder of an encoder-decoder model has a configuration of its own.
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", None) is True}.values()
    for config in caching:
        config.use_cache = False
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for config in caching:
            config.use_cache = True


@torch.no_grad()
def run_batches(model: nn.Module, data: Data, after_each: Callable[[], None] | None = None) -> int:
    """Run `model` in eval mode, without gradients, on each batch; returns the number of batches."""
    count = 0
    with eval_mode(model):
        for count, batch in enumerate(data.batches, 1):  # noqa: B007
            data.call(model, batch)
            if after_each is not None:
                after_each()
    if not count:
        raise ValueError(NO_BATCH)
    return count


def collect(
    model: nn.Module, data: Data, wanted: Mapping[Tensor, Sequence[type[Statistic]]], transposed: Collection[int] = ()
) -> dict[Tensor, Statistics]:
    """The statistics of the inputs of weights that are wanted of each parameter, over all batches; the model stays. A
    layer that is shared or called in a loop gets the inputs of all calls. `transposed`: see `UseRecorder`."""
    found: dict[Tensor, Statistics] = {p: {kind: kind() for kind in kinds} for p, kinds in wanted.items()}

    def seen(use: Use) -> None:
        if use.expert is not None or use.transposed:
            return
        for rows in use.rows():
            for statistic in found[use.weight].values():
                statistic.update(rows)

    def end_batch() -> None:
        for statistics in found.values():
            for statistic in statistics.values():
                statistic.end_batch()

    with UseRecorder(found, seen, transposed=transposed):
        run_batches(model, data, end_batch)
    of_each = [(name, _problem(s, p)) for name, p in model.named_parameters() for s in found.get(p, {}).values()]
    if wrong := ", ".join(f"{name}: {problem}" for name, problem in of_each if problem):
        raise ValueError(f"calibration: {wrong}; use a recipe without data for them")
    return found


def _problem(statistic: Statistic, weight: Tensor) -> str:
    total = statistic.total if isinstance(statistic, Sum) else None
    not_finite = total is not None and not bool(total.isfinite().all())
    if not statistic.rows:
        return "no input was seen" + " (none is of experts in one parameter)" * (weight.dim() == 3)
    return "its inputs have NaN, or infinite squares" * not_finite


BATCH_TOKENS = 4096
"""Tokens of a batch, padding included, unless one piece is longer."""

SUFFIXES = (".txt", ".md", ".text", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml")
"""Files of a folder that are texts."""


def read_texts(path: Path) -> list[str]:
    """The text of a file, or those of all text files of a folder in the order of their names."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()) if path.is_dir() else [path]
    texts = [file.read_text(encoding="utf-8-sig", errors="replace") for file in files]
    if not any(text.strip() for text in texts):
        kinds = f"; a folder of texts has files that end in {', '.join(SUFFIXES)}" if path.is_dir() else ""
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
        raise ValueError("token_batches: no text has two tokens, the least of a batch")
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
