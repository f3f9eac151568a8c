"""VectorCodebookLayout: four codes that are an entry of the codebook of `primitives.vector_spec`, in a byte."""

from dataclasses import dataclass
from typing import Any

import torch

from ..spec import QuantSpec, Scheme
from ..vector_spec import VECTOR, VectorSpec, pack_vectors, unpack_vectors
from .base import Form, register_layout
from .packed import LayoutAlongAxis


@register_layout
@dataclass(frozen=True, repr=False)
class VectorCodebookLayout(LayoutAlongAxis):
    """Codes of a `VectorSpec`, a byte for each 4 along `axis`: (..., K) codes are (..., K / 4) bytes."""

    name = "vector_codebook"
    any_codes = False

    def check_spec(self, weight: QuantSpec) -> None:
        if not isinstance(weight, VectorSpec):
            raise ValueError(f"VectorCodebookLayout holds the codes of a VectorSpec, the weight has {weight}")

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        weight: Any = scheme.weight
        if (axis := weight.axis(len(scheme.codes_shape))) != self.axis:
            raise ValueError(f"{self!r}: the vectors of {weight} lie along axis {axis}")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        shape = list(scheme.codes_shape)
        shape[self.axis] //= VECTOR
        return (Form(tuple(shape), {torch.uint8}),)

    def pack_qdata(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        return pack_vectors(codes, self.axis).contiguous()

    def unpack_qdata(self, qdata: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        return unpack_vectors(qdata, self.axis)
