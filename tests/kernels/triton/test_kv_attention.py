"""Attention on codes by Triton, against the reference."""

import itertools

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.shared_ops import triton_kv_attention
from qtorch.kernels.ops.kv_attention import attend_portably
from tests.fast_part import matrix_but
from tests.kernels import attention_cases
from tests.kernels.attention_cases import FORMS, assert_close, problem

SHAPES = [(1, 2, 4, 1, 320, 0, 64, 64), (2, 1, 2, 3, 96, 5, 20, 13), (1, 1, 2, 1, 0, 7, 16, 16)]
every_form = pytest.mark.parametrize(
    "form", matrix_but(FORMS[::3], FORMS), ids=[f"{form.dtype}-{form.value_dtype}-{form.block}" for form in FORMS]
)


@every_form
def test_against_the_reference(form, device):
    masks = itertools.cycle([None, "bool", "float"])
    for shape, more in itertools.product(SHAPES, ({}, {"softcap": 5.0, "sinks": True})):
        mask = next(masks)
        call = problem(form, shape, mask=mask, device=device, causal=mask is None, **more)
        with record_kernels() as ran:
            got = triton_kv_attention(call)
        assert ran == ["triton.kv_attention"]
        assert_close(call, got)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, form, device):
    """Weights are rounded to the dtype before they are multiplied by codes, as flash attention does."""
    call = problem(form, (1, 2, 4, 1, 128, 0, 64, 64), dtype, device=device)
    got, wanted = triton_kv_attention(call), attend_portably(call)
    assert got.dtype == dtype
    largest = float(form.dequantize(call.values, 64, torch.float32, False).abs().max())
    offset = float(call.values[2].abs().max()) if len(call.values) > 2 else 0
    assert float((got - wanted).abs().max()) <= 8 * torch.finfo(dtype).eps * (largest + offset)


@pytest.mark.parametrize("make", [attention_cases.with_used_tokens, attention_cases.strided])
def test_the_length_and_the_strides_are_read(make, device):
    call = make(device)
    assert_close(call, triton_kv_attention(call))


def test_nan_and_hidden_tokens(device):
    attention_cases.check_nan_and_hidden_tokens(triton_kv_attention, device)
