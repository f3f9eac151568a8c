"""Attention on keys and values in codes on CUDA, by Triton."""

from __future__ import annotations

from torch import Tensor

from .. import features
from ..ops.kv_attention import FLOATS, KVAttention, attend_by_heads, check_call
from ..registry import Problem, register


def _supports(problem: Problem) -> str | None:
    if reason := features.cuda_lacks("triton"):
        return reason
    if problem.dtype not in FLOATS:
        return f"takes fp32, bf16 or fp16 queries, these are {str(problem.dtype).removeprefix('torch.')}"
    return None


@register(
    "kv_attention",
    layout=("plain", "packed"),
    weight=("int8", "uint4", "float8_e4m3fn"),
    activation=(),
    device="cuda",
    priority=20,
    supports=_supports,
)
def triton_kv_attention(call: KVAttention) -> Tensor:
    """See `kv_attention`. The number of tokens in use is read by the kernel, not on the host."""
    from .triton.kv_attention import kv_attention

    check_call(call)
    if not call.query.numel() or not call.length or not call.width:
        return attend_by_heads(call)
    return kv_attention(call)
