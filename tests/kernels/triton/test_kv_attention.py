"""Attention on codes by Triton, against the reference."""

import itertools

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cache_form import TOKENS, cache_form
from qtorch.kernels.cuda.shared_ops import triton_kv_attention
from qtorch.kernels.ops.kv_attention import KVAttention, attend_portably
from qtorch.kernels.ops.quantize import quantize_keys_and_values

FORMS = [cache_form(dtype, block) for dtype in TOKENS for block in (0, 32)]
# Batch, heads of keys, heads of queries for each, rows, tokens in codes, recent ones, channels of keys and of values.
SHAPES = [(1, 2, 4, 1, 320, 0, 64, 64), (2, 1, 2, 3, 96, 5, 20, 13), (1, 1, 2, 1, 0, 7, 16, 16)]


def problem(form, shape, device, dtype=torch.float32, mask=None, softcap=0.0, sinks=False, causal=False, used=None):
    batch, heads, group, rows, tokens, recent, width, v_width = shape
    new = lambda *size: torch.randn(size, device=device)  # noqa: E731
    keys, values = quantize_keys_and_values(
        new(batch, heads, tokens, width) + 1, new(batch, heads, tokens, v_width), form
    )
    latest = [new(batch, heads, recent, size).to(dtype) for size in (width, v_width)] if recent else []
    masks = {
        None: None,
        "bool": new(batch, 1, rows, tokens + recent) > -0.5,
        "float": new(1, heads * group, 1, tokens + recent + 3),
    }
    return KVAttention(
        new(batch, heads * group, rows, width).to(dtype),
        keys,
        values,
        latest,
        None if used is None else torch.tensor(used, device=device),
        masks[mask],
        new(heads * group) if sinks else None,
        form,
        v_width,
        width**-0.5,
        softcap,
        causal,
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.dtype}-{form.block}")
def test_against_the_reference(form, device):
    masks = itertools.cycle([None, "bool", "float"])
    for shape, more in itertools.product(SHAPES, ({}, {"softcap": 5.0, "sinks": True})):
        mask = next(masks)
        call = problem(form, shape, device, mask=mask, causal=mask is None, **more)
        with record_kernels() as ran:
            got = triton_kv_attention(call)
        assert ran == ["triton.kv_attention"]
        assert torch.allclose(got, attend_portably(call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    """Weights are rounded to the dtype before they are multiplied by codes, as flash attention does."""
    for form in FORMS:
        call = problem(form, (1, 2, 4, 1, 128, 0, 64, 64), device, dtype)
        got, wanted = triton_kv_attention(call), attend_portably(call)
        assert got.dtype == dtype
        largest = float(form.dequantize(call.values, 64, torch.float32, False).abs().max())
        offset = float(call.values[2].abs().max()) if len(call.values) > 2 else 0
        assert float((got - wanted).abs().max()) <= 8 * torch.finfo(dtype).eps * (largest + offset)


def test_the_length_is_read_by_the_kernel(device):
    call = problem(cache_form("int8", 0), (1, 2, 2, 3, 300, 0, 32, 32), device, used=130, causal=True)
    for part in (*call.keys, *call.values):
        part[:, :, 130:] = torch.nan if part.is_floating_point() else 127
    assert torch.allclose(triton_kv_attention(call), attend_portably(call), rtol=0, atol=1e-5)


def test_strided_tensors(device):
    call = problem(cache_form("int4", 0), (2, 2, 3, 2, 70, 0, 24, 24), device, mask="bool")
    keys = [torch.cat([part, part], 2)[:, :, :70] for part in call.keys]
    query = call.query.transpose(1, 2).contiguous().transpose(1, 2)
    strided = call._replace(keys=keys, query=query, mask=call.mask[:, :, :1].expand(-1, -1, 2, -1))
    assert torch.allclose(triton_kv_attention(strided), attend_portably(strided), rtol=0, atol=1e-5)


def test_nan_and_hidden_tokens(device):
    for form in FORMS:
        k, v = torch.randn(1, 2, 64, 16, device=device), torch.randn(1, 2, 64, 16, device=device)
        k[0, 0, 3, 5], v[0, 1, 7, 2] = torch.nan, torch.inf
        mask = torch.ones(1, 1, 3, 64, dtype=torch.bool, device=device)
        mask[..., 1, [3, 7]] = False
        mask[..., 2, :] = False
        query = torch.randn(1, 4, 3, 16, device=device)
        keys, values = quantize_keys_and_values(k, v, form)
        got = triton_kv_attention(KVAttention(query, keys, values, [], None, mask, None, form, 16, 0.25, 0.0, False))
        assert got[:, :, 0].isnan().all()
        assert got[:, :, 1].isfinite().all()
        assert (got[:, :, 2] == 0).all()
