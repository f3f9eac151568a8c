"""FSDP2 of quantized tensors: shards of rows, whose inner tensors are gathered as they are.

`fully_shard` cuts a weight along its first axis and copies each part into `new_zeros` of the same kind. Before a layer
runs, each rank sends the inner tensors that follow the first axis (codes, scales of rows); the others (the scale of the
whole tensor, a table) are on every rank. So a gather takes the bits of the codes, and the weight that comes out is the
one that went in, bit for bit. A mixed-precision policy changes the logical dtype alone.

FSDP2 takes shards of different sizes only if what they send has the padded size of a shard. Then a shard sends one
tensor of that size, with elements wide enough for the bytes of all of its inner tensors.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .copying import forms_of

CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a dtype that every backend sends. Such elements are copied, never computed with."""


@dataclass(frozen=True)
class Gathering:
    """What the hook before a gather tells the one after it.

    Args:
        scheme, padded: of the whole weight and of a shard with its padding.
        ranks: number of shards.
        names: of the inner tensors that are gathered.
        shared: the inner tensors that every rank has.
        versions: number of writes to each inner tensor of the shard.
    """

    scheme: Any
    padded: Any
    ranks: int
    names: tuple[str, ...]
    shared: Mapping[str, Tensor]
    versions: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same size."""
        return bool(self.scheme.shape[0] == self.ranks * self.padded.shape[0])

    def shapes(self, kind: type, scheme: Any) -> list[Sequence[int]]:
        """Shapes of the inner tensors that are gathered, for a weight of this scheme."""
        forms = forms_of(kind, scheme)
        return [forms[name][0].shape for name in self.names]


class Gathered:
    """Mixin of `QuantizedTensor`: the two hooks of FSDP2."""

    _gathered: tuple[int, ...] | None = None

    def fsdp_pre_all_gather(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """(what this shard sends, what `fsdp_post_all_gather` has to know). All ranks raise the error."""
        shape, ranks = tuple(outer_size), mesh.size()
        if shape[1:] != self.scheme.shape[1:]:
            raise ValueError(
                f"FSDP2 shards a quantized weight along its first axis; the weight has shape {shape}, its shard "
                f"{self.scheme.shape}"
            )
        scheme = replace(self.scheme, shape=shape, dtype=getattr(mp_policy, "param_dtype", None) or self.scheme.dtype)
        padded = replace(self.scheme, shape=(-(-shape[0] // ranks), *shape[1:]))
        kind: Any = type(self)
        inner, names = self.inner_tensors, names_of_rows(kind, scheme)
        if ranks == 1:
            # Of a single shard, torch 2.13 passes on one tensor; the others are here already.
            names = names[:1]
        shared = {name: tensor for name, tensor in inner.items() if name not in names}
        versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in inner.values())
        gathering = Gathering(scheme, padded, ranks, names, shared, versions)
        parts = [inner[name].contiguous() for name in names]
        if gathering.is_even:
            return tuple(map(as_sent, parts)), gathering
        return (_joined(parts, gathering.shapes(type(self), padded), padded.shape),), gathering

    def fsdp_post_all_gather(
        self: Any, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight and its memory, or None if `out`, the weight of the last gather, is given."""
        gathering: Gathering = metadata
        dtypes = [self.inner_tensors[name].dtype for name in gathering.names]
        if gathering.is_even:
            parts = [part.view(dtype) for part, dtype in zip(all_gather_outputs, dtypes, strict=True)]
        else:
            parts = _separated(type(self), all_gather_outputs[0], gathering, dtypes)
        if out is None:
            named = dict(zip(gathering.names, parts, strict=True))
            return type(self)({**named, **gathering.shared}, gathering.scheme), tuple(parts)
        whole = getattr(out, "_local_tensor", out)
        own = [getattr(whole, name) for name in gathering.names]
        if not gathering.is_even:  # else they are views of what was gathered
            with torch.autograd._unsafe_preserve_version_counter(tuple(own)):
                for inner, part in zip(own, parts, strict=True):
                    inner.copy_(part)
        if vars(whole).get("_gathered", gathering.versions) != gathering.versions:
            # The shard was written to, so what kernels have prepared from the numbers before is out of date.
            for inner in own:
                if not inner.is_inference():
                    torch.autograd.graph.increment_version(inner)
        vars(whole)["_gathered"] = gathering.versions
        return None


@functools.lru_cache(maxsize=4096)
def names_of_rows(kind: Any, scheme: Any) -> tuple[str, ...]:
    """Names of the inner tensors that follow the first axis of the weight: of twice the rows they are twice as long."""
    shape = scheme.shape
    ndim = len(shape)
    if ndim and scheme.layout.joins_rows(len(scheme.codes_shape)):
        rows = shape[0] or max(1, scheme.weight.granularity.pattern(ndim)[0])
        schemes = [replace(scheme, shape=(n, *shape[1:])) for n in (rows, 2 * rows)]
        once, twice = ({name: tuple(forms[0].shape) for name, forms in forms_of(kind, s).items()} for s in schemes)
        names = tuple(name for name, one in once.items() if one != twice[name])
        if all(twice[name] == (2 * once[name][0], *once[name][1:]) for name in names):
            return names
    raise ValueError(
        f"a {kind.__name__} of shape {shape} with {scheme.spec}, {scheme.layout}, cannot be sharded along its "
        "first axis"
    )


def as_sent(part: Tensor) -> Tensor:
    """An inner tensor in a dtype that every backend sends: small floats as bytes."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


def _joined(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], size: Sequence[int]) -> Tensor:
    """The bytes of the inner tensors of a shard, each padded to its shape of `shapes`, as one tensor of `size`."""
    needed = [math.prod(shape) * part.itemsize for part, shape in zip(parts, shapes, strict=True)]
    count = math.prod(size)
    width = next((width for width in CARRIERS if count * width >= sum(needed)), None)
    if width is None:
        raise ValueError(
            f"FSDP2: shards of different sizes need {sum(needed)} bytes for {count} elements; keep this weight in "
            "float, or take a number of ranks that divides its rows"
        )
    buffer = torch.zeros(count * width, dtype=torch.uint8, device=parts[0].device)
    for place, part in zip(buffer[: sum(needed)].split(needed), parts, strict=True):
        place[: part.nbytes].copy_(part.reshape(-1).view(torch.uint8))
    return buffer.view(CARRIERS[width]).view(tuple(size))


def _separated(kind: type, sent: Tensor, gathering: Gathering, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The inner tensors of the whole weight from what all shards have sent by `_joined`."""
    shapes = gathering.shapes(kind, gathering.padded)
    needed = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    bytes_ = sent.reshape(-1).view(torch.uint8).view(gathering.ranks, -1)[:, : sum(needed)]
    found, wholes = [], gathering.shapes(kind, gathering.scheme)
    for part, dtype, whole in zip(bytes_.split(needed, 1), dtypes, wholes, strict=True):
        # Only the last shards have padding, so the rows of the whole weight come first.
        flat = part.reshape(-1)[: math.prod(whole) * dtype.itemsize]
        found.append(flat.clone().view(dtype).view(tuple(whole)))
    return found
