"""Parts of a quantized tensor that are copies: writes into them would miss the tensor."""

from __future__ import annotations

from typing import TypeVar

import torch

from .base import QuantizedTensor

Q = TypeVar("Q", bound=QuantizedTensor)


def part_of(tensor: QuantizedTensor, part: Q) -> Q:
    """`part`, a slice of `tensor`, which notes whether some of its inner tensors are copies: scales that are quantized
    together with the rest, codes that had to be unpacked. Then `copy_` into it is an error."""
    if not torch.compiler.is_compiling() and not part.is_meta:
        own = tensor.inner_tensors
        shares = (
            name in own and inner.untyped_storage()._cdata == own[name].untyped_storage()._cdata
            for name, inner in part.inner_tensors.items()
        )
        if not all(shares):
            vars(part)["_copied_parts"] = True
    return part
