"""`onnx`: a quantized model as an ONNX program, whose weights are integers of 4 or 8 bits in the file."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels.ops.portable import decomposed
from ...primitives.qdtype import QDType
from .portable_model import portable, schemes_of

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

# How operators of ``torch.ops.quantized_decomposed`` are written in ONNX, where torch.onnx does not know them or drops
# the bounds of the codes. Opset 21 is the first whose DequantizeLinear has a scale per group.

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
        input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: int,
        out_dtype: int = -1,
    ) -> Any:  # fmt: skip
        return op.DequantizeLinear(input, scales, _cast(zero_points, dtype), axis=axis)

    def dequantize_per_channel_group(
        w_int8: Any, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: int, group_size: int,
        output_dtype: int = 1,
    ) -> Any:  # fmt: skip
        return op.DequantizeLinear(w_int8, scales, _cast(zero_points, dtype), axis=1, block_size=group_size)

    def quantize_per_tensor(
        input: Any, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
    ) -> Any:
        # QuantizeLinear saturates at the bounds of the type.
        low, high = (quant_min - zero_point) * scale, (quant_max - zero_point) * scale
        clipped = op.Clip(input, _float(low), _float(high))
        return op.QuantizeLinear(clipped, _float(scale), op.Cast(_integer(zero_point), to=dtype))

    def dequantize_per_tensor(
        input: Any, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int, out_dtype: int = -1
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
        input: Any, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: int, output_dtype: int = 1
    ) -> Any:
        return op.Mul(op.Sub(op.Cast(input, to=1), op.Cast(zero_points, to=1)), op.Cast(scales, to=1))

    def _cast(zero_points: Any, dtype: int) -> Any:
        return None if zero_points is None else op.Cast(zero_points, to=dtype)

    def _float(value: float) -> Any:
        return op.Constant(value_float=float(value))

    def _integer(value: int) -> Any:
        return op.Constant(value_int=int(value))

    functions: list[Any] = [dequantize_per_channel, dequantize_per_channel_group, quantize_per_tensor]
    functions += [dequantize_per_tensor, choose_qparams_per_token_asymmetric, quantize_per_token, dequantize_per_token]
    operators = decomposed()
    return {getattr(operators, function.__name__).default: function for function in functions}


# Changes of an ONNX graph of a portable model: weights at their true size, and operators that runtimes fuse.
# DequantizeLinear of codes of at most 4 bits    the codes become INT4 or UINT4
# Transpose(DequantizeLinear(codes))             the codes are stored transposed, as products read them
# MatMul(Cast(codes), Cast(codes)) in int32      MatMulInteger


class Weights:
    """The codes of weights in an `onnx_ir.Graph`, changed in place; `codes` are their types by initializer."""

    def __init__(self, graph: Any, codes: Mapping[str, QDType]) -> None:
        import onnx_ir

        self.ir: Any = onnx_ir
        self.graph = graph
        self.codes = {name: kind for name, kind in codes.items() if name in graph.initializers}

    def rewrite(self) -> None:
        """Make all changes."""
        for node in list(self.graph):
            if node.op_type == "DequantizeLinear" and node.inputs[0].name in self.codes:
                self._tidy(node)
            elif node.op_type == "MatMul":
                self._multiply_integers(node)
        for name, kind in self.codes.items():
            self._narrow(self.graph.initializers[name], kind)

    def _tidy(self, node: Any) -> None:
        """Make scale and zero point of a DequantizeLinear initializers, transposed if that is how they are read."""
        codes = node.inputs[0]
        scale, zero_point = (_constant(value) for value in (*node.inputs, None)[1:3])
        assert scale is not None, "scales of a portable weight are constants"
        users = _users(node.outputs[0])
        if len(codes.shape) == 2 and len(_users(codes)) == 1 and all(map(_reads_transposed, users)):
            self._set(codes, codes.const_value.numpy().T)
            scale, zero_point = scale.T, None if zero_point is None else zero_point.T
            node.attributes["axis"] = self.ir.AttrInt64("axis", 1 - node.attributes["axis"].as_int())
            node.outputs[0].shape = self.ir.Shape(reversed(node.outputs[0].shape.dims))
            for user in users:
                if user.op_type == "Gemm":
                    user.attributes["transB"] = self.ir.AttrInt64("transB", 0)
                else:
                    self.ir.convenience.replace_all_uses_with(user.outputs[0], node.outputs[0])
                    self.graph.remove(user, safe=True)
        prefix = codes.name.removesuffix("_qdata")
        node.replace_input_with(1, self._initializer(f"{prefix}_scale", scale.astype(np.float32)))
        if zero_point is None or not zero_point.any():
            node.resize_inputs(2)
            return
        # Of the type of the codes, which `_narrow` may change.
        value = self._initializer(f"{prefix}_zero_point", zero_point.astype(codes.dtype.numpy()))
        if self.codes[codes.name].bits <= 4:
            self._set(value, value.const_value.numpy(), self._small(codes))
        node.resize_inputs(3)
        node.replace_input_with(2, value)

    def _multiply_integers(self, node: Any) -> None:
        """MatMulInteger in place of a MatMul in int32 of an input (M, K) and the codes (N, K), transposed."""
        left, right = node.inputs
        x, transpose = _uncast(left), right.producer()
        if x is None or transpose is None or transpose.op_type != "Transpose":
            return
        codes = _uncast(transpose.inputs[0])
        if codes is None or codes.name not in self.codes or len(codes.shape) != 2:
            return
        alone = len(_users(codes)) == 1
        if alone and self.codes[codes.name].bits == 8 and codes.dtype == self.ir.DataType.INT8:
            # Processors without 8-bit dot products add pairs of uint8 * int8 products in 16 bits, which may saturate;
            # runtimes compute uint8 * uint8 exactly everywhere.
            self._set(codes, (codes.const_value.numpy() ^ -128).view(np.uint8).T, self.ir.DataType.UINT8)
            # OpenVINO takes no zero point of the weight without one of the input.
            of_input = self._initializer("zero_point_of_inputs", np.zeros((), x.dtype.numpy()))
            inputs = [x, codes, of_input, self._initializer("zero_point_of_weights", np.array(128, np.uint8))]
        else:
            turned = self.ir.node("Transpose", [codes], {"perm": [1, 0]})
            turned.outputs[0].dtype = codes.dtype
            self.graph.insert_before(node, turned)
            inputs = [x, turned.outputs[0]]
        product = self.ir.node("MatMulInteger", inputs)
        self.graph.insert_before(node, product)
        old, new = node.outputs[0], product.outputs[0]
        new.dtype, new.shape, new.name = old.dtype, old.shape, f"{old.name}_integer"
        self.ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _narrow(self, codes: Any, kind: QDType) -> None:
        """Store codes of at most 4 bits as INT4 or UINT4; operators that do not take those read a cast to 8 bits."""
        if kind.bits > 4 or codes.const_value.dtype.itemsize < 1:
            return
        wide = codes.dtype
        self._set(codes, codes.const_value.numpy(), self._small(codes))
        others = [use for use in codes.uses() if use.node.op_type not in ("Cast", "DequantizeLinear")]
        if not others:
            return
        cast = self.ir.node("Cast", [codes], {"to": wide.value})
        cast.outputs[0].dtype, cast.outputs[0].shape = wide, codes.shape
        self.graph.insert_before(next(iter(self.graph)), cast)
        for use in others:
            use.node.replace_input_with(use.idx, cast.outputs[0])

    def _small(self, codes: Any) -> Any:
        types = self.ir.DataType
        return types.INT4 if codes.dtype in (types.INT8, types.INT4) else types.UINT4

    def _set(self, value: Any, array: np.ndarray, dtype: Any = None) -> None:
        """Give an initializer other data, in `dtype` if given."""
        dtype = dtype or value.dtype
        array = np.ascontiguousarray(array).astype(dtype.numpy())
        value.const_value = self.ir.tensor(array, dtype=dtype, name=value.name)
        value.dtype, value.shape = dtype, value.const_value.shape

    def _initializer(self, name: str, array: np.ndarray) -> Any:
        """An initializer of this name and data; the one that is there already if its data is equal."""
        while (found := self.graph.initializers.get(name)) is not None:
            old = found.const_value.numpy()
            if old.dtype == array.dtype and old.shape == array.shape and (old == array).all():
                return found
            name += "_"
        tensor = self.ir.tensor(np.ascontiguousarray(array), name=name)
        shape, type = self.ir.Shape(array.shape), self.ir.TensorType(tensor.dtype)
        value = self.ir.Value(name=name, shape=shape, type=type, const_value=tensor)
        self.graph.register_initializer(value)
        return value


def _users(value: Any) -> list[Any]:
    return [use.node for use in value.uses()]


def _reads_transposed(node: Any) -> bool:
    if node.op_type == "Gemm":
        turned = node.attributes.get("transB")
        return turned is not None and turned.as_int() == 1 and len(_users(node.inputs[1])) == 1
    return node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]


def _constant(value: Any) -> np.ndarray | None:
    """The data of an initializer, also behind casts and reshapes; None if `value` is None or is computed."""
    if value is None:
        return None
    if value.const_value is not None:
        data: np.ndarray = value.const_value.numpy()
        return data
    node = value.producer()
    if node is None or node.op_type not in ("Cast", "CastLike", "Identity"):
        return None
    # The values of scales and zero points are the same in every type that they are cast to.
    return _constant(node.inputs[0])


def _uncast(value: Any) -> Any:
    """The 8-bit integers that `value` is a cast of, in int32; None if it is not."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or value.dtype is None or value.dtype.name != "INT32":
        return None
    source = node.inputs[0]
    return source if source.dtype is not None and source.dtype.name in ("INT8", "UINT8") else None


