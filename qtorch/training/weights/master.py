"""MasterWeight: a parameter in floating point whose matmuls run in low precision.

It holds one plain tensor, `master`, and a `TrainingSpec`, or another description that has a `linear_spec`. All
operations except products run on `master`, so that optimizers and checkpoints see an ordinary parameter. Views, copies
and moves return another `MasterWeight`; all other operations return a plain tensor. A product that does not run in the
engine raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from ...dtypes import AffineQuantizedTensor, base
from ...kernels.registry import scale_per_row
from ...model.install import check_model
from ...primitives import LinearSpec, PerGroup, QuantSpec, Scheme, granularity, is_compiling
from ...primitives.layouts import Form, Forms
from ..engine import contraction, operand
from ..engine.gemm_spec import TrainingSpec
from ..engine.split import check_split
from .base import TrainingScheme, TrainingWeight, of_codes, written_by
from .gathered import SentCodes, codes_to_send, joined_scales, one_scale

aten = torch.ops.aten

_VIEWS = "alias as_strided chunk clone detach expand permute split_with_sizes squeeze t unsqueeze view _unsafe_view"
_COPIES = "empty_like new_empty new_zeros _pin_memory _to_copy"
KEEPS_TYPE = {getattr(aten, name).default for name in f"{_VIEWS} {_COPIES}".split()}
KEEPS_TYPE |= {aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.squeeze.dim, aten.squeeze.dims}
KEEPS_TYPE |= {aten.transpose.int, aten.unbind.int}
"""Operators whose result is a weight in training. `zeros_like`, which makes the state of an optimizer, is not here."""

_PRODUCTS = "addbmm addmm addmv baddbmm bmm convolution dot embedding linear matmul mm mv vdot _grouped_mm _trilinear"
_FUSED = "_native_multi_head_attention _transformer_encoder_layer_fwd"
PRODUCTS = {getattr(aten, name).default for name in f"{_PRODUCTS} {_FUSED}".split()}

_ARRANGE = "stack cat index index_select flip roll repeat constant_pad_nd tril triu"
ARRANGED = [getattr(aten, name) for name in _ARRANGE.split()]
"""Operators that put rows and columns of weights together anew: whatever multiplies the result takes plain floats."""

OF_PENALTIES = (aten.abs, aten.pow, aten.sub)
"""Functions of single elements of which losses are made, if all tensors have the shape of the result."""

NARROW = (torch.bfloat16, torch.float16)
"""Small updates vanish in weights of these dtypes."""

LOST_SHARE = 0.5
"""Share of a weight's updates that may vanish in rounding before there is a warning."""

CHECKED_UPDATES = (1, 2, 10, 100, 1000)
"""The updates of a 16-bit weight that are checked for loss in rounding. A check copies the weight."""


