"""get_model_size_in_bytes counts what is held, once."""

import pytest
import torch
from torch import nn

from qtorch import get_model_size_in_bytes, int4_weight_only, int8_weight_only, quantize_


def model() -> nn.ModuleDict:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "bags": nn.EmbeddingBag(20, 32), "fc": nn.Linear(32, 16)})
    layers.register_buffer("mean", torch.zeros(32, dtype=torch.float16))
    return layers


def test_parameters_and_buffers() -> None:
    assert get_model_size_in_bytes(model()) == 4 * (10 * 32 + 20 * 32 + 32 * 16 + 16) + 2 * 32
    assert get_model_size_in_bytes(nn.Linear(4, 4, bias=False)) == 4 * 16
    assert get_model_size_in_bytes(nn.ReLU()) == 0


def test_quantized_weights() -> None:
    layers = model()
    quantize_(layers, {"fc": int4_weight_only(group_size=16), "embed": int8_weight_only()})
    # Codes of a byte and fp32 scales per row; half a byte, an fp32 scale and a byte of zero point per group.
    embed, fc = 10 * 32 + 10 * 4, 32 * 16 // 2 + 16 * 2 * (4 + 1)
    assert get_model_size_in_bytes(layers) == embed + 4 * 20 * 32 + fc + 4 * 16 + 2 * 32


def test_without_embeddings() -> None:
    assert get_model_size_in_bytes(model(), ignore_embeddings=True) == 4 * (32 * 16 + 16) + 2 * 32


@pytest.mark.parametrize("ignore_embeddings", [False, True])
def test_tied_weights_count_once(ignore_embeddings: bool) -> None:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "head": nn.Linear(32, 10, bias=False)})
    layers["head"].weight = layers["embed"].weight
    assert get_model_size_in_bytes(layers, ignore_embeddings) == 4 * 10 * 32
