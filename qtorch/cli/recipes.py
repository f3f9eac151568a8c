"""Recipes as text: ``int4_weight_only(group_size=32)``, the form in which reports print them.

Only literals and constructors of this package are evaluated: recipes, scale rules, layouts, granularities, specs.
`matrices` are the quantized matrices of a checkpoint, or those that a recipe would make of it, without their data.
"""

import argparse
import ast
import enum
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import calibration, training  # noqa: F401 (their recipes and classes are named in arguments)
from ..checkpoint import formats  # noqa: F401 (registers the formats)
from ..checkpoint.sources import Contents, Source
from ..checkpoint.streaming import assignment, partial
from ..dtypes.matrix_weight import MatrixScheme
from ..model.misfit import Padded
from ..primitives import Scheme, files, from_json
from ..primitives.jsonable import CLASSES, is_class
from ..recipes.base import RECIPES, Recipe, WeightRecipe
from .arguments import UsageError, unknown_recipe


def asked_targets(arguments: argparse.Namespace) -> str | list[str]:
    """The argument `targets` of `quantize_` that the command line asks for."""
    words: list[str] = arguments.targets.split(",")
    return words[0] if len(words) == 1 else words


def asked_recipe(arguments: argparse.Namespace) -> Recipe | dict[str, Recipe | None]:
    """What ``--recipe``, ``--set`` and ``--config`` ask for."""
    if arguments.config is not None:
        return read_config(arguments.config)
    return read_recipe(arguments.recipe, arguments.set)


def read_recipe(text: str, settings: list[str] | None = None) -> Recipe:
    """The recipe that `text` stands for, with the arguments of `settings`, each ``name=value``."""
    name, keywords = text.strip(), {}
    positional: list[Any] = []
    if "(" in name:
        call = _parsed(name)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise UsageError(f"{text!r} is not a recipe such as int4_weight_only(group_size=32)")
        name = call.func.id
        positional = [_value(argument) for argument in call.args]
        keywords = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    kind = _recipe(name)
    for setting in settings or []:
        key, _, value = setting.partition("=")
        keywords[key.strip()] = _value(_parsed(value.strip()))
    return _make(kind, positional, keywords, name)


def _recipe(name: str) -> Callable[..., Any]:
    if name not in RECIPES:
        raise UsageError(unknown_recipe(name, RECIPES))
    return RECIPES[name]


def read_config(path: Path) -> dict[str, Recipe | None]:
    """A mapping from names to recipes, from a JSON file: null, a recipe as text, ``{"recipe": "int4_weight_only",
    "group_size": 32}``, or JSON data of `to_json`."""
    try:
        data = files.read_json(path)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    if not isinstance(data, dict) or not data:
        raise UsageError(f'{path}: holds no object such as {{"lm_head": null, ".*": "int8_weight_only"}}')
    found = {}
    for name, value in data.items():
        try:
            found[name] = _of_json(value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}: {name}: {error}") from error
    return found


def _of_json(value: Any) -> Recipe | None:
    if value is None:
        return None
    if isinstance(value, str):
        return read_recipe(value)
    if isinstance(value, dict) and "recipe" in value:
        name, rest = str(value["recipe"]), {key: text for key, text in value.items() if key != "recipe"}
        given = {key: _value(_parsed(text)) if isinstance(text, str) else text for key, text in rest.items()}
        return _make(_recipe(name), [], given, name)
    made = from_json(value)
    if not isinstance(made, Recipe):
        raise UsageError(f"is no recipe: {value!r:.80}")
    return made


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return ast.Constant(text)


def _value(node: ast.expr) -> Any:
    """The value of a literal, of a name of this package or of torch, or of a call of a constructor of this package."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if (kind := RECIPES.get(name) or CLASSES.get(name)) is None:
            raise UsageError(f"there is no recipe, rule, layout or granularity {name!r}")
        keywords = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        return _make(kind, [_value(argument) for argument in node.args], keywords, name)
    if isinstance(node, ast.Name):
        # The name of a member of an enumeration, or of a dtype; the type of the argument decides.
        return _Word(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _member(node.value.id, node.attr)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(f"cannot read {ast.unparse(node)!r}: write a number, a text, or a call") from error


class _Word(str):
    """A bare name."""


def _member(owner: str, name: str) -> Any:
    if owner == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    kind = CLASSES.get(owner)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise UsageError(f"there is no {owner}.{name}")


def _make(kind: Callable[..., Any], positional: list[Any], keywords: dict[str, Any], name: str) -> Any:
    try:
        hints = typing.get_type_hints(kind)
    except NameError:
        hints = {}
    given = {key: _fitted(value, hints.get(key)) for key, value in keywords.items()}
    plain = [_fitted(value, hint) for value, hint in zip(positional, [*hints.values(), *[None] * len(positional)])]
    try:
        return kind(*plain, **given)
    except (TypeError, ValueError) as error:
        text = str(error).replace(f"{getattr(kind, '__name__', name)}.__init__()", f"{name}()")
        raise UsageError(text if text.startswith(name) else f"{name}: {text}") from error


def _fitted(value: Any, hint: Any) -> Any:
    """A bare name as what the argument takes: a member of an enumeration, a dtype, or text."""
    if not isinstance(value, _Word):
        return value
    for kind in (hint, *typing.get_args(hint)):
        if is_class(kind) and issubclass(kind, enum.Enum) and value in kind.__members__:
            return kind[value]
        if kind is torch.dtype and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
    return str(value)


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
            found.append(Matrix(name, op, _scheme_of(recipe, (rows, columns), of.dtype)))
    return found


@functools.lru_cache
def _scheme_of(recipe: WeightRecipe, shape: tuple[int, ...], dtype: torch.dtype) -> Scheme:
    """The scheme of a weight that a recipe makes, found by making a few rows of it."""
    rows = recipe.linear_spec().weight.block_size(shape)[0]
    made = recipe.apply(torch.zeros(rows, shape[1], dtype=dtype, device="cpu"))
    scheme: Scheme = made.scheme  # type: ignore[attr-defined]
    return replace(scheme, shape=shape)
