"""The tensors that stand for a weight, in each format.

    pack-quantized            weight_packed int32, weight_scale, weight_shape int64 (2,); with zero points
                              weight_zero_point int32 (words of O codes, G), packed along the output channels
    int-, float-, naive-,     weight int8 or float8_e4m3fn, weight_scale; with zero points weight_zero_point int8
    mxfp8-quantized
    nvfp4-, mxfp4-pack-       weight_packed uint8 (O, I / 2), weight_scale; NVFP4: weight_global_scale fp32 (1,)
    quantized
    static inputs             input_scale (1,), input_zero_point int8 (1,)

Codes and zero points are signed, and packed with an offset of 2^(bits-1). Scales of MX are E8M0 in uint8. The global
scale of NVFP4 is a divisor: the scale of a group is weight_scale / weight_global_scale, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import QuantizedTensor
from .nvfp4 import divisor_of
from .packing import pack, pack_nibbles
from .scheme import Args, Group

_MAGNITUDE = 7
"""The bits of a code of float4_e2m1 but its sign."""


def encode(tensor: QuantizedTensor, group: Group) -> dict[str, Tensor]:
    """The tensors of a quantized matrix, by the last part of their names.

    Args:
        group: how it is described; its format has the tensors.

    Raises:
        ValueError: the format cannot hold the numbers exactly; the message does not name the tensor.
    """
    codes, others = tensor.canonical()
    weights = group.weights
    assert weights is not None
    found = _floats(codes, others, weights) if weights.type == "float" else _integers(codes, others, group)
    if "act_scale" in others:
        found["input_scale"] = others["act_scale"].reshape(1)
    if "act_zero_point" in others:
        found["input_zero_point"] = others["act_zero_point"].reshape(1).to(torch.int8)
    return found


def _integers(codes: Tensor, others: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    weights = group.weights
    assert weights is not None
    bits, rows = weights.num_bits, codes.shape[0]
    # From codes of either sign to signed ones, and to those that count from zero.
    lowest = 2 ** (bits - 1)
    shift = 0 if codes.dtype is torch.int8 else lowest
    scale, zero_point = others["scale"], others.get("zero_point")
    if weights.strategy == "channel":
        scale = scale.expand(rows, 1)
        zero_point = None if zero_point is None else zero_point.expand(rows, 1)
    signed = (codes.to(torch.int16) - shift).to(torch.int8)
    if zero_point is not None:
        zero_point = zero_point.to(torch.int32) - shift
        if zero_point.numel() and not bool(((zero_point >= -lowest) & (zero_point < lowest)).all()):
            raise ValueError(f"has zero points beyond its codes of {bits} bits")
        zero_point = zero_point.to(torch.int8)
    if group.format != "pack-quantized":
        found = {"weight": signed, "weight_scale": _scale(scale, weights)}
        return found if zero_point is None else {**found, "weight_zero_point": zero_point}
    found = {
        "weight_packed": pack(_unsigned(signed, lowest), bits),
        "weight_scale": _scale(scale, weights),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64, device="cpu"),
    }
    if zero_point is not None:
        found["weight_zero_point"] = pack(_unsigned(zero_point.t(), lowest), bits).t().contiguous()
    return found


def _unsigned(signed: Tensor, lowest: int) -> Tensor:
    return (signed.to(torch.int16) + lowest).to(torch.uint8)


def _floats(codes: Tensor, others: dict[str, Tensor], weights: Args) -> dict[str, Tensor]:
    scale = others["scale"]
    if weights.strategy == "group":
        # E8M0 is not a dtype that the package knows.
        scale = scale.view(torch.uint8)
    if weights.num_bits == 8:
        return {"weight": codes, "weight_scale": _scale(scale, weights)}
    found = {"weight_packed": pack_nibbles(codes), "weight_scale": scale}
    if weights.strategy == "tensor_group":
        empty = (scale.view(torch.uint8) == 0).repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        if bool((codes[empty] & _MAGNITUDE).any()):
            raise ValueError(
                "has groups whose scale is zero in float8_e4m3fn, which stands for 2^-126 here and for 0 in the file; "
                "use recipes_for_vllm()"
            )
        found["weight_global_scale"] = divisor_of(others["scale_scale"], scale).reshape(1)
    return found


def _scale(scale: Tensor, weights: Args) -> Tensor:
    return scale.reshape(1) if weights.strategy == "tensor" else scale.contiguous()
