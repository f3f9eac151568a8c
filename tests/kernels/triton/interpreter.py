"""bf16 and float8 in Triton's interpreter.

It holds bf16 as uint16 and computes with those, and truncates where it converts to bf16 or float8. Here such numbers
become fp32 for an operation and are rounded to nearest even, by torch, as on a GPU.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
BITS = {
    tl.bfloat16: (np.uint16, torch.int16),
    tl.float8e4nv: (np.uint8, torch.int8),
    tl.float8e5: (np.uint8, torch.int8),
}


def widen(handle: TensorHandle) -> TensorHandle:
    """The same numbers in fp32."""
    kind = handle.dtype.scalar
    if kind not in NARROW:
        return handle
    signed = torch.from_numpy(np.ascontiguousarray(handle.data).view(BITS[kind][0]).astype(np.int64)).to(BITS[kind][1])
    return TensorHandle(signed.view(NARROW[kind]).float().numpy(), tl.float32)


def narrow(data: np.ndarray, kind: tl.dtype) -> TensorHandle:
    """fp32 numbers rounded to a narrow type."""
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(NARROW[kind])
    return TensorHandle(rounded.view(BITS[kind][1]).numpy().view(BITS[kind][0]).reshape(np.shape(data)), kind)


def install() -> None:
    """Replace the interpreter's operations on these types."""
    cast, binary, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op, InterpreterBuilder.create_dot
    convert = InterpreterBuilder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        src = widen(src)
        if dst_type.scalar in NARROW:
            return narrow(src.data, dst_type.scalar)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if src.dtype.scalar in NARROW or dst_type.scalar in NARROW:
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def binary_op(self, lhs, rhs, op):
        kind = lhs.dtype.scalar
        if kind not in NARROW:
            return binary(self, lhs, rhs, op)
        result = op(widen(lhs).data, widen(rhs).data)
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else narrow(result, kind)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    InterpreterBuilder.get_bf16 = lambda self, value: narrow(np.array([value]), tl.bfloat16)
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_dot = create_dot
    assert interpreter.interpreter_builder.binary_op.__func__ is binary_op
