"""quantize_: turn the weights of a model into quantized tensors, in place.

A recipe (`recipes/base.py`) defines how a weight is quantized. Every registered recipe is an attribute of this module
(``qtorch.quantize_api.int8_weight_only``).
"""

import inspect
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .dtypes import QuantizedTensor
from .dtypes.parameter import OPTIMIZERS
from .kernels.registry import advice
from .model import misfit
from .model.install import Change, PreparedModule, all_or_nothing, check_model, install, keep_attributes, tell
from .model.module_repr import get_model_size_in_bytes, show_quantized
from .model.report import QuantizeReport, quantized_row, skipped_row, warn_of_few_tokens, why_nothing
from .model.targets import Filter, Reach, Refused, Target, find_targets, named_errors
from .primitives.discovery import import_later, no_attribute
from .primitives.granularity import IndivisibleError
from .primitives.tracing import outside_graphs
from .recipes import base
from .recipes.base import RECIPES, Recipe, WeightRecipe, check_float_weight, check_has_values, register_recipe

__all__ = ["RECIPES", "Recipe", "WeightRecipe", "check_float_weight", "dequantize_", "quantize_", "register_recipe"]

CHUNK_BYTES = 1 << 30
"""Size of the new weights that `quantize_` holds in addition to the old ones before it installs them."""


def __getattr__(name: str) -> Any:
    if name not in RECIPES and not name.startswith("_"):
        import_later()
    if name in RECIPES:
        return RECIPES[name]
    raise no_attribute(__name__, name, [*RECIPES, *__all__])


@torch.no_grad()
@outside_graphs("quantize_ replaces the parameters of a model: call it before the compiled function")
@named_errors("quantize_")
def quantize_(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Recipe | tuple[Recipe | None, ...] | None],
    filter_fn: Filter | None = None,
    *,
    targets: Reach = "linear",
    on_misfit: misfit.OnMisfit = "error",
    device: torch.device | str | None = None,
    dry_run: bool = False,
    progress: bool = False,
    resume: str | os.PathLike[str] | None = None,
) -> QuantizeReport:
    """Quantize the weights of `model` in place.

    Every weight is checked and quantized before the first one is replaced: after an error or Ctrl-C the model is
    unchanged. If the new weights take more than `CHUNK_BYTES`, they are installed in chunks, each atomically; after an
    error between two chunks, a second call with the same recipe continues.

    Args:
        model: any module.
        recipe: one recipe for every weight that `targets` reaches; or an ordered mapping from names to recipes, None to
            leave a weight alone. A key is a fully-qualified name (of a linear layer, an embedding, a convolution or a
            2-d or 3-d parameter) or a regular expression that must match the whole name; the first key that matches
            wins. A tuple of recipes stands for the first of them that fits the weight. A wildcard alone matches what
            `targets` reaches; all other weights need a key that names them. A weight is quantized as the matrix
            (outputs, inputs), whichever way around its module stores it; that of a convolution as (output channels,
            kernel positions * input channels).
        filter_fn: (module, fully-qualified name) -> bool; called for each weight that `targets` reaches, and for each
            embedding and convolution.
        targets: what the recipe, or a wildcard, reaches:

            - ``"linear"``: what multiplies like a linear layer: `nn.Linear`, `Conv1D` of transformers, the projections
              of `nn.MultiheadAttention`, and the experts of a mixture in one parameter;
            - ``"all"``: embeddings, convolutions and routers, too;
            - one or some of the kinds ``"experts"``, ``"attention"``, ``"convolution"``, ``"embedding"``, ``"router"``;
            - what `find_uses(model, *inputs)` returns: every parameter that took part in a product, along one axis.

            Routers, which choose among experts, are tiny and stay in floating point, except for ``"all"`` and by name.
            A head that is tied to an embedding is a linear layer: both are quantized, as one weight.
        on_misfit: what becomes of a weight whose contracted axis the groups of its recipe do not divide, or that is too
            small for it:

            - ``"error"``: an error that names all such weights, and the entries of a mapping that fit;
            - ``"pad"``: the last group is completed with zeros, see `PaddedWeight`; for inference, without data;
            - ``"coarser"``: another group size, the largest up to that of the recipe that divides the axis (multiples
              of 32, 16 and 8 come first), else one scale for the whole row; for recipes with a ``group_size``;
            - ``"skip"``: it stays in floating point, and the report says why.
        device: move each weight there before it is quantized, and the rest of the model at the end, so that the peak on
            that device is the quantized model and one layer.
        dry_run: report what would be done; change nothing. Weights on the meta device have sizes in the report, but no
            SQNR and no kernel. Recipes that calibrate in the order of the model are not run: the report has an
            `estimate` of the memory and the time that they will take.
        progress: show a progress bar.
        resume: a folder, for recipes that calibrate in the order of the model. What is done is kept there, block by
            block; if the process dies, the same call with the same model, recipe and data continues, and gives the
            same bits. The folder stays until you remove it.

    Returns:
        A report of what was done to each weight, or why it was skipped; print it.

    Raises:
        ValueError: weights cannot be quantized by their recipe (all are named), an entry of the mapping has no effect,
            `targets` is unknown, there is no such device, or the folder `resume` is that of other weights, another
            recipe or other data.
        TypeError: `recipe` is not a recipe, `model` is not a module, or `filter_fn` takes other arguments.
    """
    check_model("quantize_", model)
    check_are_recipes("quantize_", recipe)
    if filter_fn is not None:
        try:
            with suppress(ValueError):  # functions in C have no signature
                inspect.signature(filter_fn).bind(model, "")
        except TypeError as error:
            what = f"filter_fn is a function (module, name) -> bool, got {filter_fn!r}"
            raise TypeError(f"quantize_: {what}: {error}") from error
    _check_device(device)
    found: list[Target[Any]] = find_targets(model, recipe, filter_fn, targets)

    def check(recipe: Recipe, target: Target[Recipe]) -> None:
        with base.sizes_only(dry_run and recipe.data is None):
            recipe.check_target(target)
            if device is not None:
                check_has_values(target.parameter, recipe)

    misfit.choose(found, on_misfit, check)
    if not any(target.recipe for target in found):
        raise ValueError(f"quantize_: nothing to quantize: {why_nothing(found)}")
    place(found)
    for target in found:
        if target.recipe is not None and target.recipe.has_made(target):
            for slot in target.slots:
                slot.recipe = None

    check_targets(found, check, "\nthe model is unchanged")
    before = get_model_size_in_bytes(model)
    elements = _elements(model, found)
    run: AbstractContextManager[Any] = nullcontext(((), {}, None, {}))
    recipes = [target.recipe for target in found if target.recipe is not None]
    if resume is not None or any(each.data is not None or each.transforms for each in recipes):
        from .calibration.with_data import from_data  # 0.2 s, and most recipes look at no data

        run = from_data(model, found, dry_run, resume)
    with run as (transforms, statistics, expected, calibrated):
        rows = []
        waiting: list[tuple[Target[Any], Any]] = []
        size = 0
        for target in tqdm(found, desc="quantize", disable=not progress):
            if target.recipe is None:
                rows.append(skipped_row(target))
                continue
            weight = target.parameter.detach()
            weight = weight if device is None or weight.is_meta else weight.to(device)
            if target.parameter in calibrated:
                made, calibration, _ = calibrated.pop(target.parameter)
                made = made if device is None else made.to(device)
            else:
                made, calibration = target.recipe.make(target, weight, statistics.get(target.parameter)), None
            rows.append(replace(quantized_row(target, weight, made), calibration=calibration))
            if not dry_run:
                waiting.append((target, made))
                size += made.nbytes
                if size >= CHUNK_BYTES:
                    _install(waiting)
                    size = 0
        _install(waiting)
    if device is not None and not dry_run:
        model.to(device)
    if not dry_run:
        tell(model, {slot.name: target.recipe for target in found if target.recipe for slot in target.slots})
    warn_of_few_tokens("quantize_", rows, stacklevel=5)
    told = advice({row.kernel for row in rows})
    report = QuantizeReport(tuple(rows), dry_run, *elements, before, 0, transforms, expected, told)
    after = before - report.bytes_before + report.bytes_after if dry_run else get_model_size_in_bytes(model)
    return replace(report, model_bytes_after=after)


