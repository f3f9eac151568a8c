"""How the moments of a parameter are held: in fp32, or in codes of which size, in which blocks; and what of them lies
in this process, where the parameter is a DTensor.

The answer depends on the whole parameter, also where it is sharded, so that a checkpoint of shards and one of the whole
hold the same codes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes.blocked_tensor import BlockedScheme, BlockedTensor, same_codes
from ...kernels.ops.adam import FORMS, Moment
from ...primitives import CodebookSpec, LinearSpec, granularity
from ...primitives.tracing import is_sharded

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


def form_of(parameter: Tensor, group: Mapping[str, Any]) -> str:
    """The form of the moments: a name of `FORMS`, or "32"."""
    return "32" if parameter.numel() < SMALLEST else BITS[group["optim_bits"]]


def blocks_of(shape: Sequence[int], block_size: int) -> tuple[int, bool]:
    """(elements of a block, whether blocks run over all elements) of a parameter of this shape. Blocks of matrices end
    with their rows: a shard along the first axis never cuts one. They are as long as each other, at most
    `block_size`."""
    length, count = math.prod(shape[1:]), math.prod(shape)
    if len(shape) < 2 or length < SHORT_ROW:
        return max(1, min(block_size, count if count >= LONG_VECTOR else VECTOR_BLOCK)), True
    return -(-length // -(-length // block_size)), False


def scheme_of(parameter: Tensor, group: Mapping[str, Any], name: str) -> BlockedScheme | None:
    """The scheme of the moment `name` of this process's part of a parameter, or None for fp32."""
    form = form_of(parameter, group)
    if form == "32":
        return None
    root = name.endswith("_sq")
    spec = FORMS[form].second if root else FORMS[form].first
    block, flat = blocks_of(parameter.shape, group["block_size"])
    return BlockedScheme(LinearSpec(spec), tuple(local_of(parameter).shape), torch.float32, block, flat, root)


def flat_blocks(whole: Sequence[int], local: Tensor, block_size: int) -> granularity.FlatBlocks:
    """The blocks of `local`, the part that this process has of a parameter of the shape `whole`."""
    block, flat = blocks_of(whole, block_size)
    rows = 1 if flat else local.shape[0]
    return granularity.FlatBlocks(rows, local.numel() // rows, block)


def zeros(parameter: Tensor, group: Mapping[str, Any], name: str) -> Tensor:
    """The moment `name` of a parameter before the first step."""
    local, scheme = local_of(parameter), scheme_of(parameter, group, name)
    if scheme is None:
        return like(parameter, torch.zeros(local.shape, dtype=torch.float32, device=local.device))
    return like(parameter, _with_shared_table(BlockedTensor.zeros(scheme, local.device)))


def converted(parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor) -> Tensor:
    """A moment from a checkpoint, of any form but of the parameter's shape, in the form that its moments have here."""
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"the checkpoint has {name} of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
        )
    local, scheme = local_of(parameter), scheme_of(parameter, group, name)
    part: Any = local_of(value)
    if part is value and is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        whole = value.dequantize() if isinstance(value, BlockedTensor) else value
        part = local_of(distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]
    if isinstance(part, BlockedTensor):
        if scheme is not None:
            same_layout = replace(scheme, spec=replace(scheme.spec, layout=part.scheme.layout))
            if same_codes(same_layout, part.scheme):
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


@functools.cache
def _table(spec: CodebookSpec, device: torch.device) -> Tensor:
    return torch.tensor(spec.table, dtype=torch.float32, device=device)


def _with_shared_table(tensor: BlockedTensor) -> BlockedTensor:
    """The tensor with a look-up table that all moments of its form share."""
    if "table" not in tensor.inner_tensors:
        return tensor
    table = _table(tensor.scheme.weight, tensor.device)
    return BlockedTensor({**tensor.inner_tensors, "table": table}, tensor.scheme)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a parameter, a gradient or a state that this process holds."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(parameter: Any, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """`local`, a state of the parameter's part, sharded as the parameter is; `shape` is that of the whole, if not the
    parameter's."""
    if not is_sharded(parameter):
        return local
    whole, place = torch.Size(shape or parameter.shape), (parameter.device_mesh, parameter.placements)
    made: Tensor = type(parameter).from_local(local, *place, run_check=False, shape=whole, stride=_row_major(whole))
    return made


def first_element(parameter: Any) -> int:
    """The number of the first element of this process's part, in row-major order of the whole parameter."""
    if not is_sharded(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return sum(offset * stride for offset, stride in zip(offsets, _row_major(parameter.shape), strict=True))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
