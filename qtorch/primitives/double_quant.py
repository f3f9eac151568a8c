"""Double quantization: the scales of a tensor are quantized too, by a spec of their own.

    scale = codes * scale_scale + scale_mean

Its groups run over all the scales of the tensor in row-major order; the last may be shorter. The mean is subtracted if
the codes are integers, whose step is the same everywhere (QLoRA, arXiv 2305.14314, section 3), and not if they are
floating-point numbers, whose step grows with their magnitude (NVFP4: e4m3, one fp32 scale for the tensor).

Integers of the NONE domain have no mean, and the scales that they stand for may be zero or negative (the K-quants of
GGUF). By such a spec the zero points of the OFFSET domain are quantized too:

    zero_point = codes * zero_point_scale
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .affine import ZeroPointDomain
from .granularity import PerGroup, PerRow, PerTensor
from .qparams import Numerics

Tensors = Mapping[str, Tensor]


def check_scale_spec(spec: Numerics | None) -> None:
    """Raise `ValueError` if scales cannot be quantized by `spec`; None, no quantization, is allowed."""
    if spec is None:
        return
    if not isinstance(spec.granularity, PerGroup | PerTensor) or spec.has_zero_point or spec.scale_spec is not None:
        raise ValueError(f"scales are quantized in groups or as a whole, symmetric, and only once; got {spec}")


def only_multiplies(spec: Numerics | None) -> bool:
    """Whether scales quantized by `spec` are multiples of those of their groups, of any sign."""
    return spec is not None and not spec.dtype.is_floating_point and spec.zero_point_domain is ZeroPointDomain.NONE


def _has_mean(spec: Numerics) -> bool:
    return not spec.dtype.is_floating_point and not only_multiplies(spec)


def scale_tensor_shapes(scale_shape: Sequence[int], spec: Numerics | None) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensors that represent scales of this shape: codes, their scale per group, their mean."""
    shapes: dict[str, tuple[int, ...]] = {"scale": tuple(scale_shape)}
    if spec is not None:
        count = math.prod(scale_shape)
        shapes["scale_scale"] = (-(-count // group_size(count, spec)),)
        if _has_mean(spec):
            shapes["scale_mean"] = ()
    return shapes


def quantize_scale(scale: Tensor, spec: Numerics | None) -> dict[str, Tensor]:
    """The tensors that represent `scale` (any shape, positive): `scale` itself if `spec` is None."""
    if spec is None:
        return {"scale": scale}
    flat = scale.reshape(-1).float()
    mean = None
    if _has_mean(spec):
        mean = flat.mean() if flat.numel() else flat.new_zeros(())
        mean = torch.where(mean.isfinite(), mean, (flat / 2.0**64).mean() * 2.0**64)  # a sum beyond fp32
        flat = flat - mean
    groups = in_groups(flat, spec)
    by_group = spec.with_granularity(PerRow())
    scale_scale, _ = by_group.choose_qparams(groups)
    codes = by_group.quantize(groups, scale_scale, None).reshape(-1)[: flat.numel()]
    if only_multiplies(spec):
        # Codes of the tensor are chosen by dividing by the scale; it may be 0 where all that it scales is.
        codes = torch.maximum(codes, (flat > 0).to(codes.dtype))
    tensors = {"scale": codes.reshape(scale.shape), "scale_scale": scale_scale.reshape(-1)}
    return tensors if mean is None else {**tensors, "scale_mean": mean}


def dequantize_scale(tensors: Tensors, spec: Numerics | None, rows: Tensor | None = None) -> Tensor:
    """Inverse of `quantize_scale`, in fp32, of all or of the `rows` (R,) along the first axis. A scale that is so small
    that its code is zero becomes the smallest normal number, since scales are positive, except where
    `only_multiplies`."""
    codes = tensors["scale"]
    of_rows = codes if rows is None else codes.index_select(0, rows)
    if spec is None:
        return of_rows
    scale = _dequantize_groups(codes, tensors["scale_scale"], spec, rows)
    if only_multiplies(spec):
        return scale.reshape(of_rows.shape)
    if "scale_mean" in tensors:
        scale = scale + tensors["scale_mean"]
    return scale.clamp(min=torch.finfo(torch.float32).tiny).reshape(of_rows.shape)


def quantize_zero_point(zero_point: Tensor, spec: Numerics) -> dict[str, Tensor]:
    """The tensors that represent zero points of the OFFSET domain (any shape): codes, and a scale for each group, which
    has the sign of the largest of the group. Unsigned codes are for zero points of one sign."""
    low, high = spec.code_range
    groups = in_groups(zero_point.reshape(-1).float(), spec)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (largest / high).to(spec.scale_dtype or torch.float32)
    step = torch.where(scale == 0, 1.0, scale.float())
    codes = torch.round(groups / step).clamp(low, high).to(spec.dtype.storage)
    return {
        "zero_point": codes.reshape(-1)[: zero_point.numel()].reshape(zero_point.shape),
        "zero_point_scale": scale.reshape(-1),
    }


def dequantize_zero_point(tensors: Tensors, spec: Numerics, rows: Tensor | None = None) -> Tensor:
    """Inverse of `quantize_zero_point`, in fp32; `rows` as in `dequantize_scale`."""
    codes = tensors["zero_point"]
    shape = codes.shape if rows is None else (rows.numel(), *codes.shape[1:])
    return _dequantize_groups(codes, tensors["zero_point_scale"], spec, rows).reshape(shape)


def _dequantize_groups(codes: Tensor, scale: Tensor, spec: Numerics, rows: Tensor | None) -> Tensor:
    """Numbers (n,) that `codes` of any shape stand for, or those of some rows, given the scale of each group."""
    if rows is None:
        # `spec.dequantize` without its temporaries: this is done at each product.
        groups = spec.dtype.decode(in_groups(codes.reshape(-1), spec))
        return groups.mul_(scale.reshape(-1, 1)).reshape(-1)[: codes.numel()]
    row = torch.arange(math.prod(codes.shape[1:]), device=codes.device)
    group = (rows.reshape(-1, 1) * row.numel() + row).reshape(-1) // group_size(codes.numel(), spec)
    return spec.dtype.decode(codes.index_select(0, rows).reshape(-1)) * scale[group]


def group_size(count: int, spec: Numerics) -> int:
    """How many of `count` scales are quantized together."""
    size = spec.granularity.pattern(1)[0]
    return max(1, count) if size == -1 else size


def in_groups(flat: Tensor, spec: Numerics) -> Tensor:
    """(n,) -> (ceil(n / group), group), padded with zeros, which do not change the absmax of a group."""
    size = group_size(flat.numel(), spec)
    missing = -flat.numel() % size
    # torch cannot pad float8.
    return torch.cat([flat, flat.new_zeros(missing)]).reshape(-1, size) if missing else flat.reshape(-1, size)