@torch.no_grad()
@outside_graphs("dequantize_ replaces the parameters of a model: call it before the compiled function")
def dequantize_(model: nn.Module) -> nn.Module:
    """Dequantize every quantized weight of `model` in place; rounding errors remain.

    Tied weights stay tied. The new parameters require gradients, like those of a new module.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no weight of the model is quantized.
    """
    check_model("dequantize_", model)
    done: dict[int, nn.Parameter] = {}
    changes: list[Change] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, QuantizedTensor):
                if id(parameter) not in done:
                    done[id(parameter)] = keep_attributes(nn.Parameter(parameter.dequantize()), parameter)
                changes.append(Change(module._parameters, name, done[id(parameter)]))
    if not done:
        raise ValueError(f"dequantize_: no weight of this {type(model).__name__} is quantized")
    with all_or_nothing(model.modules()):
        install(changes)
        for module in model.modules():
            show_quantized(module)
    tell(model)
    return model


def _install(waiting: list[tuple[Target[Any], Any]]) -> None:
    """Install new weights in their modules, all or none, and empty the list."""
    modules = [module for target, _ in waiting for module in target.modules]
    with all_or_nothing(modules):
        for target, made in waiting:
            assert target.recipe is not None
            target.recipe.install(target, made)
        for module in dict.fromkeys(modules):
            show_quantized(module)
    _warn_of_optimizers([target for target, _ in waiting])
    waiting.clear()


def _warn_of_optimizers(targets: list[Target[Any]]) -> None:
    """Warn of optimizers that would not train these weights, whose parameters were replaced."""
    trained = [target for target in targets if target.recipe and target.recipe.trains]
    replaced = {id(t.parameter) for t in trained if t.slot.module._parameters.get(t.slot.attribute) is not t.parameter}
    for optimizer in list(OPTIMIZERS) if replaced else ():
        if any(id(parameter) in replaced for group in optimizer.param_groups for parameter in group["params"]):
            warnings.warn(
                f"qtorch: the {type(optimizer).__name__} made before quantize_ does not train the weights that it has "
                "replaced; make the optimizer after quantize_",
                stacklevel=6,
            )


