"""Attention on codes, compiled, against the reference: every build that this machine runs."""

import itertools

import pytest
import torch

from qtorch.kernels import custom_ops, record_kernels, registry
from qtorch.kernels.cache_form import TOKENS, cache_form
from qtorch.kernels.ops.kv_attention import KVAttention, attend, float_attention, kv_attention
from qtorch.kernels.ops.quantize import quantize_keys_and_values, quantize_tokens
from qtorch.primitives import compute_error
from tests.kernels import attention_cases
from tests.kernels.attention_cases import FORMS, assert_close, problem
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.refusals import refuses

SHAPES = [
    (1, 2, 4, 1, 96, 0, 128, 128), (2, 3, 1, 1, 64, 5, 64, 64), (1, 2, 7, 3, 1056, 33, 80, 72),
    (2, 1, 3, 2, 32, 1, 20, 13), (1, 1, 8, 1, 0, 7, 16, 16), (1, 1, 2, 1, 32, 0, 1, 3),
]  # fmt: skip


def run(call):
    """Through the operator, so that the registry chooses."""
    form = call.form
    arguments = call.query, list(call.keys), list(call.values), list(call.recent), call.used, call.mask, call.sinks
    return kv_attention(
        *arguments, form.dtype, form.value_dtype, form.block, call.width, call.scaling, call.softcap, call.causal
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.dtype}-{form.value_dtype}-{form.block}")
def test_against_the_reference(build, form):
    masks = itertools.cycle([None, "bool", "float", "-inf", None])
    for shape, more in itertools.product(SHAPES, ({}, {"softcap": 5.0, "sinks": True})):
        mask = next(masks)
        call = problem(form, shape, mask=mask, causal=mask is None, **more)
        with record_kernels() as ran:
            got = run(call)
        assert ran == ["kv_attention", "kv_attention:cpu_kv_attention", f"kv_attention.{build}"]
        assert_close(call, got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_queries_and_scales(build, dtype):
    for name, block in itertools.product(TOKENS, (0, 32)):
        call = problem(cache_form(name, name, block, dtype), (1, 2, 4, 1, 224, 7, 64, 64), dtype)
        with record_kernels() as ran:
            got = run(call)
        assert ran[-1] == f"kv_attention.{build}"
        assert_close(call, got)


def test_hidden_strided_and_blocks_that_no_query_sees(build):
    call = attention_cases.with_used_tokens()
    assert_close(call, run(call))
    call = attention_cases.strided()
    with record_kernels() as ran:
        got = run(call)
    assert ran[-1] == f"kv_attention.{build}"
    assert_close(call, got)
    attention_cases.check_nan_and_hidden_tokens(run)
    call = problem(cache_form("int8", "int8", 0), (1, 2, 4, 64, 128, 0, 32, 32), causal=True)
    with record_kernels() as ran:
        got = run(call)
    assert ran[-1] == "kv_attention.dequantized"
    assert_close(call, got)
    query, keys = torch.randn(1, 40, 4, 6).transpose(1, 2)[..., :1, :], torch.randn(1, 4, 6, 50).mT
    more = None, None, 0.4, 0.0, False
    wanted = float_attention(query.contiguous(), keys.contiguous(), keys.contiguous(), *more)
    assert torch.equal(float_attention(query, keys, keys, *more), wanted)
    torch.library.opcheck(torch.ops.qtorch.float_attention.default, (query, keys, keys, *more))
    query, keys = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 256, 32)
    mask = (torch.arange(256) < 100).view(1, 1, 1, -1)
    wanted = float_attention(query, keys, keys, mask, None, 0.2, 0.0, False)
    keys[:, :, 128:] = torch.nan
    assert torch.equal(float_attention(query, keys, keys, mask, None, 0.2, 0.0, False), wanted)


def test_without_the_library(torch_kernels, monkeypatch):
    monkeypatch.setattr(registry, "_reported", set())  # what has been warned of before
    call = problem(cache_form("int8", "int8", 0), (1, 2, 4, 1, 64, 0, 32, 32))
    with pytest.warns(UserWarning, match="reference"), record_kernels() as ran:
        got = run(call)
    assert ran == ["kv_attention", "kv_attention:reference"]
    assert_close(call, got)


def test_error_is_that_of_the_codes(build):
    k, v, query = torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64), torch.randn(1, 4, 1, 64)
    exact = torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)
    for dtype, low, high in (
        ("int8", 30, 60), ("int4", 8, 30), ("int3", 3, 20), ("int2", -5, 12), ("float8_e4m3fn", 18, 45),
    ):  # fmt: skip
        keys, values = quantize_keys_and_values(k, v, form := cache_form(dtype, dtype, 0))
        got = run(KVAttention(query, keys, values, [], None, None, None, form, 64, 0.125, 0.0, False))
        assert low < compute_error(exact, got) < high


@pytest.mark.parametrize("dtype", TOKENS)
def test_tokens_are_quantized_to_the_bits_of_the_primitives(build, dtype):
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for scale_dtype, x_dtype, width in zip(
        floats * 3, [each for each in floats for _ in floats], itertools.cycle((128, 20, 13, 1))
    ):
        form = cache_form(dtype, dtype, 0, scale_dtype)
        for factor, shift in ((1, 0), (1e-3, 1), (1e3, 0), (1e-40, 0), (0, 0)):
            x = (torch.randn(2, 5, 3, width) * factor + shift).to(x_dtype).transpose(1, 2)
            x[0, 1, 2, 0], x[1, 0, 3, -1] = torch.nan, torch.inf
            wanted = custom_ops.portable(quantize_tokens)(x, form)
            with record_kernels() as ran:
                got = quantize_tokens(x, form)
            assert ran == ["cpu_quantize_tokens", f"cpu_quantize_tokens.{build}"]
            kept = wanted[1].isfinite().squeeze(-1)
            assert torch.equal(kept, got[1].isfinite().squeeze(-1))
            assert int((~kept).sum()) == 2
            for a, b in zip(wanted, got, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a[kept], b[kept])  # a zero point of 0 may be -0