OPSET = 21


def onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    activations: str = "integer",
    opset_version: int = OPSET,
    external_data: bool | None = None,
    **options: Any,
) -> "ONNXProgram":
    """Export a quantized model to ONNX, by `torch.onnx.export` of `portable(model)`.

    Weights keep their codes: integers of 5 to 8 bits are stored in 8, of 1 to 4 bits in 4 (INT4, UINT4), and are read
    by DequantizeLinear, which runtimes fuse with the product that follows; look-up tables and small floating-point
    formats by Gather; float8 by Cast. Products with integer activations are MatMulInteger.

    Args:
        model: a quantized model, or what `portable` returned for one.
        args, kwargs: example inputs of the model.
        path: file to write; None writes none.
        activations: see `portable`.
        opset_version: at least 21, the first with 4-bit integers and scales per group.
        external_data: see `torch.onnx.ONNXProgram.save`; None writes a second file beside large models.
        options: for `torch.onnx.export`: `dynamic_shapes`, `input_names`, `output_names`, ...

    Returns:
        The program; `program.model_proto` is the model, `program.save(path)` writes it.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: there is no input, `opset_version` is below 21, no weight is quantized, or a weight quantizes its
            input to a format for which ONNX has no operators.
        RuntimeError: ONNX has no operator for an operation of the model; the message of torch.onnx names it.
    """
    if opset_version < OPSET:
        raise ValueError(f"onnx: opset_version is {opset_version}; weights in groups or of 4 bits need {OPSET} or more")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    if not args and not kwargs:
        raise ValueError("onnx: args is empty; give inputs of the model, qtorch.export.onnx(model, (x,), path)")
    ready = model if schemes_of(model) else portable(model, activations)
    schemes = schemes_of(ready)
    for name, scheme in schemes.items():
        spec = scheme.activation
        if spec is not None and (spec.dtype.format is not None or spec.scale_dtype == torch.float8_e8m0fnu):
            raise ValueError(f"onnx: {name} quantizes its input to {spec}, which ONNX lacks; use a weight-only recipe")
    fixed: Any = {"dynamo": True, "optimize": False, "verbose": False, "opset_version": opset_version}
    fixed["custom_translation_table"] = onnx_translations()
    with torch.no_grad():
        program = torch.onnx.export(ready, args, kwargs=dict(kwargs or {}), **fixed, **options)
    assert program is not None
    codes = {f"{name}_qdata": scheme.weight.dtype for name, scheme in schemes.items()}
    _simplify(program, Weights(program.model.graph, codes))
    if path is not None:
        program.save(path, external_data=external_data)
    return program


def _simplify(program: "ONNXProgram", weights: Weights) -> None:
    """Rewrite the weights of a program, then fold constants, except what would turn codes into floats."""
    import onnx_ir.passes.common as common
    from onnxscript.optimizer import fold_constants

    weights.rewrite()
    kept = set(weights.codes)

    def should_fold(node: Any) -> bool | None:
        """None leaves the decision to the optimizer."""
        if any(value is not None and value.name in kept for value in node.inputs):
            kept.update(value.name for value in node.outputs)
            return False
        return None

    fold_constants(program.model, onnx_shape_inference=False, should_fold=should_fold)
    for clean in (common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass()):
        clean(program.model)
    stored = {name: weights.graph.initializers.get(name) for name in weights.codes}
    if missing := [name for name, value in stored.items() if value is None or value.dtype.itemsize > 1]:
        raise RuntimeError(f"onnx: the codes of {', '.join(missing)} were lost in the export; please report it")
