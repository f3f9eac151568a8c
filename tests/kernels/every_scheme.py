"""A weight of every scheme that is known in every registered layout that takes it.

Schemes are those that `test_linear` names, every number format with a scale per row, and those of every recipe for
inference: a new format, layout, recipe or kernel is in the tests over all kernels by itself.
"""

import functools
from dataclasses import replace

import torch

from qtorch import AffineQuantizedTensor, LinearSpec, PerRow, QuantSpec
from qtorch.primitives import prune_2_4
from qtorch.primitives.layouts import LAYOUTS
from qtorch.primitives.qdtype import QDTYPES
from tests import every_recipe
from tests.kernels.test_linear import SCHEMES

Named = tuple[str, AffineQuantizedTensor]


@functools.cache
def schemes() -> dict[str, LinearSpec]:
    """By name, without those that are equal but for their layout."""
    found = {name: spec for name, (spec, *_) in SCHEMES.items()}
    for dtype in QDTYPES.values():
        if dtype.bits <= 8:
            found[f"{dtype.name} row, symmetric"] = LinearSpec(QuantSpec(dtype, PerRow()))
    for name in every_recipe.NAMES:
        spec = every_recipe.make(name, group_size=32).linear_spec()
        if isinstance(spec.weight, QuantSpec) and not spec.static:
            found[name] = replace(spec, layout=None)
    names = {spec: name for name, spec in reversed(found.items())}
    return {name: spec for name, spec in found.items() if names[spec] == name}


@functools.cache
def weights_of_every_scheme(dtype: torch.dtype, rows: int = 64) -> list[Named]:
    """Of `rows` times 192 elements, with the names of scheme and layout."""
    return [named for name, spec in schemes().items() for named in in_every_layout(name, spec, dtype, rows)]


def in_every_layout(
    name: str, spec: LinearSpec, dtype: torch.dtype = torch.float32, rows: int = 64, values: torch.Tensor | None = None
) -> list[Named]:
    """A weight of one scheme in every layout that takes it; of `values`, by default the same on each call."""
    normal = torch.randn(rows, 192, generator=torch.Generator().manual_seed(0)) if values is None else values
    normal = normal.to(dtype)
    made = []
    for layout in LAYOUTS.values():
        kept = normal if layout.any_codes else prune_2_4(normal)
        try:
            weight = AffineQuantizedTensor.from_float(kept, replace(spec, layout=layout()))
        except (ValueError, TypeError):  # the layout does not take it
            continue
        made.append((f"{name}, {layout.name}", weight))
    return made
