"""Rows and the experts that they are multiplied with: sorting, and the product of one expert after the other.

An index of experts has shape (T, R): row t of the input is multiplied with R experts, and row t * R + r of the result
is the product with expert ``experts[t, r]``. An index that names no expert, below 0 or from E on, gives a row of zeros:
that is how rows behind the last group, and tokens of experts on other devices, are left out.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...primitives import Scheme, granularity


def experts_of_groups(offsets: Tensor, rows: int) -> Tensor:
    """The index (rows, 1) for rows sorted by expert, those of expert e before ``offsets[e]``, as `F.grouped_mm` has
    them. Nothing is read from the device."""
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), positions, right=True).unsqueeze(1)


@functools.lru_cache(maxsize=1024)
def scheme_of_expert(scheme: Scheme) -> Scheme | None:
    """The scheme of one matrix (N, K) of a weight (E, N, K); None if blocks span experts, unless one is the whole."""
    shape, block = scheme.shape, scheme.weight.block_size(scheme.shape)
    if block[0] != 1 and block != shape:
        return None
    pattern = [-1 if size == whole else size for size, whole in zip(block[1:], shape[1:], strict=True)]
    # A word for all that is not a block of its own, so that both are one scheme.
    own = scheme.weight.granularity
    try:
        word = own if own.pattern(2) == tuple(pattern) else granularity.granularity_of(pattern)
    except ValueError:  # it names three axes
        word = granularity.granularity_of(pattern)
    weight = scheme.weight.with_granularity(word)
    return Scheme(replace(scheme.spec, weight=weight), shape[1:], scheme.dtype)


def expert_by_expert(
    x: Tensor, experts: Tensor, count: int, n: int, product: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """The rows (T * R, N), from one product for each expert that has rows. The index is read on the host.

    Args:
        x: (T, K), in the dtype of the result.  experts: (T, R), integers.
        count, n: E and N.
        product: (numbers of rows of the input, e) -> the product of those with expert e, (rows, N).
    """
    ids = experts.reshape(-1)
    rows = ids.shape[0]
    named = torch.where((ids >= 0) & (ids < count), ids, count)
    order = named.argsort(stable=True)
    of_input = order // experts.shape[1]
    parts, start = [], 0
    for e, length in enumerate(torch.bincount(named, minlength=count + 1).tolist()[:count]):
        if length:
            parts.append(product(of_input[start : start + length], e))
        start += length
    y = torch.cat([*parts, x.new_zeros(rows - start, n)])
    places = torch.empty_like(order)
    places[order] = torch.arange(rows, device=order.device)
    return y.index_select(0, places)
