"""The memory that the tensors of a model take."""

from __future__ import annotations

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
