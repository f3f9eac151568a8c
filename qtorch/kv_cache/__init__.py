"""Quantized caches of the keys and values of attention, and attention that reads their codes.

    use_quantized_attention(model)
    model.generate(**inputs, past_key_values=quantized_cache(model, KVCacheSpec("int8")))

`GrowingKV` and `StaticKV` are the stores of one layer, on plain tensors, without transformers.
"""

from .store import KVCacheSpec
from .stores import GrowingKV, StaticKV
from .use import explain_attention, quantized_cache, use_quantized_attention

__all__ = ["GrowingKV", "KVCacheSpec", "StaticKV", "explain_attention", "quantized_cache", "use_quantized_attention"]
