"""WeightInCodes: a parameter that is held as codes and trained; of affine codes `CodesWeight`, of look-up tables
`TableCodesWeight`.

It has no floating-point copy. An update in place, `p.addcdiv_(m, v)` say, computes in fp32 one weight at a time
and rounds stochastically into codes with a new scale:

    w <- round(w' / s') s',   s' from w', the updated values (`primitives.covering`)      E[w] = w'

so that updates smaller than a step still add up in expectation (Gupta et al., arXiv 1502.02551). The forward runs
the kernel of the converted weight; gradients are those of the dequantized values.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from ...dtypes import AffineQuantizedTensor, LUTQuantizedTensor, QuantizedTensor, ops
from ...model.install import check_model
from ...primitives import LinearSpec, Scheme, double_quant
from ...primitives.covering import covering_qparams
from ..engine.gemm_spec import GemmSpec, TrainingSpec
from .base import TrainingWeight, written_by

aten = torch.ops.aten

SCALINGS = {aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Scalar}
"""Updates that can be applied to a scale in fp32, exactly: weight decay. In 16 bits a factor near one changes none."""

FUSED = {
    getattr(aten, name).default for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
} | {aten._fused_sgd_.tensor_lr, aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr}
"""Updates that take all of their tensors in one dtype, which is fp32 here: of 16 bits a weight would lose small updates
before it is rounded."""

_RANK_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that different ranks add different numbers to a seed."""


@dataclass
class SharedRounding:
    """Noise that replicas of a weight have in common: a function of a seed, the number of the weight in the model, its
    updates so far, and the rank of a shard."""

    seed: int
    parameter: int
    step: int = 0

    def next_seed(self) -> int:
        """The seed of the next update."""
        text = f"{self.seed} {self.parameter} {self.step}"
        self.step += 1
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % 2**62


class WeightInCodes(TrainingWeight):
    """See the top of the file. The rounding of its spec applies to its updates."""

    frozen: ClassVar[type[QuantizedTensor]]
    """The class of the converted weight."""
    _rank: int | None = None
    _shared_rounding: SharedRounding | None = None

    @property
    def training_spec(self) -> TrainingSpec:
        return _training_spec(self.scheme.spec)

    def floats(self) -> Tensor:
        return self.dequantize()

    def convert(self) -> QuantizedTensor:
        """The same codes, frozen."""
        return self.frozen(self.inner_tensors, _frozen(self.scheme))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        if any(isinstance(tensor, cls) for tensor in tree_iter(written)):
            _update(func, args, kwargs, written)
            return args[0] if isinstance(args[0], Tensor) else None
        if func in _LIKES:
            like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(like, *args[1:], **{**kwargs, "memory_format": torch.contiguous_format})
        if func in _READS or (func is aten.cat.default and not all(isinstance(part, cls) for part in args[0])):
            plain_args, plain_kwargs = tree_map_only(cls, lambda w: w.dequantize(), (args, kwargs))
            return func(*plain_args, **plain_kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        vars(self)["_rank"] = mesh.get_local_rank()
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


class CodesWeight(WeightInCodes, AffineQuantizedTensor):
    """A weight of affine codes that trains."""

    frozen = AffineQuantizedTensor


class TableCodesWeight(WeightInCodes, LUTQuantizedTensor):
    """A weight of indices into one look-up table that trains."""

    frozen = LUTQuantizedTensor


def in_training(frozen: QuantizedTensor, **rounding: Any) -> WeightInCodes:
    """A weight for inference as one that trains; `rounding` of updates, if its spec does not say it."""
    kind = CodesWeight if isinstance(frozen, AffineQuantizedTensor) else TableCodesWeight
    spec = frozen.scheme.spec
    spec = replace(spec, weight=replace(spec.weight, **rounding))
    return kind(frozen.inner_tensors, replace(frozen.scheme, spec=spec))


@functools.lru_cache(maxsize=1024)
def _training_spec(linear: LinearSpec) -> TrainingSpec:
    backward = GemmSpec(reuse_forward=True)
    of_weight = GemmSpec() if linear.activation is None else backward
    return TrainingSpec(GemmSpec(linear.activation, linear.weight), backward, of_weight)


@functools.lru_cache(maxsize=1024)
def _frozen(scheme: Scheme) -> Scheme:
    return replace(scheme, spec=replace(scheme.spec, weight=scheme.weight.to_nearest()))


_LIKES = {getattr(aten, f"{name}_like").default for name in ("zeros", "ones", "full", "rand", "randn")}
"""State of an optimizer, in floating point."""

_READS = {
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(aten, name).default for name in ("abs", "isfinite", "isnan", "linalg_vector_norm", "maximum", "minimum")),
    *(getattr(aten, name).default for name in ("mean", "neg", "sign", "sqrt", "sum")),
    *(aten._foreach_add.List, aten._foreach_mul.Scalar, aten._foreach_norm.Scalar, aten._foreach_sub.List),
    *(aten.lerp.Scalar, aten.ne.Scalar, aten.pow.Tensor_Scalar, aten.sum.dim_IntList),
}
"""Arithmetic that reads the weight, for optimizers (L2 penalty, LAMB's norms); its results are plain tensors."""


