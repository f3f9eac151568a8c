"""DoRA on quantized weights (Liu et al. 2024, arXiv:2402.09353).

    y = m / |W + s B A| * (W x + s B A x)      m: one learned number per output; |.|: the norm of a row

PEFT's code takes the norm of `base_layer.weight + s B A`. Here it gets the dequantized weight, for the norm only; W x
is the product of the quantized layer.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from peft.tuners.lora import variants
from torch import Tensor, nn

from .versions import of_magnitude


def _linear_or_conv(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
    """`forward` of DoRA for `lora.Linear` and the convolutions."""
    dropout, base_result = module.lora_dropout[active_adapter], result
    if module.training and not isinstance(dropout, nn.Identity):
        x = dropout(x)
        base_result = module.base_layer(x.to(result.dtype))
    base = module.get_base_layer()
    return result + module.lora_magnitude_vector[active_adapter](
        x,
        lora_A=module.lora_A[active_adapter],
        lora_B=module.lora_B[active_adapter],
        scaling=module.scaling[active_adapter],
        base_layer=SimpleNamespace(weight=_float(base.weight), bias=base.bias),
        base_result=base_result,
        **of_magnitude(active_adapter),
    )


def _embedding(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
    """`forward` of DoRA for `lora.Embedding`."""
    norm_scale, of_adapter = module.lora_magnitude_vector[active_adapter](
        x,
        lora_A=module.lora_embedding_A[active_adapter].T,
        lora_B=module.lora_embedding_B[active_adapter].T,
        scaling=module.scaling[active_adapter],
        base_layer=SimpleNamespace(weight=_float(module.get_base_layer().weight)),
        embed_fn=module._embed,
        **of_magnitude(active_adapter),
    )
    embed_scale = module._get_embed_scale()
    if embed_scale is not None:
        of_adapter = of_adapter * embed_scale.to(of_adapter.dtype)
    return norm_scale * result + of_adapter


FORWARDS = {
    variants.DoraLinearVariant: _linear_or_conv,
    variants.DoraConv1dVariant: _linear_or_conv,
    variants.DoraConv2dVariant: _linear_or_conv,
    variants.DoraConv3dVariant: _linear_or_conv,
    variants.DoraEmbeddingVariant: _embedding,
}
"""Variants whose forward looks at the base weight -> that forward for quantized weights."""


@functools.cache
def on_quantized(variant: Any) -> Any:
    """The class of a variant for quantized weights; the class itself if its forward does not look at the weight."""
    if variant not in FORWARDS:
        return variant
    return type(f"Quantized{variant.__name__}", (variant,), {"forward": staticmethod(FORWARDS[variant])})


def _float(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.dequantize(), requires_grad=False)
