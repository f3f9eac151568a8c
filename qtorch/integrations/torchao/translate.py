"""Arguments of torchao in terms of qtorch: a rule takes a value and returns what it is here.

A rule raises `ValueError` with what to write instead. Objects of torchao are recognized by the names of their classes
and members, so that it need not be installed.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...dtypes import Layout, PackedLayout, SemiSparseLayout, TensorCoreTiledLayout
from ...primitives import Granularity, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from ...recipes.base import WeightRecipe

F = TypeVar("F", bound=Callable[..., Any])
Rule = Callable[[Any], Any]


def refuse(function: str, argument: str, value: Any, instead: str) -> ValueError:
    """The error to raise for an argument that has no equivalent."""
    return ValueError(f"{function}: {argument}={value!r:.80} has no equivalent in qtorch; {instead}")


def arguments(**rules: Rule) -> Callable[[F], F]:
    """Decorator: a function gets the results of `rules`, by name of the argument, else of `RULES`; a None that is the
    default stays."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        known = {name: RULES[name] for name in signature.parameters if name in RULES} | rules

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own error names the function
            bound.apply_defaults()
            for name, rule in known.items():
                value = bound.arguments[name]
                if value is None and signature.parameters[name].default is None:
                    continue
                try:
                    bound.arguments[name] = rule(value)
                except ValueError as error:
                    raise refuse(function.__name__, name, value, str(error)) from None
            return function(*bound.args, **bound.kwargs)

        return call  # type: ignore[return-value]

    return decorate


def word(value: Any) -> Any:
    """The value of an enum of torchao, such as ``Int4PackingFormat.PLAIN``; other values as they are."""
    return getattr(value, "value", value) if type(value).__module__.startswith("torchao.") else value


def only(*allowed: Any, instead: str = "") -> Rule:
    """A rule that gives the word of a value, if it is one of `allowed`."""

    def rule(value: Any) -> Any:
        if (found := word(value)) not in allowed:
            raise ValueError(instead or f"leave it at {allowed[0]!r}")
        return found

    return rule


def step(*allowed: str) -> Rule:
    """A rule that gives the name of a step in small letters, if it is one of `allowed`."""

    def rule(value: Any) -> Any:
        text = str(word(value)).lower()
        if text == "prepare_for_loading":
            raise ValueError("load_quantized(model, path) loads what save_quantized wrote")
        return only(*allowed, instead=f"it is one of {', '.join(allowed)}")(text)

    return rule


none = only(None)
default_kernel = only("auto", instead="qtorch.explain shows which kernel runs")


def mapping(value: Any) -> MappingType:
    """The `MappingType` of the same name."""
    name = getattr(value, "name", value)
    if name not in MappingType.__members__:
        raise ValueError(f"it is one of {', '.join(MappingType.__members__)}")
    return MappingType[name]


def symmetric(value: Any) -> MappingType:
    """The symmetric mapping alone."""
    found: MappingType = only(MappingType.SYMMETRIC)(mapping(value))
    return found


def granularity(value: Any) -> Granularity:
    """The granularity of the same name; a pair of equal ones, for activation and weight, is one."""
    if isinstance(value, list | tuple):
        kinds = [granularity(each) for each in value]
        if len(kinds) != 2 or kinds[0] != kinds[1]:
            raise ValueError("activation and weight have the same granularity")
        return kinds[0]
    if isinstance(value, Granularity):
        return value
    name = type(value).__name__
    if name == "PerRow" and getattr(value, "dim", -1) != -1:
        raise ValueError("rows lie along the last axis")
    makers: dict[str, Callable[[], Granularity]] = {
        "PerRow": PerRow,
        "PerTensor": PerTensor,
        "PerToken": PerToken,
        "PerGroup": lambda: PerGroup(value.group_size),
        "PerAxis": lambda: PerAxis(value.axis),
        "PerBlock": lambda: PerBlock(tuple(value.block_size)),
    }
    if name not in makers:
        raise ValueError(f"it is one of {', '.join(makers)}")
    return makers[name]()


def group_size(value: Any) -> int:
    """The size of the groups along a row that a granularity of a weight stands for; -1 for a whole row."""
    found = granularity(value)
    if isinstance(found, PerGroup):
        return found.group_size
    if isinstance(found, PerRow) or found == PerAxis(0):
        return -1
    raise ValueError("weights are quantized per row, PerAxis(0), or per group")


def scale(value: Any) -> float:
    """The number that a scale of one element is."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError("the scale of a static activation is one number")
    return float(value)


def layout(value: Any) -> Layout | None:
    """The layout for one of torchao 0.6 or 0.7; None for the plain one, which leaves the choice to the recipe."""
    makers: dict[str, Callable[[], Layout | None]] = {
        "PlainLayout": lambda: None,
        "PackedLayout": PackedLayout,
        "SemiSparseLayout": SemiSparseLayout,
        "TensorCoreTiledLayout": lambda: TensorCoreTiledLayout(getattr(value, "inner_k_tiles", 8)),
        "UintxLayout": PackedLayout,
    }
    name = type(value).__name__.removesuffix("Type")
    if name not in makers:
        raise ValueError(f"the layouts are {', '.join(makers)}")
    return makers[name]()


def products(config: Any) -> None:
    """A `Float8MMConfig` that changes no more than speed."""
    if getattr(config, "emulate", False) or getattr(config, "pad_inner_dim", False):
        raise ValueError("leave it at None")


def base(recipe: Any) -> WeightRecipe:
    """The recipe, if it is one for inference."""
    if not isinstance(recipe, WeightRecipe):
        raise ValueError("it is a recipe for inference, such as Int4WeightOnlyConfig()")
    return recipe


RULES: dict[str, Rule] = {
    **dict.fromkeys(("layout", "layout_type"), layout),
    **dict.fromkeys(("mapping_type", "act_mapping_type", "weight_mapping_type"), mapping),
    **dict.fromkeys(("weight_scale_dtype", "scale_dtype", "activation_value_lb", "activation_value_ub"), none),
    **dict.fromkeys(("hp_value_lb", "hp_value_ub", "output_act_quant_scale", "packing_bitwidth"), none),
    **dict.fromkeys(("scale", "act_quant_scale"), scale),
    "mm_config": products,
    "reduce_range": only(False, None),
    "use_dynamic_per_tensor_scale": only(True),
    "intx_packing_format": only("unpacked_to_int8", instead="use layout=... of the recipe"),
    "intx_choose_qparams_algorithm": only("affine", instead="use use_hqq=True of intx_weight_only"),
}
"""Of arguments that mean the same wherever they stand."""
