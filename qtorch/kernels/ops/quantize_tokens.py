"""Quantization of the keys and values of tokens for a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layouts.packed import pack_codes
from ...primitives.non_finite import with_non_finite
from ...primitives.spec import QuantSpec
from ..cache_form import CacheForm, Parts
from ..custom_ops import by_device


@by_device
def quantize_tokens(x: Tensor, form: CacheForm) -> Parts:
    """Codes and scales of tokens (B, H, T, D), one scale a token of a head; those of the primitives bit for bit.

    A token with a NaN or an infinity has a scale that is NaN, and changes no other token.
    """
    return _quantize(x, form.values, form)


def quantize_keys_and_values(keys: Tensor, values: Tensor, form: CacheForm) -> tuple[Parts, Parts]:
    """Codes and scales of keys and values (B, H, T, D), T a multiple of `form.block`.

    A token with a NaN or an infinity has a scale that is NaN, and changes no other token: where tokens share the scales
    of their keys, the scale of its value is NaN.
    """
    if not form.block:
        return quantize_tokens(keys, form), quantize_tokens(values, form)
    highest = keys.abs().amax(-1, keepdim=True).float()
    lost = with_non_finite(torch.zeros_like(highest), highest)
    codes, scale, *zero = quantize_tokens(values, form)
    scale = (scale.float() + lost).to(scale.dtype)
    return _quantize(torch.where(lost == 0, keys, 0), form.keys, form), (codes, scale, *zero)


def _quantize(x: Tensor, spec: QuantSpec, form: CacheForm) -> Parts:
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point)
    codes = pack_codes(codes, spec.dtype) if form.is_packed else codes
    if codes.dtype is not torch.int8:
        codes = codes.view(torch.uint8)  # float8 lacks operations that move codes
    return (codes, scale) if zero_point is None else (codes, scale, zero_point)