@NEEDS_LIBRARY
def test_wrong_tensors_are_refused():
    call = problem(cache_form("int8", "int8", 0), (1, 2, 2, 1, 8, 0, 16, 16))
    codes, scale = call.keys
    for change, message in (
        ({"keys": [codes[:, :, :7], scale]}, "codes of the keys must be"),
        ({"keys": [codes, scale.double()]}, "scale of the keys must be"),
        ({"keys": [codes]}, "keys are codes, scale"), ({"query": call.query[:, :3]}, "do not fit"),
        ({"mask": torch.ones(1, 1, 1, 7, dtype=torch.bool)}, "a mask has"),
        ({"mask": torch.ones(8, dtype=torch.bool)}, "a mask has"), ({"sinks": torch.ones(3)}, "sinks have shape"),
        ({"used": torch.ones(1, dtype=torch.int64)}, "a length is one int64"),
    ):  # fmt: skip
        refuses(message, lambda change=change: run(call._replace(**change)))


SQNR = {torch.float32: (120, 160), torch.bfloat16: (47, 65), torch.float16: (65, 85)}
"""Least and most of attention on floats, whose results are rounded to this dtype."""


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("dtype", SQNR)
def test_on_floats(build, dtype, mask):
    least, most = SQNR[dtype]
    for batch, heads, group, rows, tokens, width, of_values in [(2, 2, 4, 1, 300, 64, 64), (1, 3, 1, 2, 65, 20, 13)]:
        query = torch.randn(batch, heads * group, rows, width).to(dtype)
        keys, values = torch.randn(batch, heads, tokens, width), torch.randn(batch, heads, tokens, of_values)
        keys, values = keys.to(dtype), values.to(dtype)
        seen = torch.rand(batch, 1, rows, tokens) < 0.7
        seen[..., 130:] &= tokens < 100  # whole blocks that no query sees
        given = {None: None, "bool": seen, "float": torch.randn(batch, 1, rows, tokens).to(dtype)}[mask]
        for softcap, sinks in [(0.0, None), (5.0, torch.randn(heads * group))]:
            more = given, sinks, width**-0.5, softcap, mask is None
            with record_kernels() as ran:
                got = float_attention(query, keys, values, *more)
            assert ran == ["float_attention", f"float_attention.{build}"]
            in_double = None if given is None or given.dtype is torch.bool else given.double()
            expected = attend(
                *(x.double() for x in (query, keys, values)), in_double if mask == "float" else given, *more[1:]
            )
            assert got.dtype is dtype
            assert least < compute_error(expected, got.double()) < most


@pytest.mark.parametrize(("change", "message"), [
    ({"keys": torch.zeros(1, 2, 9, 16)}, "have one dtype in floating point and one device"),
    ({"values": torch.zeros(1, 2, 8, 16).half()}, "have one dtype in floating point and one device"),
    ({"query": torch.zeros(1, 3, 1, 16)}, "do not fit 1 x 2 heads of keys"),
    ({"mask": torch.zeros(1, 1, 1, 7)}, "at least 8 tokens"),
    ({"sinks": torch.zeros(3)}, "sinks have shape"),
])  # fmt: skip
def test_floats_that_do_not_fit(change, message):
    given = {"query": torch.zeros(1, 4, 1, 16), "keys": torch.zeros(1, 2, 8, 16), "values": torch.zeros(1, 2, 8, 16)}
    given = {**given, "mask": None, "sinks": None, **change}
    refuses(message, lambda: float_attention(*given.values(), 1.0, 0.0, False))


def test_few_causal_rows_and_capped_scores():
    """The last row sees all tokens, the one before it all but the last; in torch operators."""
    query, keys = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    for cap in (0.0, 0.5):
        scores = (query @ keys.mT) * 0.3
        scores = cap * (scores / cap).tanh() if cap else scores
        wanted = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ keys
        torch.testing.assert_close(attend(query, keys, keys, None, None, 0.3, cap, True), wanted)
        for mask in (seen[:1, :1], torch.zeros(1, 5)):  # hides nothing
            torch.testing.assert_close(attend(query, keys, keys, mask[None, None], None, 0.3, cap, True), wanted)
    assert torch.equal(
        attend(query, keys[:, :1, :0], keys[:, :1, :0], seen[None, None, :, :0], None, 1, 0, False), 0 * query
    )


@pytest.mark.parametrize("heads", [1, 8])
def test_a_mask_beside_the_order_of_tokens(heads):
    """Of 64 queries, and of 512, which torch multiplies."""
    query, keys, mask = torch.randn(1, heads, 64, 16), torch.randn(1, 1, 64, 16), torch.rand(1, 1, 64, 64) > 0.2
    both = float_attention(query, keys, keys, mask.tril(), None, 0.25, 0.0, False)
    torch.testing.assert_close(float_attention(query, keys, keys, mask, None, 0.25, 0.0, True), both)
