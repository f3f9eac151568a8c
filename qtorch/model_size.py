"""The memory that the tensors of a model take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from .dtypes import QuantizedTensor
from .dtypes.embedding import EMBEDDINGS
from .model_argument import check_model


def get_model_size_in_bytes(model: nn.Module, ignore_embeddings: bool = False) -> int:
    """Size in bytes of all parameters and buffers of `model`, each counted once.

    Quantized tensors count with their packed codes and scales, uninitialized ones not at all.

    Args:
        ignore_embeddings: leave out the tables of `nn.Embedding` and `nn.EmbeddingBag`, unless a head shares them.

    Raises:
        TypeError: `model` is not a module.
    """
    check_model("get_model_size_in_bytes", model)
    sizes = {}
    for module in model.modules():
        if not (ignore_embeddings and isinstance(module, EMBEDDINGS)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if not nn.parameter.is_lazy(tensor):
                    quantized = isinstance(tensor, QuantizedTensor)
                    sizes[id(tensor)] = tensor.nbytes if quantized else tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def with_codes_counted(footprint: Callable[..., int]) -> Callable[..., int]:
    """`get_memory_footprint` of the models of another package, which multiplies elements by the size of the logical
    dtype, with quantized tensors as `get_model_size_in_bytes` counts them."""

    @wraps(footprint)
    def get_memory_footprint(self: Any, *args: Any, **kwargs: Any) -> int:
        quantized = [p for p in self.parameters() if isinstance(p, QuantizedTensor)]
        return footprint(self, *args, **kwargs) + sum(p.nbytes - p.numel() * p.element_size() for p in quantized)

    return get_memory_footprint
