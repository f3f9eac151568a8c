"""GatheredWeight: a weight that FSDP2 has gathered from its shards as codes and scales, a quarter of fp32's bytes.

Each process quantizes the rows that it has, before it sends them. Scales of rows or of blocks of rows are those of the
whole weight then, and one scale for the tensor follows from an all-reduce of two numbers, for each gather or, by
`precompute_scales_for_fsdp`, for all weights at once. So codes are those of one process, and so are the products of the
engine. It serves recipes whose products all multiply by one quantized weight: a backward that quantizes the weight
along its other axis needs the floats.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dtypes.gathering import as_sent
from ...primitives import QuantSpec, Rounding, scale_rules
from ...primitives.layouts import FLOATS, Form, Forms
from ..engine import gemm_spec, operand, split
from .base import TrainingScheme, TrainingWeight


class GatheredWeight(TrainingWeight):
    """See the top of the file. It lives from a gather to the end of its layer's call, and is not changed."""

    scheme_type = TrainingScheme
    qdata: Tensor

    @classmethod
    def forms(cls, scheme: Any) -> Forms:
        spec = scheme.training.output.rhs
        scale = Form(spec.scale_shape(scheme.shape), {*FLOATS, torch.float8_e8m0fnu})
        return {"qdata": (Form(scheme.shape, {spec.dtype.storage}),), "scale": (scale,)}

    @classmethod
    def tensor_names(cls, scheme: Any) -> tuple[str, ...]:
        return ("qdata", "scale")

    def operand(self) -> operand.Operand:
        """The weight as the engine multiplies it."""
        return operand.Operand(self.qdata, self.qdata.shape[0], self.scale, None, self.training_spec.output.rhs)

    def floats(self) -> Tensor:
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.operand().dequantize(dtype or self.dtype)


def one_weight(spec: gemm_spec.TrainingSpec) -> QuantSpec | None:
    """The spec of the weight that both the forward and the gradient of the input multiply by; None if there are two."""
    weight, backward = spec.output.rhs, spec.grad_input
    changed = spec.output.fold or spec.output.changes_operands or spec.scale_gradient or spec.clip_gradient
    if weight is None or changed or weight.has_zero_point or weight.scale_spec is not None:
        return None
    whole = weight.granularity.pattern(2) == (-1, -1)
    same = whole and backward.rhs == weight and backward.fold is None and not backward.changes_operands
    joins = weight.scale_rule.joins is scale_rules.Joins.EXTREMES or not whole
    return weight if (backward.reuse_forward or same) and joins and weight.rounding is Rounding.NEAREST_EVEN else None


def one_scale(training: gemm_spec.TrainingSpec | Any) -> QuantSpec | None:
    """`one_weight`, if it has one scale for the tensor."""
    spec = one_weight(training) if isinstance(training, gemm_spec.TrainingSpec) else None
    return spec if spec is not None and spec.granularity.pattern(2) == (-1, -1) else None


class SentCodes(NamedTuple):
    """What a shard sends, and what the weight is made of after the gather: `tensors` are its codes and its scale."""

    scheme: TrainingScheme
    tensors: tuple[Tensor, Tensor]
    scale_is_shared: bool

    @property
    def sent(self) -> tuple[Tensor, ...]:
        return tuple(as_sent(part) for part in self.tensors[: 1 if self.scale_is_shared else 2])

    def whole(self, outputs: tuple[Tensor, ...], out: Any) -> Any:
        """The weight and its memory; None if `out`, the weight of the last gather, is given."""
        parts = [part.view(own.dtype) for part, own in zip(outputs, self.tensors, strict=False)]
        if out is None:
            scale = self.tensors[1].clone() if self.scale_is_shared else parts[1]
            codes = {"qdata": parts[0][: self.scheme.shape[0]], "scale": scale}
            return GatheredWeight(codes, self.scheme), tuple(parts)  # type: ignore[arg-type]
        if self.scale_is_shared:  # what was sent is in the memory of `out` already
            held = getattr(out, "_local_tensor", out).scale
            with torch.autograd._unsafe_preserve_version_counter((held,)):
                held.copy_(self.tensors[1])
        return None


def cut_by_tensor_parallelism(module: nn.Module) -> bool:
    """Whether the parts of its weight are multiplied by a forward that joins their scales."""
    return "forward" in vars(module)


def codes_to_send(
    master: Tensor, training: Any, dtype: torch.dtype, mesh: Any, size: torch.Size, module: Any, scale: Tensor | None
) -> SentCodes | None:
    """The codes of the shard `master` of a weight of `size`, or None where it has to be sent as floats: of another
    recipe, of a layer that is no `nn.Linear` or is cut by tensor parallelism, in shards that cut blocks of rows, or in
    uneven shards with scales of rows. `scale` is that of the whole tensor, where it is known already."""
    spec = one_weight(training) if isinstance(training, gemm_spec.TrainingSpec) else None
    if spec is None or not isinstance(module, nn.Linear) or cut_by_tensor_parallelism(module) or len(size) != 2:
        return None
    rows, ranks = -(-size[0] // mesh.size()), mesh.size()
    block = spec.granularity.pattern(2)[0]
    if (block != -1 and (size[0] % ranks or rows % block)) or size[1] % training.output.blocks[0]:
        return None
    if master.shape[0] < rows:  # zeros change no scale of the tensor
        master = torch.cat([master, master.new_zeros(rows - master.shape[0], size[1])])
    if block == -1:
        scale = joined_scales([(spec, master)], mesh)[0] if scale is None else scale
        codes = spec.quantize(master, scale, None)
    else:
        made = operand.quantize_operand(master, spec)
        assert made.scale is not None
        codes, scale = made.values, made.scale
    # Of a single shard, torch 2.13 passes on one tensor.
    return SentCodes(TrainingScheme(training, tuple(size), dtype), (codes, scale), block == -1 or ranks == 1)


def joined_scales(shards: Sequence[tuple[QuantSpec, Tensor]], mesh: Any) -> list[Tensor]:
    """The scale of each of several weights that have one for the tensor, in one all-reduce over their shards."""
    filled = [shard if shard.shape[0] else shard.new_zeros(1, shard.shape[1]) for _, shard in shards]
    ranges = [spec.choose_range(shard) for (spec, _), shard in zip(shards, filled, strict=True)]
    # With a mesh of two axes, replicas hold equal shards: the last axis has all of them.
    lows, highs = (torch.stack(ends) for ends in zip(*ranges, strict=True))
    low, high = split.joined_extremes(lows, highs, mesh.get_group(mesh.ndim - 1))
    return [
        spec.choose_qparams_from_range(low[i].to(own[0].dtype), high[i].to(own[0].dtype), shard.dtype)[0]
        for i, ((spec, shard), own) in enumerate(zip(shards, ranges, strict=True))
    ]
