"""Caches of transformers whose layers of full attention hold codes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ..kernels.ops.kv_attention import attend, float_attention
from ..primitives.tracing import is_compiling
from .store import KVCacheSpec, StoredKV, say_once
from .stores import GrowingKV, StaticKV

NAME = "qtorch"
"""Of the attention function that reads the codes of quantized caches."""


def set_attention(model: Any) -> Any:
    """See `use_quantized_attention`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"use_quantized_attention takes a model of transformers, got {type(model).__name__}")
    if not model._supports_sdpa and not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise ValueError(f"use_quantized_attention: {type(model).__name__} relies on masks that sdpa leaves out")
    can = getattr(model, "_can_set_attn_implementation", None)
    if can is not None and can():
        model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise ValueError(f"use_quantized_attention: {type(model).__name__} does not call transformers' attention")
    return model


def attention(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers, (B, Hq, M, D) to (B, M, Hq, D), on tensors or a quantized cache."""
    rows = query.shape[2]
    if isinstance(key, StoredKV) and isinstance(value, StoredKV):
        if key.fresh is not None:
            key, value = key.fresh
        elif dropout:
            say_once("the model drops attention weights out; call model.eval()")
    stored = isinstance(key, StoredKV) and isinstance(value, StoredKV) and not dropout
    if not stored:
        key, value = (x.floats() if isinstance(x, StoredKV) else x for x in (key, value))
        if attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[2]]
        if position_bias is not None:
            position_bias = position_bias[..., : key.shape[2]]
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        one = rows == 1 and query.device.type == "cpu" and not dropout and not records
        if not softcap and s_aux is None and (not one or "cache" in kwargs):  # a paged cache
            kwargs |= {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    mask = _with_bias(attention_mask, position_bias, rows, key.tokens if stored else key.shape[2], query)
    causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if stored:
        out = key.store.attend(query, mask, scaling, causal=causal, softcap=softcap, sinks=s_aux, last=key.tokens)
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        function = float_attention if one else attend
        out = function(query, key, value, mask, s_aux, scaling, float(softcap or 0), causal)
    return out.transpose(1, 2).contiguous(), None


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


def make_cache(model: Any, spec: KVCacheSpec, max_length: int | None) -> Any:
    """See `quantized_cache`."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"quantized_cache takes a model of transformers or its config, got {type(model).__name__}")
    decoder = config.get_text_config(decoder=True)
    make: Any = QuantizedDynamicCache if max_length is None else partial(QuantizedStaticCache, max_length=max_length)
    cache = make(decoder, spec)
    # What the encoder gives is written once, and all of it is attended to: as long as it is.
    return cache_utils.EncoderDecoderCache(cache, cache_utils.DynamicCache()) if config.is_encoder_decoder else cache


def _layers(config: Any, mapping: dict[str, Any], quantized: dict[type, Any], **more: Any) -> list[Any]:
    """Layers as transformers makes them, those of some classes by a function of their arguments."""
    types, arguments = cache_utils.get_layer_types_and_kwargs(config)
    makers = [quantized.get(kind, kind) for kind in map(mapping.get, types)]  # type: ignore[arg-type]
    layers = [make(**more, **given) for make, given in zip(makers, arguments, strict=True) if make is not None]
    if None in makers or not any(isinstance(layer, _Quantized) for layer in layers):
        name, kinds = type(config).__name__, ", ".join(sorted(set(types)))
        raise ValueError(f"quantized_cache: {name} has layers {kinds}, none of which can be quantized")
    return layers


class QuantizedDynamicCache(cache_utils.DynamicCache):
    """A cache that grows, for models with this config of a decoder; see `quantized_cache`."""

    def __init__(self, config: Any, spec: KVCacheSpec) -> None:
        quantized: dict[type, Any] = {cache_utils.DynamicLayer: lambda: QuantizedLayer(config, spec)}
        alone = spec.settled(growing=False)
        if alone.step == 1 and not alone.kept:
            quantized[cache_utils.DynamicSlidingWindowLayer] = partial(QuantizedSlidingLayer, config, alone)
        layers = _layers(config, cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, quantized)
        cache_utils.Cache.__init__(self, layers=layers)


class QuantizedStaticCache(cache_utils.StaticCache):
    """A cache of fixed size; see `quantized_cache`."""

    def __init__(self, config: Any, spec: KVCacheSpec, max_length: int) -> None:
        make = lambda max_cache_len: QuantizedStaticLayer(config, spec, max_cache_len)  # noqa: E731
        mapping = cache_utils.STATIC_LAYER_TYPE_MAPPING
        layers = _layers(config, mapping, {cache_utils.StaticLayer: make}, max_cache_len=max_length)
        cache_utils.Cache.__init__(self, layers=layers)


class _Quantized:
    """What all quantized layers share: the store, and what the model is given."""

    store: Any
    config: Any
    is_initialized: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)

    def _given(self, fresh: tuple[Tensor, Tensor] | None, tokens: int) -> tuple[Any, Any]:
        """The latest tokens: codes if the model's attention reads them, else floats."""
        if self.config._attn_implementation == NAME:
            return StoredKV(self.store, 0, fresh, tokens), StoredKV(self.store, 1, fresh, tokens)
        say_once("call qtorch.kv_cache.use_quantized_attention(model), so that attention reads codes")
        keys, values = fresh or self.store.dequantize()
        return keys[:, :, -tokens:], values[:, :, -tokens:]

    # transformers sets keys, values and batch_size before there are any, and when it has appended some.
    @property
    def keys(self) -> Any:
        """Dequantized, for whoever looks at them; None if there are none."""
        return self.store.dequantize()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, value: None) -> None: ...

    @property
    def values(self) -> Any:
        return self.store.dequantize()[1] if self.is_initialized else None

    @values.setter
    def values(self, value: None) -> None: ...

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size")
        return int(self.store.shape[0])

    @batch_size.setter
    def batch_size(self, value: int) -> None: ...

    def offload(self) -> None:
        """Move everything to the CPU."""
        if self.is_initialized:
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Move everything back to the device of the model."""
        if self.is_initialized and self.store.device != self.device:
            self.store.to(self.device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row `beam_idx[i]`."""
        if self.is_initialized:
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized:
            self.store.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if self.is_initialized:
            self.store.reorder(torch.arange(self.batch_size, device=indices.device)[indices])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store.spec})"


