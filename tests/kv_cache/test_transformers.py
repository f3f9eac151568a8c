"""Caches of transformers whose layers hold codes: generation of every kind, and the operations of the cache."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kv_cache import KVCacheSpec, quantized_cache, store, use_quantized_attention
from tests.refusals import refuses

hf = pytest.importorskip("transformers")

TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# The class, with Config or ForCausalLM behind it, and what its configuration has beside TEXT.
MODELS = {
    "llama": ("Llama", {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {**SLIDING, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**SLIDING, "head_dim": 24}),
    "gpt_oss": ("GptOss", {**SLIDING, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def build(name, quantized=True):
    torch.manual_seed(0)
    called, options = MODELS[name]
    config = getattr(hf, f"{called}{'Text' * (called == 'Gemma3')}Config")(**TEXT | options)
    model = getattr(hf, f"{called}ForCausalLM")(config).eval().requires_grad_(False)
    return use_quantized_attention(model) if quantized else model


def generate(model, ids, count, **options):
    """With the logits of each token."""
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True, **options}
    return model.generate(ids, max_new_tokens=count, **options)


def logits(model, ids, cache, steps, **more):
    """Of a prompt and as many tokens after it, one at a time."""
    found = [model(ids[:, :-steps], past_key_values=cache, **more).logits]
    for i in range(ids.shape[1] - steps, ids.shape[1]):
        found.append(model(ids[:, i : i + 1], past_key_values=cache, **more).logits)
    return torch.cat(found, 1)


@EVERY_MODEL
def test_logits_are_near_those_without_a_cache(name):
    """And not equal: that would mean that nothing was quantized."""
    ids = torch.randint(0, 64, (2, 24))
    wanted = build(name, quantized=False)(ids).logits
    model = build(name)
    specs = [
        (KVCacheSpec("int8"), 0.05),
        (KVCacheSpec("int4", keys="token", recent=0), 1.0),
        (KVCacheSpec("float8_e4m3fn"), 0.4),
        (KVCacheSpec("int8", value_dtype="int4", recent=0, rotate_keys=True, rotate_values=True), 1.0),
        (KVCacheSpec("int4", block=4, recent=0), 1.0),
        (KVCacheSpec("int3", value_dtype="int2", block=4), 4.0),
    ]
    for spec, most in specs[:4] if name == "mistral" else specs:
        with record_kernels() as ran, warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is dequantized
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # by transformers 5.24
            found = logits(model, ids, quantized_cache(model, spec), 12)
        assert "kv_attention" in ran
        error = (found - wanted)[:, -12:].abs().max() / wanted.std()
        assert 1e-7 < float(error) < most
        assert torch.allclose(found[:, :12], wanted[:, :12], rtol=0, atol=1e-4)


@EVERY_MODEL
def test_floats_and_codes_agree(name):
    """What the attention function reads is what a model without it is given, dequantized."""
    ids = torch.randint(0, 64, (2, 24))
    results = []
    for quantized in (False, True):
        model = build(name, quantized)
        cache = quantized_cache(model, KVCacheSpec("int4", block=4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(logits(model, ids, cache, 12))
    assert torch.allclose(*results, rtol=0, atol=2e-4)


@EVERY_MODEL
@pytest.mark.parametrize("max_length", [None, 40])
def test_generate(name, max_length):
    if name == "mistral" and max_length:
        pytest.skip("static layers with a window stay in floating point")
    model, ids = build(name), torch.randint(1, 64, (2, 9))
    wanted = generate(model, ids, 16)
    found = generate(model, ids, 16, past_key_values=quantized_cache(model, "int8", max_length))
    assert found.sequences.shape == wanted.sequences.shape
    # Up to the first tie that rounding decides, the logits are near.
    for a, b, step in zip(wanted.logits, found.logits, range(16), strict=True):
        same = (wanted.sequences[:, : 9 + step] == found.sequences[:, : 9 + step]).all(1)
        assert torch.allclose(a[same], b[same], rtol=0, atol=0.05 * float(a.std()))
    assert bool((wanted.sequences[:, :12] == found.sequences[:, :12]).all())


def test_beams_bfloat16_and_quantized_weights():
    model, ids = build("llama"), torch.randint(1, 64, (2, 9))
    for spec in (KVCacheSpec("int8"), KVCacheSpec("int8", keys="channel", block=4)):
        options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
        found = generate(model, ids, 10, past_key_values=quantized_cache(model, spec), **options)
        assert found.sequences.shape == (4, 19)
        # The score of each sequence is that of the float model for it.
        scores = build("llama", quantized=False)(found.sequences).logits.log_softmax(-1)[:, 8:-1]
        picked = scores.gather(2, found.sequences[:, 9:, None]).sum((1, 2)) / 10
        assert torch.allclose(picked, found.sequences_scores, rtol=0, atol=0.02)
    ids = torch.randint(0, 64, (2, 16))
    wanted = build("llama", quantized=False)(ids).logits
    model = build("llama").bfloat16()
    with record_kernels() as ran:
        found = logits(model, ids, quantized_cache(model, "int8"), 8)
    assert "kv_attention" in ran
    assert found.dtype is torch.bfloat16
    assert float((found.float() - wanted).abs().max() / wanted.std()) < 0.2
    from qtorch import int8_weight_only, quantize_

    model, ids = build("llama"), torch.randint(1, 64, (2, 12))
    wanted = model(ids).logits
    quantize_(model, int8_weight_only())
    found = logits(model, ids, quantized_cache(model, "int8"), 6)
    assert 1e-6 < float((found - wanted).abs().max() / wanted.std()) < 0.05


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_prompt_lookup_crops(name):
    model, ids = build(name), torch.randint(1, 8, (1, 20))
    channel = KVCacheSpec("int8", keys="channel", block=4, recent=1)
    for spec in (KVCacheSpec("int8"), *([channel] if name != "mistral" else [])):
        wanted, found = (
            generate(model, ids, 20, past_key_values=quantized_cache(model, spec), **more).sequences
            for more in ({}, {"prompt_lookup_num_tokens": 4})
        )
        assert float((wanted == found).float().mean()) > 0.8


@pytest.mark.parametrize("max_length", [None, 32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padded_rows_are_those_alone(name, max_length):
    model = build(name)
    short, long = torch.randint(1, 64, (1, 5)), torch.randint(1, 64, (1, 9))
    padded = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1), long])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    caches = (quantized_cache(model, "int8", max_length) for _ in range(3))
    both = generate(model, padded, 8, attention_mask=mask, past_key_values=next(caches))
    for row, ids in enumerate((short, long)):
        alone = generate(model, ids, 8, past_key_values=next(caches))
        for a, b in zip(alone.logits, both.logits, strict=True):
            assert torch.allclose(a[0], b[row], rtol=0, atol=2e-4 * float(a.std()) + 1e-5)


def test_continued_and_static():
    """A cache with tokens goes on; so does a copy of it."""
    model, ids = build("llama"), torch.randint(1, 64, (1, 12))
    cache = quantized_cache(model, "int8")
    model(ids, past_key_values=cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        more = torch.cat([ids, torch.randint(1, 64, (1, 5))], 1)
        with record_kernels() as ran:
            found = model.generate(more, max_new_tokens=6, **GREEDY, past_key_values=other)
        assert "kv_attention" in ran
        assert found.shape == (1, 23)
        assert (cache.get_seq_length(), other.get_seq_length()) == (12, 22)
    model, ids = build("llama"), torch.randint(1, 64, (2, 12))
    cache = quantized_cache(model, "int4", max_length=30)
    assert cache.is_compileable
    assert cache.get_max_length() == 30
    assert cache.get_seq_length() == 0
    model(ids, past_key_values=cache)
    assert int(cache.get_seq_length()) == 12
    first = [layer.keys[:, :, :12].clone() for layer in cache.layers]
    address = cache.layers[0].store.keys[0].data_ptr()
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    model(ids, past_key_values=cache)
    assert all(torch.equal(layer.keys[:, :, :12], old) for layer, old in zip(cache.layers, first, strict=True))
    assert cache.layers[0].store.keys[0].data_ptr() == address
    refuses("static cache of 30 tokens has 12", lambda: model(torch.randint(1, 64, (2, 19)), past_key_values=cache))


def test_operations_of_the_cache():
    model, ids = build("llama"), torch.randint(1, 64, (2, 12))
    cache = quantized_cache(model, KVCacheSpec("int8", keys="channel", block=4))
    assert cache.get_seq_length() == 0
    assert len(cache) == 2
    assert cache.get_max_length() == -1
    assert cache.batch_size == -1
    assert not cache.is_initialized
    assert not cache.is_compileable
    assert cache.is_croppable
    cache.reorder_cache(torch.tensor([0]))
    model(ids, past_key_values=cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    assert before[0][0].shape == (2, 2, 12, 16)
    assert cache.get_mask_sizes(3, 0) == (15, 0)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.batch_size == 2
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys.flip(0))
        assert torch.equal(layer.values, values.flip(0))
    cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == 9
    refuses("minus the number of tokens", lambda: cache.crop(3))
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert "int8" in repr(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    model(ids, past_key_values=cache)
    assert torch.equal(cache.layers[1].keys, before[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [None, 32])
def test_compile(max_length):
    """A static cache makes one graph of the prompt and one of all tokens; a growing one works."""
    model, ids = build("llama"), torch.randint(1, 64, (2, 16))
    wanted = logits(model, ids, quantized_cache(model, "int8", max_length), 8)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=max_length is not None)
    cache = quantized_cache(model, "int8", max_length)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    with record_kernels() as ran:
        found = logits(compiled, ids, cache, 8)
    assert ran.count("kv_attention") == 16
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    if max_length is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_encoder_decoder():
    """Self-attention is quantized, cross-attention stays in floating point; T5 adds a bias to its scores."""
    sizes = {"vocab_size": 64, "d_model": 64}
    config = hf.T5Config(**sizes, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    t5 = hf.T5ForConditionalGeneration(config)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16}
    lengths = {"max_source_positions": 32, "max_target_positions": 32}
    tokens = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    whisper = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **layers, **widths, **lengths, **tokens))
    padded = {"input_ids": torch.randint(1, 64, (2, 9)), "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4])}
    inputs = padded, {"input_features": torch.randn(2, 16, 64)}
    for (model, ids), length in itertools.product(zip((t5, whisper), inputs, strict=True), (None, 16)):
        model.eval().requires_grad_(False)
        decoder = torch.randint(1, 64, (2, 10))
        wanted = model(**ids, decoder_input_ids=decoder, use_cache=False).logits
        use_quantized_attention(model)
        cache = quantized_cache(model, "int8", max_length=length)
        with record_kernels() as ran:
            parts = [
                model(**ids, decoder_input_ids=part, past_key_values=cache).logits
                for part in (decoder[:, :4], *decoder[:, 4:].split(1, 1))
            ]
        assert ran.count("kv_attention") == 12
        error = (torch.cat(parts, 1) - wanted)[:, 4:].abs().max() / wanted.std()
        assert 1e-7 < float(error) < 0.02
        found = model.generate(**ids, max_new_tokens=8, do_sample=False, past_key_values=quantized_cache(model, "int4"))
        assert found.shape[0] == 2


def test_models_that_compute_with_keys_get_floats(monkeypatch):
    monkeypatch.setattr(store, "_said", set())
    model, ids = build("llama"), torch.randint(1, 64, (1, 12))
    cache = quantized_cache(model, "int8")
    model(ids, past_key_values=cache)
    keys, _ = cache.layers[0].update(*(torch.randn(1, 2, 1, 16) for _ in range(2)))
    assert (keys.shape, keys.dtype, len(keys)) == ((1, 2, 13, 16), torch.float32, 1)
    with pytest.warns(UserWarning, match="computes with the keys or values"):
        moved = keys.transpose(1, 2)
    wanted = cache.layers[0].keys
    assert torch.equal(moved, wanted.transpose(1, 2))
    assert torch.equal(keys[:, :, 3], wanted[:, :, 3])
    assert torch.equal(torch.cat([keys, keys], 2), torch.cat([wanted, wanted], 2))


def test_what_is_refused_and_said_once(monkeypatch):
    refuses("takes a model of transformers", lambda: use_quantized_attention(torch.nn.Linear(2, 2)), TypeError)
    refuses("takes a model of transformers or its config", lambda: quantized_cache(torch.nn.Linear(2, 2)), TypeError)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    pegasus = hf.PegasusXModel(hf.PegasusXConfig(vocab_size=64, d_model=32, **layers))
    refuses("relies on masks that sdpa leaves out", lambda: use_quantized_attention(pegasus))
    sliding = hf.MistralConfig(**TEXT, sliding_window=8)
    for spec, max_length in ((KVCacheSpec(keys="channel"), None), (KVCacheSpec(recent=4), None), (KVCacheSpec(), 9)):
        with pytest.raises(ValueError, match="sliding_attention, none of which can be quantized"):
            quantized_cache(sliding, spec, max_length)
    with pytest.raises(ValueError, match="static cache quantizes each token"):
        quantized_cache(hf.LlamaConfig(**TEXT), KVCacheSpec(keys="channel"), max_length=8)
    mixed = hf.Qwen2Config(**TEXT, **SLIDING, use_sliding_window=True)
    assert len(quantized_cache(mixed, max_length=9).layers) == 2
    with monkeypatch.context() as patch:  # a layer of which this transformers has no cache of fixed size
        patch.delitem(hf.cache_utils.STATIC_LAYER_TYPE_MAPPING, "sliding_attention")
        refuses("has layers full_attention, sliding_attention", lambda: quantized_cache(mixed, max_length=9))
    assert quantized_cache(hf.MistralConfig(**TEXT, sliding_window=None)).get_seq_length() == 0
    monkeypatch.setattr(store, "_said", set())
    model, ids = build("llama", quantized=False), torch.randint(1, 64, (2, 12))
    with pytest.warns(UserWarning, match="use_quantized_attention") as caught:
        logits(model, ids, quantized_cache(model, "int8"), 4)
    assert len([w for w in caught if "qtorch" in str(w.message)]) == 1