class MasterWeight(TrainingWeight):
    """See the top of the file. A subclass may take another type of `scheme.training`, `training_type`."""

    scheme_type = TrainingScheme
    training_type: ClassVar[type] = TrainingSpec
    master: Tensor
    _updates: int = 0
    _precomputed: tuple[int, Tensor] | None = None

    @classmethod
    def forms(cls, scheme: Any) -> Forms:
        if not isinstance(scheme.training, cls.training_type):
            raise ValueError(f"a {cls.__name__} has a {cls.training_type.__name__}, got {scheme.training!r}")
        return {"master": (Form(scheme.shape, {scheme.master_dtype or scheme.dtype}),)}

    @staticmethod
    def __new__(cls: Any, tensors: Any, scheme: Any = None, requires_grad: bool = False) -> MasterWeight:
        parts, scheme = base.parts_of(cls, tensors, scheme)
        master: Any = parts["master"]
        place = {"strides": master.stride(), "storage_offset": master.storage_offset(), "device": master.device}
        made: MasterWeight = base.make_wrapper(cls, master.shape, dtype=scheme.dtype, **place)
        return made

    @classmethod
    def tensor_names(cls, scheme: Any) -> tuple[str, ...]:
        return ("master",)

    @classmethod
    def of(cls, master: Tensor, spec: TrainingSpec | Any, dtype: torch.dtype | None = None) -> MasterWeight:
        """A weight in training that holds `master` itself; `dtype` is its own, if not that of `master`."""
        held = None if dtype in (None, master.dtype) else master.dtype
        return cls({"master": master}, TrainingScheme(spec, tuple(master.shape), dtype or master.dtype, held))

    def floats(self) -> Tensor:
        return self.master

    def check_convert(self) -> None:
        if isinstance(self._training, TrainingSpec):
            self._training.check_convert()

    def check_split(self, axis: str, part: int, whole: int) -> None:
        check_split(self.training_spec, axis, part, whole)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The master weight itself, which holds all of its precision."""
        return self.master.to(dtype or self.dtype)

    def convert(self) -> Tensor:
        """The master weight as the forward quantizes it; itself, plain, if the forward does not."""
        weight, spec = self.master.detach(), self.training_spec
        linear = spec.linear_spec
        if linear is None or spec.output.rhs is None:
            return weight
        rhs = spec.output.rhs.to_nearest()
        rhs.block_size(weight.shape)
        if rhs.scale_spec is not None:
            return _with_quantized_scales(weight, rhs, linear)
        if weight.dim() == 2:
            codes, _, scale, zero_point, _ = operand.quantize_operand(weight, rhs)
            assert scale is not None
            return of_codes(codes, scale, zero_point, linear, weight.dtype)
        return self._of_experts([operand.quantize_operand(matrix, rhs) for matrix in weight], linear)

    def _of_experts(self, matrices: list[operand.Operand], linear: LinearSpec) -> Tensor:
        """The weight (E, N, K) of matrices that have scales of their own."""
        rows, columns = linear.weight.granularity.pattern(2)
        spec = replace(linear, weight=linear.weight.with_granularity(granularity.granularity_of((1, rows, columns))))
        one = [of_codes(m.values, m.scale, m.zero_point, linear, self.dtype).plain() for m in matrices]  # type: ignore[arg-type]
        codes, scale, zero_point = (None if of[0] is None else torch.stack(of) for of in zip(*one, strict=True))
        assert codes is not None
        assert scale is not None
        return AffineQuantizedTensor.from_plain(codes, scale, zero_point, spec, self.dtype)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        raise ValueError("a weight in training is not converted yet: quantize_(model, convert()), or torch.save it")

    def map_inner(self, function: Callable[[Tensor], Tensor], scheme: Any = None) -> MasterWeight:
        return self._like(function(self.master), self._training)

    def _like(self, master: Tensor, training: TrainingSpec | Any) -> MasterWeight:
        """Another master weight as a weight of this dtype, unless it is in another dtype than that of this one."""
        return type(self).of(master, training, self.dtype if master.dtype == self.master.dtype else None)

    @property
    def _training(self) -> TrainingSpec | Any:
        return self.scheme.training  # type: ignore[attr-defined]

    def _training_of_view(self, func: Any, args: Any) -> TrainingSpec | Any:
        """The description of the result of an operator of KEEPS_TYPE on this weight."""
        return self._training

    def _training_of_whole(self) -> TrainingSpec | Any:
        """The description of the parameter that this weight is a shard of."""
        return self._training

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in PRODUCTS:
            raise NotImplementedError(
                f"{func} with a weight in training would run in full precision; call F.linear, matmul or "
                "qtorch.training.quantized_matmul or quantized_einsum. torch.func.grad with respect to such a weight "
                "hides what it is: use torch.autograd.grad or backward()"
            )
        if torch.is_inference_mode_enabled() and func not in KEEPS_TYPE:  # composites arrive here whole
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        weight = next((arg for arg in args if isinstance(arg, cls)), None)
        if weight is not None and weight is args[0] and weight.dtype in NARROW and func._schema.is_mutable:
            return weight._checked_update(func, args, kwargs)
        if func in KEEPS_TYPE and weight is not None and kwargs.get("dtype") is weight.dtype:
            kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}  # a move alone
        keeps = func in KEEPS_TYPE and weight is not None and kwargs.get("dtype") is None
        whole = keeps or func._schema.is_mutable
        floats = lambda w: w.master if whole else w.master.to(w.dtype)  # noqa: E731
        plain_args, plain_kwargs = tree_map_only(cls, floats, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if func is aten.stack.default or (torch.is_grad_enabled() and func not in KEEPS_TYPE):
            _check_function(func, args, result)
        if func._schema.is_mutable:
            _count_writes(func, plain_args, plain_kwargs)
        if func in KEEPS_TYPE and weight is not None:
            spec = weight._training_of_view(func, args)
            like = weight._like if keeps else cls.of
            result = tree_map_only(Tensor, lambda tensor: like(tensor, spec), result)
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs, result)

    def _checked_update(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An in-place update of a 16-bit weight, with a warning where many of its elements vanish in rounding."""
        updates = vars(self)["_updates"] = self._updates + 1
        plain_args, plain_kwargs = tree_map_only(MasterWeight, lambda w: w.master, (args, kwargs))
        # Weight decay, by mul_, vanishes in 16 bits at any common rate: no warning for that alone.
        is_step = func not in (aten.copy_.default, aten.mul_.Tensor, aten.mul_.Scalar) and updates in CHECKED_UPDATES
        before = self.master.clone() if is_step else None
        func(*plain_args, **plain_kwargs)
        _count_writes(func, plain_args, plain_kwargs)
        if before is not None:
            exact = func(before.float(), *plain_args[1:], **plain_kwargs)
            _warn_of_lost_updates(before, self.master, exact)
        return self

    # FSDP2 gathers codes where all products take the same (`gathered`), else the master weight; under mixed precision
    # the weight has the dtype of the policy.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        # Codes are made of all bits of the weight; where it has none, products take the rounded weight.
        dtype, spec = None if mp_policy is None else mp_policy.param_dtype, self._training
        scale = self.precomputed_scale()
        codes = codes_to_send(self.master, spec, dtype or self.dtype, mesh, outer_size, module, scale)
        if codes is not None:
            return codes.sent, codes
        has_codes = not isinstance(spec, TrainingSpec) or spec.output.rhs is not None or spec.grad_input.rhs is not None
        master = self.master if dtype is None or has_codes else self.master.to(dtype)
        of_rows = master.shape[1:] == outer_size[1:]
        if of_rows and (missing := -(-outer_size[0] // mesh.size()) - master.shape[0]):
            # All shards send the padded size; padding is zeros at the end of the last shards.
            master = torch.cat([master, master.new_zeros((missing, *master.shape[1:]))])
        return (master,), (self._training_of_whole(), outer_size[0] if of_rows else None, dtype)

    def precomputed_scale(self) -> Tensor | None:
        """The scale of the whole weight that `precompute_scales_for_fsdp` has found, if this shard is as it was."""
        version, scale = self._precomputed or (None, None)
        return scale if version == self.master._version else None

    @classmethod
    def scales_of_whole(cls, parameters: list[Any], mesh: Any) -> list[tuple[Any, Tensor]]:
        """The sharded `parameters` of this class that are gathered as codes with one scale, each with its scale."""
        found = [(p, spec) for p in parameters if p.dim() == 2 and (spec := one_scale(p._local_tensor._training))]
        scales = joined_scales([(spec, p._local_tensor.master) for p, spec in found], mesh) if found else []
        return [(p, scale) for (p, _), scale in zip(found, scales, strict=True)]

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if isinstance(metadata, SentCodes):
            return metadata.whole(all_gather_outputs, out)
        (master,), (training, rows, dtype) = all_gather_outputs, metadata
        if out is not None:
            return None  # its master is the gathered memory itself
        return type(self).of(master[:rows], training, dtype), all_gather_outputs

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({self._training}, shape={tuple(self.shape)}, dtype={self.dtype}{grad})"


@torch.no_grad()
def precompute_scales_for_fsdp(model: nn.Module) -> None:
    """After each step of the optimizer: the scales of all weights of a model sharded by FSDP2 that are gathered as
    codes with one scale for the tensor, in one all-reduce (and one for the means of BitNet, if there are any).

    Without this call each weight takes an all-reduce when it is gathered, and so it does when it was changed after the
    call, unless through `.data`. Other weights are left alone.

    Raises:
        TypeError: `model` is not a module.
    """
    check_model("precompute_scales_for_fsdp", model)
    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        shard: Any = getattr(parameter, "_local_tensor", None)
        if isinstance(shard, MasterWeight):
            *replicas, last = parameter.placements  # type: ignore[attr-defined]
            if last.is_shard() and all(place.is_replicate() for place in replicas):  # cut by nothing else
                groups.setdefault((type(shard), parameter.device_mesh), []).append(parameter)  # type: ignore[attr-defined]
    for (kind, mesh), parameters in groups.items():
        for parameter, scale in kind.scales_of_whole(parameters, mesh):
            shard = parameter._local_tensor
            vars(shard)["_precomputed"] = (shard.master._version, scale)


def _with_quantized_scales(weight: Tensor, spec: QuantSpec, linear: LinearSpec) -> Tensor:
    """The weight (N, K), or (E, N, K) of matrices quantized one by one, by a `spec` whose scales are quantized too; the
    scales of blocks of several rows are repeated for each row, as `linear` has them."""
    codes, scales = [], []
    for matrix in weight.unflatten(0, (1, -1)) if weight.dim() == 2 else weight:
        stored, zero_point = spec.choose_stored_qparams(matrix)
        codes.append(spec.quantize(matrix, *spec.dense_qparams(stored, zero_point)))
        blocks = linear.weight.scale_shape(matrix.shape)
        scales.append({**stored, "scale": scale_per_row(stored["scale"].view(torch.uint8), blocks[0])})
    others = {name: torch.cat([one[name] for one in scales]) for name in scales[0]}
    others["scale"] = others["scale"].view(stored["scale"].dtype)
    if weight.dim() == 3:
        assert linear.weight.scale_spec is not None
        block = granularity.granularity_of((1, *linear.weight.granularity.pattern(2)))
        own = linear.weight.scale_spec.with_granularity(PerGroup(math.prod(blocks)))
        linear = replace(linear, weight=replace(linear.weight, granularity=block, scale_spec=own))
        others["scale"] = others["scale"].unflatten(0, (weight.shape[0], -1))
    return AffineQuantizedTensor.from_canonical(
        torch.cat(codes).view(weight.shape), others, Scheme(linear, tuple(weight.shape), weight.dtype)
    )


def _check_function(func: Any, args: Any, result: Any) -> None:
    """Refuse, or warn of, a function of weights that is most likely multiplied, in full precision then."""
    kind, tensors = func.overloadpacket, [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
    train = kind is aten.stack or any(isinstance(tensor, MasterWeight) and tensor.requires_grad for tensor in tensors)
    if not train or not isinstance(result, Tensor) or result.dim() < 2:
        return
    if kind in ARRANGED:
        raise NotImplementedError(
            f"{func} of weights in training would multiply in full precision: multiply by each of them, "
            "look rows up by F.embedding, or take what dequantize() returns, which does not train"
        )
    penalty = kind in OF_PENALTIES and all(tensor.shape == result.shape for tensor in tensors)
    if torch.Tag.pointwise in func.tags and result.is_floating_point() and not penalty:
        contraction.warn_once(
            f"{func}",
            f"{func} of a weight in training is a plain tensor: where it is multiplied, that is in full precision; "
            "leave such a layer in floating point (None), or call qtorch.training.quantized_matmul",
        )


def _count_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Count a write to the inner tensors: below autograd torch does not, and a backward checks these counts."""
    if is_compiling():
        return
    for tensor in tree_iter(written_by(func, args, kwargs)):
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _warn_of_lost_updates(before: Tensor, after: Tensor, exact: Tensor) -> None:
    """Warn if rounding `exact` (fp32) to the 16 bits of `before` loses many updates; `after` is the rounded weight."""
    moved = exact != before.float()
    count = int(moved.sum())
    lost = int((moved & (after == before)).sum())
    if count and lost > LOST_SHARE * count:
        contraction.warn_once(
            "lost updates",
            f"{lost / count:.0%} of an update of a {str(before.dtype).removeprefix('torch.')} weight of shape "
            f"{tuple(before.shape)} vanish in rounding: they are below half a unit in the last place of the weight. "
            "Keep the weights in fp32 (and use autocast), or use int8_weight_only_quantized_training(), which rounds "
            "stochastically",
        )
