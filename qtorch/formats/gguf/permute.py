"""The order of the rows of q and k.

Rotary embeddings turn pairs of elements of a head: in transformers i and i + d/2, in llama.cpp 2 i and 2 i + 1. So
llama.cpp stores the rows of a head, d of them, as 0, d/2, 1, d/2 + 1, ... A row of blocks moves as it is.
"""

from __future__ import annotations

from torch import Tensor


def undo_permutation(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of `heads` heads from the order of llama.cpp to that of transformers.

    Raises:
        ValueError: N is not an even number of rows for each head.
    """
    if rows.shape[0] % (2 * heads):
        raise ValueError(f"{rows.shape[0]} rows are not an even number for each of {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
