"""Growing and static stores on plain tensors: codes that never change, operations on the batch, errors."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch

import qtorch
from qtorch.kernels import cache_form, record_kernels
from qtorch.kernels.ops.quantize import quantize_keys_and_values, rotate_heads
from qtorch.kv_cache import GrowingKV, KVCacheSpec, StaticKV, explain_attention
from qtorch.primitives.jsonable import from_json, to_json
from tests.refusals import refuses

SPECS = [
    *(KVCacheSpec(dtype, keys="token", recent=0, rotate_keys=False) for dtype in cache_form.TOKENS),
    KVCacheSpec("int8", recent=5),
    *(KVCacheSpec(dtype, keys="channel", block=4) for dtype in cache_form.TOKENS),
    KVCacheSpec("int4", keys="channel", block=8, recent=3, scale_dtype=torch.float16),
    KVCacheSpec("int8", value_dtype="int4", recent=0),
    KVCacheSpec("int4", value_dtype="int2", block=4),
    KVCacheSpec("int4", keys="token", recent=0, rotate_values=True),
    KVCacheSpec("int3", keys="channel", block=8, rotate_keys=True, rotate_values=True),
]
SPECS = [spec.settled() for spec in SPECS]
NAMES = [f"{s.dtype}-{s.value_dtype}-{s.keys}-{s.kept}" + "-turned" * (s.rotate_keys or s.rotate_values) for s in SPECS]
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS, ids=NAMES)


def tokens(count, width=20, batch=2, heads=3):
    return torch.randn(batch, heads, count, width), torch.randn(batch, heads, count, width - 3)


def filled(spec, *counts):
    """A store to which as many tokens were appended at a time, and all tokens."""
    store, parts = GrowingKV(spec), [tokens(count) for count in counts]
    for keys, values in parts:
        store.append(keys, values)
    return store, *(torch.cat(each, 2) for each in zip(*parts))


def rotated(spec, keys, values):
    return [rotate_heads(x) if on else x for x, on in zip((keys, values), (spec.rotate_keys, spec.rotate_values))]


def error_of(spec):
    """More than the error of normal numbers: half a step of 8 standard deviations; sums of such if rotated."""
    steps = 2 ** min(4, *(cache_form.TOKENS[name].dtype.bits for name in (spec.dtype, spec.value_dtype))) - 1
    return (2 if spec.rotate_keys or spec.rotate_values else 1) * 4 / steps


def codes(store):
    keys, values, _, _ = store.parts()
    return [part.clone() for part in (*keys, *values)]


@EVERY_SPEC
def test_codes_are_those_of_the_primitives_and_stay(spec):
    store, keys, values = filled(spec, 7, 1, 1, 30, 1)
    in_codes = (40 - spec.kept) // spec.step * spec.step
    assert (store.length, store.tokens) == (40, in_codes)
    wanted = quantize_keys_and_values(*rotated(spec, keys[:, :, :in_codes], values[:, :, :in_codes]), spec.form)
    for part, expected in zip(codes(store), (*wanted[0], *wanted[1]), strict=True):
        assert torch.equal(part, expected)
    for found, exact in zip(store.dequantize(), (keys, values), strict=True):
        assert torch.allclose(found[:, :, in_codes:], exact[:, :, in_codes:], rtol=0, atol=1e-6 * any(store.rotated))
        assert 0 < float((found - exact).abs().max()) < error_of(spec)
    store, _, _ = filled(spec, 40)
    for _ in range(30):
        before = codes(store)
        store.append(*tokens(3))
        for old, new in zip(before, codes(store), strict=True):
            assert torch.equal(old, new[:, :, : old.shape[2]])


def test_memory_doubles_and_is_given_back():
    store, addresses = GrowingKV(KVCacheSpec()), []
    for _ in range(1000):
        store.append(*tokens(1, batch=1, heads=1))
        addresses.append(store.keys[0].memory.data_ptr())
    assert len(set(addresses)) <= 5  # 64, 128, ... 1024
    assert store.keys[0].memory.shape[2] == 1024
    assert (store.nbytes, store.reserved_bytes) == (1000 * (20 + 17 + 2 * 4), 1024 * (20 + 17 + 2 * 4))
    store, keys = GrowingKV(KVCacheSpec()), []
    for _ in range(300):
        k, v = tokens(1, batch=1, heads=1)
        store.drop(max(0, store.length - 40))
        store.append(k, v)
        keys.append(k)
        exact = torch.cat(keys[-41:], 2)
        assert torch.allclose(store.dequantize()[0], exact, rtol=0, atol=0.02)
    assert (store.length, store.keys[0].memory.shape[2]) == (41, 128)
    query = torch.randn(1, 1, 1, 20)
    alone = GrowingKV(KVCacheSpec())
    alone.append(torch.cat(keys[-7:], 2), store.dequantize()[1][:, :, -7:])
    assert torch.allclose(store.attend(query, last=7), alone.attend(query), rtol=0, atol=1e-6)
    refuses("removes up to 41 tokens", lambda: store.drop(42))
    refuses("each with scales of its own", lambda: filled(KVCacheSpec(recent=2), 20)[0].drop(1))


def test_bytes_half_precision_and_reset():
    """Of keys and values with 128 channels: a scale of 4 bytes for 128 codes of their size, with zero points."""
    for spec, each in (
        (KVCacheSpec("int8"), 2 * 132), (KVCacheSpec("int4"), 2 * 72),
        (KVCacheSpec("int4", scale_dtype=torch.float16), 2 * 68), (KVCacheSpec("float8_e4m3fn"), 2 * 132),
        (KVCacheSpec("int3"), 2 * 56), (KVCacheSpec("int4", value_dtype="int2"), 72 + 40),
        (KVCacheSpec("int8", value_dtype="int4"), 132 + 72),
    ):  # fmt: skip
        store = GrowingKV(replace(spec, keys="token", recent=0))
        store.append(torch.randn(1, 2, 50, 128), torch.randn(1, 2, 50, 128))
        assert store.nbytes == 2 * 50 * each
    for dtype in (torch.bfloat16, torch.float16):
        for spec in SPECS:
            store = GrowingKV(spec)
            store.append(*(x.to(dtype) for x in tokens(20)))
            keys, values = store.dequantize()
            assert keys.dtype == values.dtype == dtype
            query = torch.randn(2, 3, 1, 20, dtype=dtype)
            wanted = torch.nn.functional.scaled_dot_product_attention(
                query.float(), *(x.float() for x in store.dequantize(torch.float32))
            )
            assert torch.allclose(store.attend(query).float(), wanted, rtol=0, atol=2 * torch.finfo(dtype).eps * 4)
    store, _, _ = filled(SPECS[0], 20)
    store.reset()
    assert store.length == 0
    refuses("no tokens yet", lambda: store.attend(torch.randn(2, 3, 1, 20)))
    store.append(*tokens(4, width=32))
    assert store.shape == (2, 3, 4)
    store, _, _ = filled(SPECS[0], 20)
    query = torch.randn(2, 3, 1, 20, requires_grad=True)
    refuses("has no gradient", lambda: store.attend(query).sum().backward(), RuntimeError)
    with torch.no_grad():
        assert not store.attend(query).requires_grad


def test_rotations_and_errors():
    """Products stay, and a large channel no longer costs the others their bits."""
    for width in (1, 20, 80, 96, 128):
        x, y = torch.randn(2, 3, 5, width, dtype=torch.float32).unbind(0)
        assert torch.allclose(rotate_heads(rotate_heads(x)), x, rtol=0, atol=2e-6)
        assert torch.allclose((rotate_heads(x) * rotate_heads(y)).sum(-1), (x * y).sum(-1), rtol=0, atol=1e-4)
    keys, values = torch.randn(1, 1, 200, 128), torch.randn(1, 1, 200, 128)
    keys[..., 7] *= 30
    query = torch.randn(1, 1, 1, 128)
    query[..., 7] /= 30
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    error = {}
    for on in (False, True):
        store = GrowingKV(KVCacheSpec("int4", keys="token", recent=0, value_dtype="int8", rotate_keys=on))
        store.append(keys, values)
        error[on] = float((store.attend(query) - exact).norm() / exact.norm())
    assert 1e-4 < error[True] < error[False] / 2
    store, _, _ = filled(SPECS[0], 20)
    for k, v in ((*tokens(1, heads=2),), tokens(1, width=24), (tokens(1)[0].double(), tokens(1)[1].double())):
        with pytest.raises(ValueError, match=r"the cache holds \(2, 3, tokens, \(20, 17\)\)"):
            store.append(k, v)
    assert store.length == 20
    refuses("the cache has 20 tokens, got 21", lambda: store.crop(21))
    for wrong, message in (
        ({"dtype": "int5"}, "dtype is one of int8, int4, int3, int2, float8_e4m3fn"),
        ({"value_dtype": "int5"}, "value_dtype is one of"), ({"keys": "head"}, '"token" or "channel"'),
        ({"block": 0}, "block is positive"), ({"recent": -1}, "recent not negative"),
        ({"scale_dtype": torch.int8}, "scale_dtype is fp32, bf16 or fp16"),
    ):  # fmt: skip
        refuses(message, lambda wrong=wrong: KVCacheSpec(**wrong))
    for spec in (KVCacheSpec(keys="channel"), KVCacheSpec(recent=1)):
        refuses("a static cache quantizes each token when it comes", lambda spec=spec: StaticKV(spec, 10))
    for wrong in (0, 8.5):
        refuses("max_length is a positive integer", lambda wrong=wrong: StaticKV("int8", wrong))
    part = torch.randn(2, 3, 32)
    refuses("takes a KVCacheSpec, or its dtype", lambda: GrowingKV(qtorch.int8_weight_only()), TypeError)
    refuses(r"append takes tensors \(batch, heads, tokens", lambda: GrowingKV("int8").append(part, part))
    refuses("attend takes tensors, got NoneType", lambda: GrowingKV("int8").attend(None), TypeError)


@pytest.mark.parametrize("dtype", cache_form.TOKENS)
def test_static_stores_and_what_is_left_open(dtype):
    """Few bits: keys by channel and recent tokens where the store grows, rotated keys where each token comes alone."""
    few, spec = cache_form.TOKENS[dtype].dtype.bits <= 4, KVCacheSpec(dtype, block=16)
    growing, static = GrowingKV(spec).spec, StaticKV(spec, 8).spec
    assert (growing.keys, growing.kept, growing.rotate_keys) == (("channel", 16, False) if few else ("token", 0, False))
    assert (static.keys, static.kept, static.rotate_keys) == ("token", 0, few)
    assert spec.settled().settled() == spec.settled()
    assert KVCacheSpec(value_dtype=dtype).settled().kept == (32 if few else 0)
    spec = KVCacheSpec(dtype)
    growing, static = GrowingKV(spec.settled(growing=False)), StaticKV(spec, 40)
    query = torch.randn(2, 6, 1, 20)
    for _ in range(2):
        for count in (7, 1, 1, 20):
            k, v = tokens(count)
            growing.append(k, v)
            static.append(k, v)
            assert torch.equal(growing.attend(query), static.attend(query))
        address = static.keys[0].data_ptr()
        refuses("a static cache of 40 tokens has 29, got 12 more", lambda: static.append(*tokens(12)))
        static.reset()
        growing.reset()
        assert int(static.length) == 0
        assert static.keys[0].data_ptr() == address


@EVERY_SPEC
def test_attention_is_that_of_the_dequantized_tokens(spec):
    store, _, _ = filled(spec, 33, 1, 1)
    keys, values = store.dequantize()
    for heads, rows in ((3, 1), (12, 1), (6, 4), (9, 30)):
        query = torch.randn(2, heads, rows, 20)
        with record_kernels() as ran:
            found = store.attend(query, causal=True)
        mask = torch.ones(rows, 35, dtype=torch.bool).tril(35 - rows)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        assert ran[spec.rotate_keys] == "kv_attention"
        assert torch.allclose(found, wanted, rtol=0, atol=3e-5)


@EVERY_SPEC
def test_operations_on_the_batch_and_copies(spec):
    for change, expected in (
        (lambda store: store.reorder(torch.tensor([1, 1, 0])), lambda x: x[[1, 1, 0]]),
        (lambda store: store.repeat_interleave(2), lambda x: x.repeat_interleave(2, 0)),
        (lambda store: store.to("cpu"), lambda x: x),
    ):
        store, _, _ = filled(spec, 21, 1)
        wanted = [expected(x) for x in store.dequantize()]
        change(store)
        assert all(torch.equal(a, b) for a, b in zip(store.dequantize(), wanted, strict=True))
        store.append(*tokens(2, batch=wanted[0].shape[0]))
        assert (store.length, store.shape) == (24, (wanted[0].shape[0], 3, 24))
    store, _, _ = filled(spec, 20, 3)
    for copied in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        before = store.dequantize()
        assert all(torch.equal(a, b) for a, b in zip(copied.dequantize(), before, strict=True))
        copied.append(*tokens(4))
        assert copied.length == 27
        assert store.length == 23
        assert all(torch.equal(a, b) for a, b in zip(store.dequantize(), before, strict=True))


@EVERY_SPEC
@pytest.mark.parametrize("length", [0, 1, 17, 38, 40])
def test_crop(spec, length):
    store, _, _ = filled(spec, 33, 7)
    before, kept = store.dequantize(), codes(store)
    store.crop(length)
    assert store.length == length
    for a, b in zip(store.dequantize(), before, strict=True):
        assert torch.equal(a, b[:, :, :length])
    for old, new in zip(kept, codes(store), strict=True):
        assert torch.equal(old[:, :, : new.shape[2]], new)
    store.append(*tokens(9))
    for a, b in zip(store.dequantize(), before, strict=True):
        # What is left of a block that was cut is rounded a second time, and recent tokens are rounded by and by.
        close = error_of(spec) if spec.kept else 0
        assert float((a[:, :, :length] - b[:, :, :length]).abs().max() if length else 0) <= close


@EVERY_SPEC
def test_nan_stays_in_its_token_and_head(spec):
    store = GrowingKV(spec)
    keys, values = tokens(24)
    keys[0, 1, 5, 2], values[1, 2, 9, 4] = torch.nan, torch.inf
    store.append(keys, values)
    store.append(*tokens(1))
    keys, values = store.dequantize()
    hit = keys.isnan().any(-1) | values.isnan().any(-1)
    wanted = torch.zeros(2, 3, 25, dtype=torch.bool)
    wanted[0, 1, 5] = wanted[1, 2, 9] = True
    assert torch.equal(hit, wanted)
    result = store.attend(torch.randn(2, 3, 1, 20))
    rows = torch.zeros(2, 3, dtype=torch.bool)
    rows[0, 1] = rows[1, 2] = True
    assert torch.equal(result.isnan().all(-1).squeeze(-1), rows)
    assert result[~rows].isfinite().all()


def test_spec_and_what_is_said_once(torch_kernels):
    spec = KVCacheSpec("int4", keys="channel", scale_dtype=torch.float16)
    assert from_json(to_json(spec)) == spec
    assert KVCacheSpec(torch.float8_e4m3fn).dtype == "float8_e4m3fn"
    assert KVCacheSpec(keys="channel", block=16).settled().kept == 16
    assert len({KVCacheSpec(), KVCacheSpec("int8"), KVCacheSpec("int4")}) == 2
    explanation = explain_attention("int4", head_dim=64)
    assert explanation.kernel in ("cpu_kv_attention", "reference")
    assert "uint4" in str(explanation)
    assert dict(explain_attention(device="cuda").rejected)["cpu_kv_attention"] == "runs on cpu, the input is on cuda"
    store = GrowingKV(KVCacheSpec("int8"))
    store.append(*tokens(11, width=44))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            store.attend(torch.randn(2, 3, 1, 44))
    assert len([w for w in caught if "kv_attention" in str(w.message)]) <= 1
