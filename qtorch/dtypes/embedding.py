"""`F.embedding` and `F.embedding_bag` from a quantized table, routed to the kernel registry.

Only the requested rows are dequantized. The table is frozen; `per_sample_weights` get their gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..primitives import tracing
from . import dispatch, linear, low_rank_weight, transposed_weight
from .base import QuantizedTensor

aten = torch.ops.aten

EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weight is a table."""


@dispatch.implements_function(functional.embedding)
def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """`F.embedding` from a quantized table (V, D): indices (...) -> (..., D), in the table's logical dtype."""
    _check_max_norm("embedding", max_norm)
    tracing.refuse_jit_trace()
    if input.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding takes indices in int64 or int32, got {input.dtype}: ids.long()")
    if isinstance(weight, transposed_weight.PaddedWeight):
        if isinstance(weight, transposed_weight.TransposedWeight):
            return embedding(input, transposed_weight.as_view(weight))
        return embedding(input, transposed_weight.padded_matrix(weight))[..., : weight.scheme.shape[-1]]
    if tracing.transforms_active():
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        trains = isinstance(weight, QuantizedTensor) and weight.trains
        return tracing.run_whole(embedding, input, weight, *options) if trains else _Transformed.apply(input, weight)
    if isinstance(weight, QuantizedTensor) and weight.trains:
        return weight.embedding(input, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    return _embedding(input, weight)


@dispatch.implements_function(functional.embedding_bag)
def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """`F.embedding_bag` from a quantized table (V, D): gather the rows in floating point, then reduce each bag.

        y[b] = sum_{i in bag b} per_sample_weights[i] * dequantize(w)[input[i]]    or their mean, or their maximum

    Args:
        input: indices (B, L), or (I) with `offsets` (B), where each bag starts.
    """
    _check_max_norm("embedding_bag", max_norm)
    _check_bags(input, offsets, per_sample_weights)
    ids = input.reshape(-1)
    scales = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    if offsets is None:
        offsets = torch.arange(0, ids.shape[0], input.shape[1], dtype=ids.dtype, device=ids.device)
        include_last_offset = False
    index = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
    if padding_idx is not None:
        # Padding goes into one more bag, the last, which is dropped. Given a padding_idx, torch would make the number
        # of rows gathered a constant of a compiled graph.
        size = weight.shape[0]
        if not -size <= padding_idx < size:
            raise ValueError(f"embedding_bag: padding_idx {padding_idx} is not in a table of {size} rows")
        padding = ids == padding_idx % size
        index = padding.byte().argsort(stable=True)
        scales = None if scales is None else scales[index]
        start = functional.pad((~padding).cumsum(0), (1, 0))
        offsets = start[offsets] if include_last_offset else torch.cat([start[offsets], start[-1:]])
        include_last_offset = False
    options: Any = {"scale_grad_by_freq": scale_grad_by_freq, "mode": mode, "sparse": sparse}
    options |= {"per_sample_weights": scales, "include_last_offset": include_last_offset}
    y = functional.embedding_bag(index, embedding(ids, weight), offsets, **options)
    return y if padding_idx is None else y[:-1]


class _Transformed(torch.autograd.Function):
    """`embedding` from a frozen table under the transforms of torch.func."""

    @staticmethod
    def forward(input: Tensor, weight: QuantizedTensor) -> Tensor:
        return _embedding(input, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.weight = tracing.unwrapped_subclass(inputs[1])

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise linear.frozen_error(ctx.weight)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], input: Tensor, weight: QuantizedTensor) -> tuple[Tensor, int]:
        return _Transformed.apply(input.movedim(in_dims[0], 0), weight), 0


@dispatch.implements_aten(aten.embedding.default)
def _embedding_below_autograd(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _embedding(args[1], args[0])


def _embedding(ids: Tensor, table: Tensor) -> Tensor:
    if not isinstance(table, QuantizedTensor):
        raise TypeError(f"embedding takes plain indices and a quantized table, got {linear.kinds(ids, table)}")
    if isinstance(table, low_rank_weight.LowRankWeight):
        rows = functional.embedding(ids, table.up).float() @ table.down.float()
        return _embedding(ids, low_rank_weight.matrix_beside(table)) + rows.to(table.scheme.dtype)
    linear.check_device("embedding", ids, table)
    kernel = linear.find_kernel("embedding", table.scheme, table.scheme.dtype, ids.device.type)
    if not tracing.is_compiling():
        table.check_inner_tensors(not kernel.checks_memory)
    return kernel(ids, table)


def _check_max_norm(op: str, max_norm: float | None) -> None:
    if max_norm is not None:
        raise ValueError(f"{op}: max_norm would rewrite the table, and a quantized table is frozen; leave it out")


def _check_bags(input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> None:
    if (input.dim(), None if offsets is None else offsets.dim()) not in ((2, None), (1, 1)):
        got = "no offsets" if offsets is None else f"offsets of shape {tuple(offsets.shape)}"
        raise ValueError(
            f"embedding_bag takes indices (B, L), or (I) with offsets (B), got indices of shape {tuple(input.shape)} "
            f"and {got}"
        )
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
        raise ValueError(
            f"embedding_bag takes a weight for each index, got shape {tuple(per_sample_weights.shape)} for indices of "
            f"shape {tuple(input.shape)}"
        )
