"""BitNet b1.58: ternary weights and int8 activations (Ma et al., arXiv 2402.17764, section 2).

    w_hat = s clamp(round(w / s), -1, 1),   s = mean |w|
    y = x_hat @ w_hat.T,                    x_hat int8 with a scale per token

Gradients pass straight through both: dx = g @ w_hat, dw = g.T @ x_hat. The model should have an RMSNorm before each
linear layer, and no norms before attention and MLP blocks ("Training Tips, Code and FAQ" of the paper's authors);
`quantize_` does not change them.
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.registry import scale_per_row
from ...model.weight_kinds import WeightKind
from ...primitives import AbsMeanRule, FixedRangeRule, PerTensor, QuantSpec, Scheme, ZeroPointDomain, qdtype
from ...primitives.layouts import pack_codes
from ...recipes.base import register_recipe
from ..engine.gemm_spec import GemmSpec, TrainingSpec
from ..engine.numerics import int8, integer
from ..weights.codes import CodesWeight
from ..weights.gathered import cut_by_tensor_parallelism
from ..weights.master import MasterWeight
from .base import EdgeRecipe, TrainingRecipe, check_trainable, declines_experts

TERNARY = QuantSpec(qdtype("int2"), PerTensor(), scale_rule=AbsMeanRule(), quant_min=-1, quant_max=1)


@register_recipe("bitnet_training")
class BitnetTraining(TrainingRecipe):
    """See the top of the file. Converts to weights of 2 bits, packed, and int8 activations."""

    def declines(self, kind: WeightKind) -> str | None:
        return declines_experts(self, kind)

    def check(self, weight: Tensor) -> None:
        check_trainable(weight)

    def training_spec(self) -> TrainingSpec:
        straight_through = GemmSpec(reuse_forward=True)
        return TrainingSpec(GemmSpec(int8(), TERNARY), straight_through, straight_through)

    def apply(self, weight: Tensor) -> Tensor:
        return BitnetWeight.of(weight, self.training_spec())


class BitnetWeight(MasterWeight):
    """A `MasterWeight` whose shards, under FSDP2 alone, are gathered as packed codes of 2 bits. The scale is the mean
    over all shards."""

    @classmethod
    def scales_of_whole(cls, parameters: list[Any], mesh: Any) -> list[tuple[Any, Tensor]]:
        means = _global_mean([p._local_tensor.master for p in parameters], [p.numel() for p in parameters], mesh)
        return list(zip(parameters, means, strict=True))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        if cut_by_tensor_parallelism(module):
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        scale = self.precomputed_scale()
        if scale is None:
            scale = _global_mean([self.master], [outer_size.numel()], mesh)[0]
        dtype = (None if mp_policy is None else mp_policy.param_dtype) or self.master.dtype
        codes = TERNARY.quantize(self.master, scale.reshape(1, 1), None)
        linear = self.training_spec.linear_spec
        assert linear is not None
        sent = pack_codes(codes, TERNARY.dtype)
        if outer_size[0] % mesh.size():  # shards of different sizes send tensors of the padded size: a byte a weight
            missing = -(-outer_size[0] // mesh.size()) - codes.shape[0]
            sent = torch.cat([codes, codes.new_zeros((missing, *codes.shape[1:]))])
        return (sent,), (Scheme(linear, tuple(outer_size), dtype), scale)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if not isinstance(metadata[0], Scheme):
            return super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)
        scheme, scale = metadata
        (sent,) = all_gather_outputs
        is_packed = sent.shape[1:] != scheme.shape[1:]
        qdata = sent if is_packed else pack_codes(sent[: scheme.shape[0]], TERNARY.dtype)
        if out is not None:  # packed codes are the gathered memory itself
            # The numbers that the forward had: no change, for a backward that has kept them.
            with torch.autograd._unsafe_preserve_version_counter((out.qdata, out.scale)):
                out.scale.copy_(scale.expand_as(out.scale))
                if not is_packed:
                    out.qdata.copy_(qdata)
            return None
        scales = scale_per_row(scale.reshape(1, 1), scheme.shape[0]).contiguous()
        return CodesWeight({"qdata": qdata, "scale": scales}, scheme), (qdata,)


def _global_mean(shards: list[Tensor], counts: list[int], mesh: Any) -> Tensor:
    """Mean magnitude of each tensor over all its shards, fp32, in one all-reduce."""
    sums = torch.stack([shard.float().abs().sum() for shard in shards])
    # With a mesh of two axes, replicas hold equal shards: the last axis has all of them.
    torch.distributed.all_reduce(sums, group=mesh.get_group(mesh.ndim - 1))
    return (sums / sums.new_tensor(counts)).clamp(min=torch.finfo(torch.float32).tiny)


# Binary training: weights and activations of one bit, the sign, as in PokeBNN (Zhang et al., arXiv 2112.00133).
#
#     w_hat = max |w| sign(w)   by output channel        x_hat = bound sign(x)
#     y = x_hat @ w_hat.T,   dx = (g @ w_hat) [|x| <= bound],   dw = g.T @ x_hat
#
# Gradients pass straight through the sign, and stop where an activation lies outside the bound. The sign needs inputs
# of both signs: no ReLU before a layer, but a batch norm, which also takes up the scales. The padding of a
# convolution is quantized with the image, as +bound.


@register_recipe("binary_training")
class BinaryTraining(EdgeRecipe):
    """See the top of the file. Converts to weights of one bit, eight in a byte, and binary activations.

    Args:
        bound: of activations; larger ones clip.
        edge_bits: of the first and the last weight of the model, which are the most sensitive, and of their
            activations; None: one as well.

    Raises:
        ValueError: a bound that is not positive.
    """

    bound: float = 3.0
    edge_bits: int | None = 8

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"{self.name}: bound is positive, got {self.bound}")
        super().__post_init__()

    def training_spec(self) -> TrainingSpec:
        rule = FixedRangeRule(-self.bound, self.bound)
        sign = QuantSpec(qdtype("midrise1"), PerTensor(), zero_point_domain=ZeroPointDomain.NONE, scale_rule=rule)
        straight_through = GemmSpec(reuse_forward=True)
        forward = GemmSpec(sign, integer(1, preserve_zero=False))
        return TrainingSpec(forward, straight_through, straight_through, clip_gradient=True)
