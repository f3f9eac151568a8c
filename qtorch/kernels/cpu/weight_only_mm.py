"""Linear with an integer weight and a floating-point activation, compiled.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

The codes are read as the layout has them, and everything is added up in fp32. Which of the ways of src/ is taken
depends on the number of rows and the machine (`choices.py`).
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from ...primitives.qdtype import qdtype
from ..int8_scaled_mm import INTEGERS
from ..library import note, opaque
from ..packed_weight_mm import packed_weight_mm
from ..registry import Problem, register
from ..rows import from_rows, to_rows
from ..weight_only_mm import weight_only_mm
from . import choices, weight
from .library import TYPES, library, threads

_CALL = struct.Struct(f"={weight.FORMAT}9q")


def _fake(
    x: Tensor,
    codes: Tensor,
    n: int,
    scale: Tensor,
    zero_point: Tensor | None,
    packed: bool,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    return x.new_empty(x.shape[0], n)


@opaque(
    "cpu_weight_only_mm(Tensor x, Tensor codes, SymInt n, Tensor scale, Tensor? zero_point, bool packed, str dtype, "
    "float low, float high, str domain) -> Tensor",
    _fake,
)
def cpu_weight_only_mm(
    x: Tensor,
    codes: Tensor,
    n: int,
    scale: Tensor,
    zero_point: Tensor | None,
    packed: bool,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """The equation above without bias.

    Args:
        x: (M, K) fp32, bf16 or fp16.
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (N, G), G groups of a row, or (1, 1).
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.

    Returns:
        (M, N) in the dtype of x.
    """
    m, k = x.shape
    kind = qdtype(dtype)
    compiled = library()
    fields = weight.fields(codes, scale, zero_point, (n, k), kind, packed, domain, (low + high + 1) / 2)
    way = "torch"
    if compiled is not None and fields is not None:
        key = choices.key_of(x.dtype, packed, scale.shape[1] > 1)
        way = choices.choose(compiled.instruction_set, key, m)
    if compiled is None or fields is None or way == "torch":
        note("cpu_weight_only_mm.torch")
        if packed:
            return packed_weight_mm(x, codes, n, -1, scale, zero_point, dtype, low, high, domain)
        return weight_only_mm(x, codes, scale, zero_point, dtype, low, high, domain)
    note(f"cpu_weight_only_mm.{compiled.instruction_set}.{way}")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(m, n)
    number = TYPES[x.dtype]
    matrices = (x.data_ptr(), number, x.stride(0), m, y.data_ptr(), number, n)
    compiled.weight_only_mm(_CALL.pack(*fields, *matrices, choices.WAYS[way], threads()))
    return y


def _supports(problem: Problem) -> str | None:
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes fp32, bf16 or fp16 activations, got {str(problem.dtype).removeprefix('torch.')}"
    return weight.supports(problem)


def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    spec = scheme.weight
    low, high = spec.code_range
    y = cpu_weight_only_mm(
        to_rows(x),
        quantized.qdata,
        scheme.shape[0],
        quantized.dense_scale(),
        quantized.zero_point,
        scheme.layout.packed_axis is not None,
        spec.dtype.name,
        float(low),
        float(high),
        spec.zero_point_domain.name,
    )
    return from_rows(y, x, bias)


for _layout in ("plain", "packed"):
    register(
        "linear",
        layout=_layout,
        weight=INTEGERS,
        activation=(),
        device="cpu",
        priority=30,
        supports=_supports,
        name=f"cpu_weight_only_mm_{_layout}",
    )(_linear)