def _check_crop(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")


class QuantizedLayer(_Quantized, cache_utils.DynamicLayer):
    """A layer of a `DynamicCache`."""

    def __init__(self, config: Any, spec: KVCacheSpec) -> None:
        self.config, self.store = config, GrowingKV(spec)
        super().__init__()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens (B, H, t, D)."""
        fresh = None if self.store.length else (key_states, value_states)
        self._append(key_states, value_states)
        return self._given(fresh, self.store.length)

    def get_seq_length(self) -> int:
        return int(self.store.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        _check_crop(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            self.store.crop(max(0, self.store.length + tokens_to_remove))

    def reset(self) -> None:
        self.store.reset()
        self.is_initialized = False


class QuantizedSlidingLayer(_Quantized, cache_utils.DynamicSlidingWindowLayer):
    """A layer of a `DynamicCache` that keeps the latest `sliding_window - 1` tokens."""

    def __init__(self, config: Any, spec: KVCacheSpec, sliding_window: int, **kwargs: Any) -> None:
        self.config, self.store = config, GrowingKV(spec)
        super().__init__(sliding_window, **kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens (B, H, t, D). While the past is recorded (see transformers), `crop` drops what is too old."""
        count = key_states.shape[2]
        fresh = None if self.cumulative_length else (key_states, value_states)
        if not self.record_past:
            self._slide()
        self._append(key_states, value_states)
        self.cumulative_length += count
        visible = self.store.length if fresh else min(self.store.length, self.sliding_window - 1 + count)
        return self._given(fresh, visible)

    def _slide(self) -> None:
        self.store.drop(max(0, self.store.length - self.sliding_window + 1))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and those that are too old."""
        _check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        if self.cumulative_length >= self.sliding_window and not self.record_past and tokens_to_remove:
            raise RuntimeError("a layer with a full sliding window is cropped only after activate_past_recording()")
        count = min(-tokens_to_remove, self.store.length)
        self.store.crop(self.store.length - count)
        self.cumulative_length -= count
        self._slide()

    def reset(self) -> None:
        self.store.reset()
        self.cumulative_length, self.is_initialized = 0, False


class QuantizedStaticLayer(_Quantized, cache_utils.StaticLayer):
    """A layer of a `StaticCache`."""

    def __init__(self, config: Any, spec: KVCacheSpec, max_length: int) -> None:
        self.config, self.store = config, StaticKV(spec, max_length)
        cache_utils.CacheLayerMixin.__init__(self)
        self.max_cache_len = max_length
        self.is_empty = True  # known to Python, unlike the length: a graph of the prompt is another one anyway

    @property
    def cumulative_length(self) -> Tensor:  # type: ignore[override]
        """The number of tokens, a tensor."""
        return self.store.length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.store.initialize(key_states, value_states)
        if not is_compiling():
            for tensor in (*self.store.keys, *self.store.values, self.store.length):
                torch._dynamo.mark_static_address(tensor)
        super().lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens (B, H, t, D)."""
        fresh = (key_states, value_states) if self.is_empty and key_states.shape[2] > 1 else None
        self.is_empty = False
        self._append(key_states, value_states)
        if self.config._attn_implementation != NAME:
            fresh = None  # its attention expects as many tokens as the mask has
        return self._given(fresh, self.max_cache_len)

    def get_seq_length(self) -> Any:
        return self.store.length if self.is_initialized else 0

    def reset(self) -> None:
        self.store.reset()
        self.is_empty = True
