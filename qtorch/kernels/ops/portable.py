"""Dequantization of weights and quantization of activations in the portable layout, by operators of torch alone.

Where torch has an operator for it (``torch.ops.quantized_decomposed``), that one runs: ExecuTorch and exporters know
weights by them. They compute (codes - zero_point) * scale in fp32, as the primitives do, so the bits are the same.
Everything else runs the primitives.
"""

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from ...primitives import QuantSpec, Scheme, ZeroPointDomain, dequantize_affine, qdtype
from ...primitives.granularity import Block, BlockView, PerRow
from ...primitives.layouts.portable import is_per_row
from ..custom_ops import portable
from . import quantize

NOTE = "operators of torch alone, for export: it dequantizes the weight on each call"


def decomposed() -> Any:
    """``torch.ops.quantized_decomposed``, defined by a module of torch that takes 30 ms to import."""
    if not hasattr(torch.ops.quantized_decomposed, "dequantize_per_channel_group"):
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


def dequantized_weight(weight: Any, dtype: torch.dtype) -> Tensor:
    """The reals of a weight in the portable layout, of codes or look-up tables, computed in fp32 and given in `dtype`:
    a matrix, or in the shape of a convolution if its codes have that."""
    scheme: Scheme = weight.scheme
    spec, shape = scheme.weight, scheme.codes_shape
    if not isinstance(spec, QuantSpec):
        return cast(Tensor, spec.dequantize(*weight.plain(), dtype))
    if not _has_operator(scheme):
        codes, scale, zero_point = weight.plain()
        return dequantize_portably(spec, spec.block_size(shape), codes, scale, zero_point, dtype)
    low, high = map(int, spec.code_range)
    codes, storage = weight.qdata, spec.dtype.storage  # plain() would reshape scales
    # Scales of groups have the dtype of the model.
    scale = weight.scale if weight.scale.dtype == torch.float32 else weight.scale.float()
    if is_per_row(scheme):
        values = decomposed().dequantize_per_channel(codes, scale, weight.zero_point, 0, low, high, storage)
    else:
        about = (low, high, storage, spec.block_size(shape)[1], torch.float32)
        values = decomposed().dequantize_per_channel_group(codes, scale, weight.zero_point, *about)
    return values if dtype == torch.float32 else values.to(dtype)


def dequantize_portably(
    spec: QuantSpec, block: Block, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`dequantize_affine` of codes in blocks of `block`. The codes of small floating-point formats are indices of a
    table of their values, since shifts of unsigned codes are not portable."""
    kind = spec.dtype
    low, high = spec.code_range
    if kind.format is None:
        return dequantize_affine(codes, block, scale, zero_point, kind, low, high, spec.zero_point_domain, dtype)
    magnitudes = kind.format.magnitudes
    table = torch.tensor([*magnitudes, *(-value for value in magnitudes)], device=codes.device, dtype=torch.float32)
    view = BlockView(codes.shape, block)
    real = table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
    return view.merge(view.split(real) * view.split_scale(scale).float()).to(dtype)


def _has_operator(scheme: Scheme) -> bool:
    """Whether torch has an operator that dequantizes the weight: integers, with a scale per row or per group."""
    spec, shape = scheme.weight, scheme.codes_shape
    if not isinstance(spec, QuantSpec) or spec.scale_spec is not None or spec.dtype.is_floating_point:
        return False
    if spec.has_zero_point and spec.zero_point_domain is not ZeroPointDomain.INT:
        return False
    if is_per_row(scheme):
        return bool(shape[1])
    return len(shape) == 2 and spec.block_size(shape)[0] == 1 and 1 < spec.block_size(shape)[1] < shape[1]


def quantize_portably(x: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize_input` without the implementations of devices."""
    spec: QuantSpec = weight.scheme.activation
    if weight.scheme.spec.static:
        return quantize.quantize_static(x, spec, weight.act_scale, weight.act_zero_point)
    if quantize.is_int8_rowwise(spec):
        return *portable(quantize.quantize_int8_rowwise)(x), None
    return quantize.quantize_rows(x, spec)


def fake_quantized(x: Tensor, weight: Any) -> Tensor:
    """`x` (any shape with rows along the last axis), quantized and dequantized in fp32 by operators that backends know.
    NaN and infinities are not carried from a row to its outputs, unlike in `quantize_input`."""
    scheme: Scheme = weight.scheme
    spec, ops = scheme.activation, decomposed()
    assert spec is not None
    low, high = spec.code_range
    real_zero = spec.has_zero_point and spec.zero_point_domain is not ZeroPointDomain.INT
    integers = spec.dtype is qdtype("int8") and not real_zero
    if integers and scheme.spec.static and scheme.layout.input_scale is not None:
        numbers = (scheme.layout.input_scale, scheme.layout.input_zero_point, int(low), int(high), torch.int8)
        return cast(Tensor, ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *numbers), *numbers))
    if not integers or scheme.spec.static or not isinstance(spec.granularity, PerRow):
        rows = x.reshape(-1, x.shape[-1])
        return quantize.dequantize_rows(spec, *quantize_portably(rows, weight)).reshape(x.shape)
    low, high = int(low), int(high)
    if spec.has_zero_point and quantize.has_default_rows(spec) and (low, high) == (-128, 127):
        x = x.float()
        scale, zero_point = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        codes = ops.quantize_per_token(x, scale, zero_point, low, high, torch.int8)
    else:
        codes, scale, zero_point = quantize_portably(x, weight)
        zero_point = torch.zeros_like(scale, dtype=torch.int8) if zero_point is None else zero_point.int()
    real = ops.dequantize_per_token(codes, scale, zero_point, low, high, torch.int8, torch.float32)
    return cast(Tensor, real)