def _update(func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
    """Run an in-place operator on weights in codes, one weight at a time."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and any(isinstance(t, Tensor) for t in arg)]
    count = max(map(len, lists), default=1)
    if not lists or count == 1:
        _update_one(func, args, kwargs, written)
        return
    for i in range(count):
        of_one = [[arg[i]] if isinstance(arg, list | tuple) and len(arg) == count else arg for arg in args]
        named = {k: [v[i]] if isinstance(v, list | tuple) and len(v) == count else v for k, v in kwargs.items()}
        weights = written_by(func, of_one, named)
        if any(isinstance(tensor, WeightInCodes) for tensor in tree_iter(weights)):
            _update_one(func, of_one, named, weights)
        else:
            func(*of_one, **named)


def _update_one(func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
    weights = [tensor for tensor in tree_iter(written) if isinstance(tensor, WeightInCodes)]
    if func is aten.copy_.default:
        _store(args[0], args[1])
        return
    exact = func in SCALINGS and weights[0].scale.dtype is torch.float32 and weights[0].scales()[1] is None
    if exact and (factor := _positive_scalar(args[1])) is not None:
        weights[0].scale.mul_(factor)
        ops.count_write(weights[0])
        return
    base = weights[0]._base
    # A shard of FSDP2 is a part only of its padding, which nobody reads.
    if base is not None and weights[0].scheme.shape != base.shape and weights[0]._rank is None:
        raise NotImplementedError(
            f"{func} on a part of a weight in {weights[0].scheme.weight.dtype}, which has scales for its rows; this "
            "optimizer cannot update such a weight: torch.optim's SGD, Adam and AdamW can, which update it as a whole"
        )
    plain: dict[int, Tensor] = {}

    def values_of(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, WeightInCodes):
            return plain.setdefault(id(tensor), tensor.float()) if func in FUSED else tensor
        return plain.setdefault(id(tensor), tensor.dequantize(torch.float32))

    plain_args, plain_kwargs = tree_map_only(Tensor, values_of, (args, kwargs))
    try:
        func(*plain_args, **plain_kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"an optimizer that updates by {func} cannot update a weight in {weights[0].scheme.weight.dtype}: {error}"
        ) from error
    for tensor in tree_iter(written):
        if isinstance(tensor, WeightInCodes):
            _store(tensor, plain[id(tensor)])
        elif isinstance(tensor, Tensor) and plain.get(id(tensor), tensor) is not tensor:
            tensor.copy_(plain[id(tensor)])


def _positive_scalar(value: Any) -> float | Tensor | None:
    if isinstance(value, Tensor):
        return value if value.dim() == 0 and bool(value > 0) else None
    return value if value > 0 else None


@torch.no_grad()
def _store(weight: WeightInCodes, source: Tensor) -> None:
    """Quantize `source` into `weight`, rounding as its spec says; codes of the same spec are copied."""
    if tuple(source.shape) != weight.scheme.shape:
        raise ValueError(f"copy_: the target has shape {weight.scheme.shape}, the source {tuple(source.shape)}")
    ops.check_copy(weight, source)
    if weight._copied_parts:
        ops.check_owns_its_scales(weight, source)
    scheme, spec, given = weight.scheme, weight.scheme.weight, getattr(source, "scheme", None)
    new: Any = source
    if not (isinstance(given, Scheme) and ops.same_numbers(given.weight, spec) and given.layout == scheme.layout):
        values = (source.dequantize() if isinstance(source, QuantizedTensor) else source).to(weight.device)
        tensors, zero_point = covering_qparams(spec, values, weight.scale.dtype)
        scale = double_quant.dequantize_scale(tensors, spec.scale_spec)
        other = zero_point if weight.per_block == "zero_point" else weight.table  # type: ignore[attr-defined]
        codes = spec.quantize(values, scale, other, _noise(weight))
        new = weight._from_codes(codes, {**tensors, weight.per_block: other}, scheme.spec, scheme.dtype)
    for name, inner in weight.inner_tensors.items():
        inner.copy_(getattr(new, name))
    ops.count_write(weight)


def _noise(weight: WeightInCodes) -> torch.Generator | None:
    """The source of randomness: torch's default generator, so that `torch.manual_seed` reproduces a run, or that of
    `share_rounding`; for a shard of FSDP one that starts there too, but differs from rank to rank."""
    rank, shared = weight._rank, weight._shared_rounding
    if rank is None and shared is None:
        return None
    seed = int(torch.randint(2**62, (), device="cpu")) if shared is None else shared.next_seed()
    return torch.Generator(weight.device).manual_seed((seed + (rank or 0) * _RANK_STRIDE) % 2**63)


def share_rounding(model: nn.Module, seed: int, step: int = 0) -> None:
    """Round each update of the weights in codes by noise that depends on (seed, step, number of the weight) alone.

    Otherwise the noise comes from torch's default generator, whose state must then be the same on all ranks, and which
    a dropout or a data loader of one rank moves on. `DistributedDataParallel` calls it by itself, with a seed of rank
    0. Shards of FSDP2 have different noise all the same; call it after `fully_shard`.

    Args:
        model: the same on all ranks; weights that are not in codes are left as they are.
        seed: the same on all ranks.
        step: updates so far, to go on with a run exactly.
    """
    check_model("share_rounding", model)
    for number, parameter in enumerate(model.parameters()):
        weight = getattr(parameter, "_local_tensor", parameter)
        if isinstance(weight, WeightInCodes):
            vars(weight)["_shared_rounding"] = SharedRounding(seed, number, step)
