"""How the moments of a parameter are held: in fp32, or in codes of which size, in which blocks.

The answer depends on the whole parameter, also where it is sharded, so that a checkpoint of shards and one of the whole
hold the same codes.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes.blocked_tensor import BlockedScheme, BlockedTensor, same_codes
from ...kernels.ops.adam import FORMS, Moment
from ...primitives import LinearSpec
from ...primitives.codebooks import CodebookSpec
from .shard import like, local_of

SMALLEST = 4096
"""Parameters of fewer elements have fp32 moments, as in bitsandbytes and torchao: they take little memory, and norms
and biases need the precision."""

SHORT_ROW = 64
"""Rows of fewer elements would have too many scales; blocks run over several of them."""

VECTOR_BLOCK, LONG_VECTOR = 64, 1 << 20
"""Blocks of vectors and matrices of short rows, which shards may cut; and the number of elements from which they are of
full size. With 64, norms of 4096 features can be sharded over 64 processes."""

BITS = {32: "32", 8: "8", 4: "4", "fp8": "float8"}
"""What `optim_bits` of a parameter group may be, and the form of `kernels.ops.adam`."""


def check_optim_bits(value: object) -> None:
    """Raise `ValueError` unless `value` is a key of `BITS`."""
    if value not in BITS:
        raise ValueError(f"optim_bits is {', '.join(map(repr, BITS))}, got {value!r}")


def form_of(parameter: Tensor, group: Mapping[str, Any]) -> str:
    """The form of the moments: a name of `FORMS`, or "32"."""
    return "32" if parameter.numel() < SMALLEST else BITS[group["optim_bits"]]


def blocks_of(shape: Sequence[int], block_size: int) -> tuple[int, bool]:
    """(elements of a block, whether blocks run over all elements) of a parameter of this shape.

    Blocks of matrices end with their rows: a shard along the first axis never cuts one. They are as long as each other,
    at most `block_size`.
    """
    length, count = math.prod(shape[1:]), math.prod(shape)
    if len(shape) < 2 or length < SHORT_ROW:
        return max(1, min(block_size, count if count >= LONG_VECTOR else VECTOR_BLOCK)), True
    return -(-length // -(-length // block_size)), False


def scheme_of(parameter: Tensor, group: Mapping[str, Any], name: str) -> BlockedScheme | None:
    """The scheme of the moment `name` of this process's part of a parameter, or None for fp32."""
    form = form_of(parameter, group)
    if form == "32":
        return None
    root = name != "exp_avg"
    spec = FORMS[form].second if root else FORMS[form].first
    block, flat = blocks_of(parameter.shape, group["block_size"])
    return BlockedScheme(LinearSpec(spec), tuple(local_of(parameter).shape), torch.float32, block, flat, root)


def zeros(parameter: Tensor, group: Mapping[str, Any], name: str) -> Tensor:
    """The moment `name` of a parameter before the first step."""
    local, scheme = local_of(parameter), scheme_of(parameter, group, name)
    if scheme is None:
        return like(parameter, torch.zeros(local.shape, dtype=torch.float32, device=local.device))
    return like(parameter, _with_shared_table(BlockedTensor.zeros(scheme, local.device)))


def converted(parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor) -> Tensor:
    """A moment from a checkpoint, of any form, in the form that the parameter's moments have here.

    Raises:
        ValueError: it has another shape than the parameter.
    """
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"the checkpoint has {name} of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
        )
    local, scheme = local_of(parameter), scheme_of(parameter, group, name)
    part = _part_of(parameter, value)
    if isinstance(part, BlockedTensor):
        if scheme is not None and same_codes(_known_layout(scheme, part), part.scheme):
            return like(parameter, _with_shared_table(part.to(local.device, torch.float32)))  # type: ignore[arg-type]
        part = part.dequantize(torch.float32)
    part = part.detach().to(local.device, torch.float32)
    if scheme is None:
        return like(parameter, part.clone())
    return like(parameter, _with_shared_table(BlockedTensor.quantized(part, scheme)))


def as_moment(state: Tensor) -> Moment:
    """The tensors of a moment, as kernels take them."""
    local = local_of(state)
    if isinstance(local, BlockedTensor):
        inner = local.inner_tensors
        return Moment(inner["qdata"], inner["scale"])
    return Moment(local)


def _part_of(parameter: Tensor, value: Tensor) -> Tensor:
    """This process's part of a moment that is sharded as the parameter is, or whole."""
    if value.shape == parameter.shape and local_of(value) is not value:
        return local_of(value)
    if local_of(parameter) is parameter:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.dequantize() if isinstance(value, BlockedTensor) else value
    sharded: Any = distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return local_of(sharded)


def _known_layout(scheme: BlockedScheme, like: BlockedTensor) -> BlockedScheme:
    """`scheme` with the layout that a tensor of it has."""
    return replace(scheme, spec=replace(scheme.spec, layout=like.scheme.layout))


@functools.cache
def _table(spec: CodebookSpec, device: torch.device) -> Tensor:
    return torch.tensor(spec.table, dtype=torch.float32, device=device)


def _with_shared_table(tensor: BlockedTensor) -> BlockedTensor:
    """The tensor with a look-up table that all moments of its form share."""
    if "table" not in tensor.inner_tensors:
        return tensor
    table = _table(tensor.scheme.weight, tensor.device)
    return BlockedTensor({**tensor.inner_tensors, "table": table}, tensor.scheme)


# --------------------------------------------------------------------------------------------------
# Loads: reads the state of an optimizer, its own or that of `torch.optim.Adam` and `AdamW`.
#
# `torch.optim.Optimizer.load_state_dict` casts states to the dtype of their parameter, which would round fp32 moments
# of bf16 parameters. Here a state arrives as it was saved, and in the form that this optimizer holds it in.


OF_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Keys of torch's groups that mean nothing here."""

OWN = ("optim_bits", "block_size", "bf16_stochastic_round")
"""Keys that say how moments are held and parameters rounded: those of this optimizer, whatever the checkpoint says."""


@dataclass(eq=False)
class _Held:
    """A state that `Optimizer.load_state_dict` does not cast."""

    value: Any


class Loads(torch.optim.Optimizer):
    """Mixin of optimizers for loading; see the top of the file."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, of another one of this folder (its moments are quantized anew), or of
        `torch.optim.Adam` or `AdamW`.

        Raises:
            ValueError: the groups differ, a group maximizes, or a state does not fit its parameter.
        """
        state_dict = dict(state_dict)
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        try:
            for hook in hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            groups = [dict(group) for group in state_dict["param_groups"]]
            for group, own in zip(groups, self.param_groups, strict=False):
                if group.get("maximize"):
                    raise ValueError(f"{type(self).__name__} has no maximize=True, which the checkpoint has")
                for name in OF_TORCH:
                    group.pop(name, None)
                defaults = {name: value for name, value in own.items() if name not in ("params", "param_names")}
                group.update({**defaults, **group, **{name: own[name] for name in OWN}})
            state = {
                key: {name: _Held(value) for name, value in of_one.items()}
                for key, of_one in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                found = self.state.get(parameter, {})
                if any(isinstance(value, _Held) for value in found.values()):
                    values = {name: held.value for name, held in found.items()}
                    self.state[parameter] = self._read(parameter, group, values)

    def _read(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, as it was saved, in the form in which it is held here."""
        step = {"step": state["step"].detach().to("cpu", torch.float32).reshape(()).clone()}
        moments = {name: value for name, value in state.items() if name != "step"}
        return {**step, **{name: converted(parameter, group, name, value) for name, value in moments.items()}}
