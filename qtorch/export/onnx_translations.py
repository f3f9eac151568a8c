"""How operators of ``torch.ops.quantized_decomposed`` are written in ONNX, where torch.onnx does not know them or drops
the bounds of the codes. Opset 21 is the first whose DequantizeLinear has a scale per group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..kernels.ops.portable import decomposed

FLOAT32_TINY = 1.1920928955078125e-07
"""The smallest scale of `choose_qparams_per_token_asymmetric`: the machine epsilon of fp32."""


def onnx_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The argument `custom_translation_table` of `torch.onnx.export` for a model that `portable` returns.

    `qtorch.export.onnx` passes it, and then stores weights of at most 4 bits as such, which a translation cannot.

    Raises:
        ImportError: onnxscript is not installed.
    """
    import onnxscript

    # Its annotations know tensors only, and not the outputs of other operators.
    op: Any = onnxscript.opset21

    def dequantize_per_channel(
        input: Any,
        scales: Any,
        zero_points: Any,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
        out_dtype: int = -1,
    ) -> Any:
        return op.DequantizeLinear(input, scales, _cast(zero_points, dtype), axis=axis)

    def dequantize_per_channel_group(
        w_int8: Any,
        scales: Any,
        zero_points: Any,
        quant_min: int,
        quant_max: int,
        dtype: int,
        group_size: int,
        output_dtype: int = 1,
    ) -> Any:
        return op.DequantizeLinear(w_int8, scales, _cast(zero_points, dtype), axis=1, block_size=group_size)

    def quantize_per_tensor(
        input: Any, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
    ) -> Any:
        # QuantizeLinear saturates at the bounds of the type.
        low, high = (quant_min - zero_point) * scale, (quant_max - zero_point) * scale
        clipped = op.Clip(input, _float(low), _float(high))
        return op.QuantizeLinear(clipped, _float(scale), op.Cast(_integer(zero_point), to=dtype))

    def dequantize_per_tensor(
        input: Any,
        scale: float,
        zero_point: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
        out_dtype: int = -1,
    ) -> Any:
        return op.DequantizeLinear(input, _float(scale), op.Cast(_integer(zero_point), to=dtype))

    def choose_qparams_per_token_asymmetric(input: Any, dtype: int) -> tuple[Any, Any]:
        axis, zero = op.Constant(value_ints=[-1]), _float(0.0)
        low = op.Min(op.ReduceMin(input, axis, keepdims=1), zero)
        high = op.Max(op.ReduceMax(input, axis, keepdims=1), zero)
        scale = op.Max(op.Div(op.Sub(high, low), _float(255.0)), _float(FLOAT32_TINY))
        from_low = op.Add(_float(-128.0), op.Div(low, scale))
        from_high = op.Add(_float(127.0), op.Div(high, scale))
        near_low = op.Sub(_float(-128.0), op.Div(low, scale))
        near_high = op.Sub(_float(127.0), op.Div(high, scale))
        chosen = op.Where(op.Greater(op.Add(from_low, from_high), zero), near_low, near_high)
        rounded = op.Round(op.Clip(chosen, _float(-128.0), _float(127.0)))
        return op.Cast(scale, to=11), op.Cast(rounded, to=7)

    def quantize_per_token(
        input: Any, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: int
    ) -> Any:
        steps = op.Mul(input, op.Reciprocal(op.Cast(scales, to=1)))
        shifted = op.Round(op.Add(steps, op.Cast(zero_points, to=1)))
        return op.Cast(op.Clip(shifted, _float(quant_min), _float(quant_max)), to=dtype)

    def dequantize_per_token(
        input: Any,
        scales: Any,
        zero_points: Any,
        quant_min: int,
        quant_max: int,
        dtype: int,
        output_dtype: int = 1,
    ) -> Any:
        return op.Mul(op.Sub(op.Cast(input, to=1), op.Cast(zero_points, to=1)), op.Cast(scales, to=1))

    def _cast(zero_points: Any, dtype: int) -> Any:
        return None if zero_points is None else op.Cast(zero_points, to=dtype)

    def _float(value: float) -> Any:
        return op.Constant(value_float=float(value))

    def _integer(value: int) -> Any:
        return op.Constant(value_int=int(value))

    functions = (
        dequantize_per_channel,
        dequantize_per_channel_group,
        quantize_per_tensor,
        dequantize_per_tensor,
        choose_qparams_per_token_asymmetric,
        quantize_per_token,
        dequantize_per_token,
    )
    operators = decomposed()
    return {getattr(operators, function.__name__).default: function for function in functions}
