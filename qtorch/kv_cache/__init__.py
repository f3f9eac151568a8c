"""Quantized caches of the keys and values of attention, and attention that reads their codes.

    use_quantized_attention(model)
    model.generate(**inputs, past_key_values=quantized_cache(model, KVCacheSpec("int8")))

`GrowingKV` and `StaticKV` are the stores of one layer, on plain tensors, without transformers, which the functions
import that need it.
"""

from typing import Any, TypeVar

import torch

from ..kernels.ops.kv_attention import problem_of
from ..model.explain import Explanation, explain_problem
from ..primitives.supported_versions import check_version
from .store import KVCacheSpec
from .stores import GrowingKV, StaticKV

__all__ = ["GrowingKV", "KVCacheSpec", "StaticKV", "explain_attention", "quantized_cache", "use_quantized_attention"]

Model = TypeVar("Model")


def quantized_cache(model: Any, spec: KVCacheSpec | str = "int8", max_length: int | None = None) -> Any:
    """A `Cache` of transformers that holds keys and values in codes: ``generate(..., past_key_values=cache)``.

    Layers of full attention are quantized, and, in a cache that grows, those with a sliding window, unless the spec
    asks for keys by channel or recent tokens. Linear attention and whatever else has a layer of its own in transformers
    stays as transformers makes it; a model of which nothing is quantized is refused. The cross-attention of an
    encoder-decoder model, which is written once, stays in floating point.

    The first tokens of an empty cache attend to themselves in floating point; all later ones read codes. With
    `use_quantized_attention` the codes are read directly. Without it, each layer gets them dequantized at each step,
    which is correct and slow, and is said once.

    Args:
        model: a model of transformers, or its config.
        spec: how tokens are quantized; a string is the `dtype` of a `KVCacheSpec`.
        max_length: tokens for which a static cache has room, for `torch.compile` in one graph; None: a cache that
            grows.

    Returns:
        A `DynamicCache`, a `StaticCache` or an `EncoderDecoderCache`.

    Raises:
        ValueError: no layer of the model can be quantized, or the spec does not fit a static cache.
        TypeError: `model` is neither a model of transformers nor a config.
    """
    check_version("transformers")
    from .transformers_cache import make_cache

    return make_cache(model, KVCacheSpec.of(spec), max_length)


def use_quantized_attention(model: Model) -> Model:
    """Let a model of transformers read quantized caches directly, without dequantizing them.

    Sets the model's attention implementation to ``"qtorch"``. Where keys are not in codes (no cache, another cache,
    layers that stay in floating point) it does what ``"sdpa"`` does, and what ``"eager"`` does for soft caps and sinks.
    On a CPU a compiled kernel does it for one token, in fp32, without repeating keys for the heads that share them.
    ``model.set_attn_implementation("sdpa")`` undoes it.

    Args:
        model: a model of transformers; changed, and returned.

    Raises:
        TypeError: the model is not one of transformers.
        ValueError: it does not use transformers' interface for attention functions, or relies on masks that sdpa leaves
            out. Its caches still work: they give it floats.
    """
    check_version("transformers")
    from .transformers_cache import set_attention

    return set_attention(model)


def explain_attention(
    spec: KVCacheSpec | str = "int8", head_dim: int = 128, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Explanation:
    """Which kernel runs attention on a cache, and why the others do not.

    Args:
        spec: of the cache; a string is the `dtype` of a `KVCacheSpec`.
        head_dim: channels of a head.
        dtype: of the queries.
        device: type of their device.
    """
    return explain_problem(problem_of(KVCacheSpec.of(spec).settled().form, head_dim, dtype, device))
