"""The quantized matrices of a checkpoint, or those that a recipe would make of it, without their data."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..checkpoint import formats  # noqa: F401 (registers the formats)
from ..checkpoint.sources import Contents, Source
from ..checkpoint.streaming import assignment, partial
from ..dtypes.matrix_weight import MatrixScheme
from ..model.misfit import Padded
from ..primitives.spec import Scheme
from ..recipes.base import WeightRecipe
from .arguments import UsageError
from .recipes import asked_recipe, asked_targets


class Matrix(NamedTuple):
    """A weight with its scheme, and the operation that it serves."""

    name: str
    op: str
    scheme: Scheme


def matrices(arguments: argparse.Namespace) -> list[Matrix]:
    """The quantized weights of ``arguments.path``, as they are or as the recipe of the command line makes them."""
    with partial.open_any(arguments.path) as source:
        contents = {name: source.contents(name) for name in sorted(source.names - source.aliases.keys())}
        found = []
        for name, of in contents.items():
            if (scheme := of.scheme) is not None:
                matrix = scheme.matrix if isinstance(scheme, MatrixScheme) else scheme
                # Fused experts run as separate linear layers.
                found.append(Matrix(name, "linear", replace(matrix, shape=tuple(matrix.shape[-2:]))))
        if arguments.recipe is not None or arguments.config is not None:
            found += _assigned(arguments, source, contents)
    if not found:
        raise UsageError(f"{arguments.path}: no weight is quantized; give a --recipe")
    return sorted(found)


def _assigned(arguments: argparse.Namespace, source: Source, contents: Mapping[str, Contents]) -> list[Matrix]:
    config, reach = partial.model_config(arguments.path), asked_targets(arguments)
    # As `qtorch quantize` writes it by default.
    format = "transformers" if (arguments.path / "config.json").is_file() else "qtorch"
    targets = assignment.assign(contents, asked_recipe(arguments), source, config, format, reach, arguments.on_misfit)
    found = []
    for name, target in targets.items():
        recipe: Any = target.recipe
        of = contents[name]
        rows, columns = target.kind.matrix_shape(of.shape)[-2:]
        if isinstance(recipe, Padded):
            recipe, columns = recipe.recipe, columns + recipe.padding
        if isinstance(recipe, WeightRecipe):
            op = "embedding" if target.kind.name == "embedding" else "linear"
            found.append(Matrix(name, op, _made(recipe, (rows, columns), of.dtype)))
    return found


@functools.lru_cache
def _made(recipe: WeightRecipe, shape: tuple[int, ...], dtype: torch.dtype) -> Scheme:
    """The scheme of a weight that a recipe makes, found by making a few rows of it."""
    rows = recipe.linear_spec().weight.block_size(shape)[0]
    made = recipe.apply(torch.zeros(rows, shape[1], dtype=dtype, device="cpu"))
    scheme: Scheme = made.scheme  # type: ignore[attr-defined]
    return replace(scheme, shape=shape)
