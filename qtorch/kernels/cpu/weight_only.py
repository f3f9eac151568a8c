"""Linear with an integer weight and a floating-point activation, compiled.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

The kernels read the codes as the layout stores them and accumulate in fp32. Which way of src/ runs depends on the
number of rows, the size of the weight and the machine (`ways.py`). Where F.linear is faster than all of them, it runs
on the dequantized weight: a slice at a time, or a copy that `float_copies` keeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..custom_ops import note, opaque, recording
from ..linear.int8_scaled import INTEGERS
from ..linear.packed_weight_only import packed_weight_mm
from ..ops.weight_only_mm import slice_length, weight_only_mm
from ..registry import Problem, register
from ..rows import from_rows, to_rows
from . import ways, weight
from .compiled_library import TYPES, Library, threads
from .compiled_linear import CompiledLinear, where_finite
from .float_copies import float_copy, wanted
from .memory import address, empty
from .structs import NO_INPUT, Call, Output, Weight, pack

SLICE_BYTES = 8 << 20
"""Bytes of a weight that are dequantized at a time: enough for a fast product, and few enough to stay in cache."""


class _WeightOnlyLinear(CompiledLinear):
    __slots__ = ()
    name, call = "weight_only_mm", Call

    def find_way(self, rows: int) -> str:
        """Also "copy": F.linear on a dequantized copy, if copies are allowed."""
        return "copy" if wanted() and self.choose(rows, " copied") == "float" else self.choose(rows)


@opaque(lambda x, codes, n, *_: x.new_empty(x.shape[0], n))
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
    bias: Tensor | None,
) -> Tensor:
    """The equation above.

    Args:
        x: (M, K) fp32, bf16 or fp16.
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (N, G), G groups of a row, or (1, 1).
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.
        bias: (N) in the dtype of x, or None.

    Returns:
        (M, N) in the dtype of x.
    """
    m, k = x.shape
    weight.check_bias(bias, x.dtype, n)
    middle = (low + high + 1) / 2
    layer = _WeightOnlyLinear.of(
        codes, scale, zero_point, n, k, dtype, packed, domain, middle, x.dtype, x.dtype, x.dtype, ()
    )
    compiled, way = layer.compiled, layer.way(m)
    if compiled is not None and way == "copy":
        made = Dequantized(compiled, layer.fields, n, k, x.dtype)
        copy = float_copy(codes, scale, zero_point, x.dtype, made.rows, n * k * x.element_size())
        if copy is not None:
            note("cpu_weight_only_mm.float_copy")
            return _add(functional.linear(x, copy), bias)
        way = layer.choose(m)
    if compiled is None or way == "torch":
        note("cpu_weight_only_mm.torch")
        if packed:
            y = packed_weight_mm(x, codes, n, -1, scale, zero_point, dtype, low, high, domain)
        else:
            y = weight_only_mm(x, codes, scale, zero_point, dtype, low, high, domain)
        return _add(y, bias)
    if recording():
        note(f"cpu_weight_only_mm.{compiled.instruction_set}.{way}")
    if way == "float":
        return _multiply_slices(x, Dequantized(compiled, layer.fields, n, k, x.dtype), bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    y, finite = layer.run(x, x.stride(0), m, (m, n), bias, way, ())
    if finite:
        return y
    made = Dequantized(compiled, layer.fields, n, k, x.dtype)
    return where_finite(y, x, lambda: _multiply_slices(x, made, bias))


class Dequantized(NamedTuple):
    """A weight (n, k), described by `fields`, as floating-point numbers."""

    library: Library
    fields: Weight | None
    n: int
    k: int
    dtype: torch.dtype

    def rows(self, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        """Rows `start` to `stop`, by default all, written into `out` if given."""
        stop = self.n if stop is None else stop
        out = empty((stop - start, self.k), self.dtype) if out is None else out
        output = Output(address(out), TYPES[self.dtype], self.k, bias=0)
        assert self.fields is not None
        call = Call(x=NO_INPUT, y=output, way=0, threads=threads())
        self.library.dequantize(pack(weight.part(self.fields, start, stop)) + pack(call))
        return out


def _add(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias after y was rounded, as compiled kernels and layers in training add it; torch's `linear` rounds once."""
    return y if bias is None else y.add_(bias)


def _multiply_slices(x: Tensor, made: Dequantized, bias: Tensor | None) -> Tensor:
    n, k = made.n, made.k
    step = slice_length(x, k, limit=SLICE_BYTES)
    if n <= step:
        return _add(functional.linear(x, made.rows()), bias)
    y, memory = x.new_empty(x.shape[0], n), x.new_empty(step, k)
    for start in range(0, n, step):
        stop = min(start + step, n)
        torch.mm(x, made.rows(start, stop, memory[: stop - start]).t(), out=y[:, start:stop])
    return _add(y, bias)


def supports(problem: Problem) -> str | None:
    """Why the kernel does not take the problem, or None."""
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes fp32, bf16 or fp16 activations, got {str(problem.dtype).removeprefix('torch.')}"
    return weight.supports(problem)


@register(
    "linear",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=(),
    device="cpu",
    priority=30,
    supports=supports,
    checks_memory=True,
    note="for many rows F.linear on the dequantized weight, where that is faster: made on each call, or kept "
    "within qtorch.config.float_copy_bytes",
    advice=ways.advice,
    name="cpu_weight_only_mm",
)
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    n = scheme.shape[0]
    added, bias = weight.split_bias(bias, x, n)
    form = weight.form(scheme)
    scale, zero_point = quantized.dense_scale(), quantized.dense_zero_point()
    y = cpu_weight_only_mm(to_rows(x), quantized.qdata, n, scale, zero_point, *form, added)
    if not torch.compiler.is_compiling():
        _WeightOnlyLinear.prepare(quantized)
    return from_rows(y, x, bias)
