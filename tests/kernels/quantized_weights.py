"""Quantized weights and activations for the tests of products, and how near to the reference a product has to be."""

import torch

from qtorch import LinearSpec, MappingType, PackedLayout, PerRow, PlainLayout, QuantSpec
from qtorch.dtypes import quantized_type
from qtorch.kernels.linear import reference

ASYMMETRIC = MappingType.ASYMMETRIC
TOKEN = QuantSpec("int8", PerRow(), quant_min=-127)
ASYMMETRIC_TOKEN = QuantSpec("int8", PerRow(), ASYMMETRIC)

LEAST = {torch.float32: 95, torch.float16: 50, torch.bfloat16: 38}
"""SQNR in dB of a product in floating point."""


def weight_of(spec, shape, device="cpu", activation=None, dtype=torch.float32):
    """A random weight, packed where that makes it smaller."""
    layout = PlainLayout() if spec.dtype.bits == 8 else PackedLayout()
    linear = LinearSpec(spec, activation, layout=layout)
    return quantized_type(spec).from_float(torch.randn(shape).to(dtype), linear).to(device)


INDICES = {
    "some": [[0, 3], [4, -1], [3, 3], [1, 99], [0, 1], [1, 3]], "one token": [[4, 0, 2]], "all to one": [[2]] * 45,
    "sorted": [[0]] * 3 + [[1]] * 17 + [[4]] * 2, "no expert": [[5], [-1]],
}  # fmt: skip
"""(T, R) of which expert: of five, with rows for none, and one that no row asks for."""


def of_experts(x, weight, index):
    """The reference on the rows of each expert, and zeros where the index names none."""
    wanted = torch.zeros(*index.shape, weight.shape[1], dtype=x.dtype, device=x.device)
    for e in range(weight.shape[0]):
        token, place = torch.where(index == e)
        if len(token):
            wanted[token, place] = reference.linear(x[token], weight[e], None)
    return wanted.flatten(0, 1)
