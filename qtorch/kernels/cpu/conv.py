"""Convolution with int8 weights and activations in 8 bits, compiled: indirect convolution on codes.

    y[b, n, p] = sum_{c, t} (xq[b, c, stride p + dilation t] - xz) wq[n, t, c] * ws[n] * xs + bias[n]

xs and xz are static, or chosen for each image. The sums are exact in int32 and the rest is fp32 in this order: the bits
are those of `multiply_windows` and of `image_conv`.
"""

import functools
import math
from typing import Any

from torch import Tensor

from ...primitives import PerTensor, QuantSpec, is_compiling, qdtype
from ..conv import Window, empty_result, scales_images, with_bias
from ..custom_ops import Name, note, opaque, recording
from ..ops.int_matmul import int32_terms
from ..registry import Problem, needs_floats, split_bias
from . import int8_linear, weight
from .compiled_library import missing
from .conv_prepared import Activation, CompiledConv, calls_of, prepare

SIGNED = tuple(f"int{bits}" for bits in range(2, 9))


@opaque(
    lambda x, xs, xz, quantizer, shift, codes, ws, shape, *about: empty_result(
        x, shape[0], Window(tuple(shape[2:]), *about[:4]), x.dtype
    )
)
def cpu_conv(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, quantizer: list[float], shift: int,
    codes: Tensor, ws: Tensor, shape: list[int],
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
    weight_dtype: Name, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation, y (B, N, *positions) in the dtype of x, channels last where x is.

    Args:
        x: (B, C, *sizes), one or two of them; fp32, bf16 or fp16.
        xs, xz: static scale and zero point, (1, 1); None to choose them for each image.
        quantizer: (low, high, asymmetric, given, smallest scale, largest scale).
        shift: from codes of x to unsigned ones.
        codes: (N, T * C / groups), the matrix of the weight.  ws: (N, 1) or (1, 1).
        shape: (N, C / groups, *kernel).
        weight_dtype: name of a `QDType`.
        bias: (N) in the dtype of x, or None.
    """
    window = Window(tuple(shape[2:]), tuple(stride), tuple(padding), tuple(dilation), groups)
    n, k = shape[0], math.prod(shape[1:])
    weight.check_bias(bias, x.dtype, n)
    y = empty_result(x, n, window, x.dtype)
    if not y.numel():
        return y
    if not x.numel():  # windows of nothing but padding
        return with_bias(y.zero_(), bias)
    layer = CompiledConv.of(codes, ws, None, n, k, weight_dtype, False, "INT", 0.0, tuple(shape), groups)
    compiled = layer.compiled
    if compiled is None:
        raise RuntimeError(f"cpu_conv: {missing() or 'the compiled kernels do not read these tensors'}")
    if recording():
        kind = "depthwise" if groups == x.shape[1] == n > 1 else "dense"
        note(f"cpu_conv.{compiled.instruction_set}.{kind}")
    activation = Activation(tuple(quantizer), shift, xs is not None)
    return calls_of(layer, n, activation).run(x, bias, window, xs, xz)


@functools.cache
def conv_quantizer(spec: QuantSpec, static: bool) -> tuple[tuple[float, ...], int] | None:
    """The quantizer of `cpu_conv` and its shift; None if the compiled kernels do not quantize by this spec."""
    quantizer = int8_linear.static_quantizer(spec, ("int8", "uint8")) if static else int8_linear.dynamic_quantizer(spec)
    return None if quantizer is None else (quantizer, 128 if spec.dtype is qdtype("int8") else 0)


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    activation, of_weight = scheme.activation, scheme.weight
    assert activation is not None
    if reason := needs_floats(problem):
        return reason
    if len(scheme.shape) > 4 or 0 in scheme.shape:
        return f"takes images of one or two axes, the weight has shape {scheme.shape}"
    if of_weight.has_zero_point or of_weight.scale_spec is not None:
        return "takes weights without zero points, and scales in floating point"
    static = scheme.spec.static and isinstance(activation.granularity, PerTensor)
    if not (static or scales_images(scheme)):
        return f"takes a static scale or one for each image, PerAxis(0), of the activation, the scheme has {activation}"
    if (k := math.prod(scheme.shape[1:])) > int32_terms(left_zero=True):
        return f"takes windows of at most {int32_terms(left_zero=True)} numbers, the weight has {k}"
    if of_weight.scale_shape(scheme.codes_shape) != (scheme.shape[0], 1):
        return f"takes a scale for each output channel, the weight has {of_weight.granularity}"
    if conv_quantizer(activation, static) is None:
        return f"does not quantize activations by {activation}"
    return missing()


@weight.register_compiled(
    "conv", layout="plain", weight=SIGNED, activation=("int8", "uint8"), supports=_supports, name="cpu_conv"
)
def _conv(x: Tensor, quantized: Any, bias: Tensor | None, window: Window) -> Tensor:
    scheme, static = quantized.scheme, quantized.scheme.spec.static
    found = conv_quantizer(scheme.activation, static)
    assert found is not None
    quantizer, shift = found
    added, bias = split_bias(bias, x, scheme.shape[0])
    xs, xz = (quantized.act_scale, quantized.act_zero_point) if static else (None, None)
    _, stride, padding, dilation = map(list, window[:4])
    y = cpu_conv(
        x, xs, xz, list(quantizer), shift, quantized.qdata, quantized.scale, list(scheme.shape), stride, padding,
        dilation, window.groups, scheme.weight.dtype.name, added,
    )  # fmt: skip
    if not is_compiling():
        prepare(quantized, Activation(quantizer, shift, static))
    return with_bias(y, bias)
