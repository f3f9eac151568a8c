"""The attention function "qtorch" of transformers, which reads the codes of quantized caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ..kernels.ops.kv_attention import attend
from .held import Held, say_once
from .store import KVStore

NAME = "qtorch"


def set_attention(model: Any) -> Any:
    """See `use_quantized_attention`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"use_quantized_attention takes a model of transformers, got {type(model).__name__}")
    can = getattr(model, "_can_set_attn_implementation", None)
    if can is not None and can():
        model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise ValueError(
            f"use_quantized_attention: {type(model).__name__} does not call transformers' attention functions. "
            "A quantized cache works with it as it is, and gives it floats"
        )
    return model


def attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query (B, Hq, M, D) to (B, M, Hq, D).

    Keys and values are tensors (B, H, T, D), or those of a quantized cache.
    """
    rows = query.shape[2]
    if isinstance(key, Held) and isinstance(value, Held) and key.fresh is None and not dropout:
        store: KVStore = key.store
        mask = _with_bias(attention_mask, position_bias, rows, key.tokens, query)
        causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        out = store.attend(query, mask, scaling, causal=causal, softcap=softcap, sinks=s_aux, last=key.tokens)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(key, Held) and isinstance(value, Held) and key.fresh is not None:
        key, value = key.fresh
    if dropout and (isinstance(key, Held) or isinstance(value, Held)):
        say_once("the model drops attention weights out; call model.eval()")
    key, value = (x.floats() if isinstance(x, Held) else x for x in (key, value))
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
    if softcap or s_aux is not None:
        mask = _with_bias(attention_mask, position_bias, rows, key.shape[2], query)
        causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend(query, key, value, mask, s_aux, scaling, float(softcap or 0), causal)
        return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
        **kwargs,
    )


def _with_bias(mask: Tensor | None, bias: Tensor | None, rows: int, tokens: int, query: Tensor) -> Tensor | None:
    """Mask and bias as one mask; without a mask, each query sees the tokens up to its own, the last all."""
    if bias is None:
        return mask
    if mask is None:
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)[None, None]
    bias = bias.to(query.dtype)
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