def check_are_recipes(function: str, recipe: Any) -> None:
    """Raise `TypeError`, which names `function`, unless `recipe` is a recipe, or a mapping to recipes and None; and
    `ValueError` for a recipe that is not complete."""
    all_given: list[Any] = [recipe]
    if isinstance(recipe, Mapping):
        tuples = [given if given and isinstance(given, tuple) else (given,) for given in recipe.values()]
        all_given = [each for alternatives in tuples for each in alternatives if each is not None]
        if wrong := [key for key in recipe if not isinstance(key, str)]:
            raise TypeError(f"{function}: the mapping takes names and regular expressions, got {wrong[0]!r}")
    for given in all_given:
        if isinstance(given, Recipe):
            try:
                given.check_complete()
            except ValueError as error:
                raise ValueError(f"{function}: {error}") from error
            continue
        describe = base.FOREIGN.get(type(given).__module__.partition(".")[0])
        if describe is not None:
            raise TypeError(f"{function}: takes a recipe of qtorch, got {describe(given)}")
        got = " ".join(f"{given!r:.200}".split())
        raise TypeError(f"{function}: takes a recipe such as int8_weight_only(), got {got}{instead_of(given)}")


def instead_of(given: Any) -> str:
    """What to write in place of what is no recipe, for the end of a message."""
    if isinstance(given, type) and issubclass(given, Recipe):
        return f"; call it: {given.name}()"
    if isinstance(given, list | tuple):
        return "; give one, or a mapping from names to recipes"
    if isinstance(given, str):
        import_later()
        name, _, arguments = given.partition("(")
        near = get_close_matches(name.strip(), RECIPES, 1, 0.3)
        return f"; remove the quotes: {near[0]}({arguments or ')'}" if near else ""
    return ""


def _check_device(device: torch.device | str | None) -> None:
    """Raise `ValueError` if no tensor can be on `device`."""
    if device is None:
        return
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"quantize_: device={str(device)!r} is not available here: {reason}; the model is unchanged"
        ) from error


def _elements(model: nn.Module, targets: list[Target[Recipe]]) -> tuple[int, int]:
    """Number of elements of all parameters of `model`, and of those that are quantized already and get no recipe."""
    parameters = [parameter for parameter in model.parameters() if not nn.parameter.is_lazy(parameter)]
    quantized = {id(parameter) for parameter in parameters if isinstance(parameter, QuantizedTensor)}
    quantized |= {id(module.weight) for module in model.modules() if isinstance(module, PreparedModule)}
    quantized -= {id(target.parameter) for target in targets if target.recipe is not None}
    done = sum(parameter.numel() for parameter in parameters if id(parameter) in quantized)
    return sum(parameter.numel() for parameter in parameters), done


def place(targets: list[Target[Recipe]]) -> None:
    """Tell each recipe its place among the targets that have it."""
    groups: dict[Any, list[Target[Recipe]]] = {}
    for target in targets:
        if target.recipe is not None:
            # Recipes compare without their data.
            data = target.recipe.data
            groups.setdefault((target.recipe, data and id(data.batches)), []).append(target)
    for (recipe, _), group in groups.items():
        for index, target in enumerate(group):
            target.slot.recipe = recipe.placed(index, len(group))


def check_targets(targets: list[Target[Recipe]], check: misfit.Check, outcome: str = "") -> None:
    """Raise one `Refused` for all targets that `check` refuses; the message says `outcome` after the problems."""
    problems: dict[str, Target[Recipe] | None] = {}
    for target in targets:
        if target.recipe is not None:
            try:
                if obstacle := target.obstacle:
                    raise ValueError(obstacle)
                check(target.recipe, target)
            except (ValueError, TypeError) as error:
                problems[f"{target.slot.label}: {error}"] = target if isinstance(error, IndivisibleError) else None
    if not problems:
        return
    more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
    message = "\n".join(list(problems)[:8]) + more + outcome
    indivisible = [target for target in problems.values() if target is not None][:8]
    fitting = [misfit.coarser(target, target.recipe, check) for target in indivisible if target.recipe is not None]
    fits = [recipe is not target.recipe for recipe, target in zip(fitting, indivisible, strict=True)]
    if indivisible:
        pads = all(misfit.pad(target, target.recipe, check) is not target.recipe for target in indivisible)
        word = "coarser" if all(fits) else "pad" if pads else "skip"
        does = "leaves them in floating point" if word == "skip" else "accepts them"
        message += f'; on_misfit="{word}" {does}; entries of a mapping that fit, to stand before others:'
    for target, recipe, new in zip(indivisible, fitting, fits, strict=True):
        message += f'\n"{target.slot.label}": {f"{recipe},  # or None" if new else "None,"}'
    raise Refused(message)
