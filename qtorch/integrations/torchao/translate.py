"""Arguments of torchao in terms of qtorch. Objects of torchao are recognized by the names of their classes and members,
so that it need not be installed."""

from __future__ import annotations

from typing import Any

import torch

from ...dtypes import Layout, PackedLayout, SemiSparseLayout, TensorCoreTiledLayout
from ...primitives import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from ...primitives.granularity import Granularity


def refuse(function: str, argument: str, value: Any, instead: str) -> ValueError:
    """The error to raise for an argument that has no equivalent."""
    return ValueError(f"{function}: {argument}={value!r:.80} has no equivalent in qtorch; {instead}")


def only(function: str, argument: str, value: Any, allowed: tuple[Any, ...], instead: str = "") -> None:
    """Check that the word of `value` is one of `allowed`.

    Raises:
        ValueError: it is not.
    """
    if word(value) not in allowed:
        hint = instead or f"leave it at {allowed[0]!r}"
        raise refuse(function, argument, value, hint)


def word(value: Any) -> Any:
    """The value of an enum of torchao, such as ``Int4PackingFormat.PLAIN``; other values as they are."""
    return getattr(value, "value", value) if type(value).__module__.startswith("torchao.") else value


def mapping_of(function: str, argument: str, value: Any) -> MappingType:
    """The `MappingType` of the same name.

    Raises:
        ValueError: there is none.
    """
    name = getattr(value, "name", value)
    if name not in MappingType.__members__:
        raise refuse(function, argument, value, f"it is one of {', '.join(MappingType.__members__)}")
    return MappingType[name]


def granularity_of(function: str, argument: str, value: Any) -> Granularity:
    """The granularity of the same name; a pair of equal ones, for activation and weight, is one.

    Raises:
        ValueError: there is none, or the pair differs.
    """
    if isinstance(value, list | tuple):
        kinds = [granularity_of(function, argument, each) for each in value]
        if len(kinds) != 2 or kinds[0] != kinds[1]:
            raise refuse(function, argument, value, "activation and weight have the same granularity")
        return kinds[0]
    if isinstance(value, Granularity):
        return value
    name = type(value).__name__
    if name == "PerRow" and getattr(value, "dim", -1) != -1:
        raise refuse(function, argument, value, "rows lie along the last axis")
    makers: dict[str, Any] = {
        "PerRow": PerRow,
        "PerTensor": PerTensor,
        "PerToken": PerToken,
        "PerGroup": lambda: PerGroup(value.group_size),
        "PerAxis": lambda: PerAxis(value.axis),
        "PerBlock": lambda: PerBlock(tuple(value.block_size)),
    }
    if name not in makers:
        raise refuse(function, argument, value, f"it is one of {', '.join(makers)}")
    made: Granularity = makers[name]()
    return made


def group_size_of(function: str, argument: str, value: Any) -> int:
    """The size of the groups along a row that a granularity of a weight stands for; -1 for a whole row.

    Raises:
        ValueError: it is another granularity.
    """
    granularity = granularity_of(function, argument, value)
    if isinstance(granularity, PerGroup):
        return granularity.group_size
    if isinstance(granularity, PerRow) or granularity == PerAxis(0):
        return -1
    raise refuse(function, argument, value, "weights are quantized per row, PerAxis(0), or per group")


def scale_of(function: str, argument: str, value: Any) -> float | None:
    """The number that a scale of one element is; None, where there is none, is a recipe that takes it from data.

    Raises:
        ValueError: it has more elements.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise refuse(function, argument, value, "the scale of a static activation is one number")
    return float(value)


def layout_of(function: str, value: Any) -> Layout | None:
    """The layout for a layout of torchao 0.6 or 0.7; None for the plain one, which leaves the choice to the recipe.

    Raises:
        ValueError: qtorch does not have the layout.
    """
    name = type(value).__name__.removesuffix("Type")  # None is a NoneType
    makers: dict[str, Any] = {
        "None": lambda: None,
        "PlainLayout": lambda: None,
        "PackedLayout": PackedLayout,
        "SemiSparseLayout": SemiSparseLayout,
        "TensorCoreTiledLayout": lambda: TensorCoreTiledLayout(getattr(value, "inner_k_tiles", 8)),
        "UintxLayout": PackedLayout,
    }
    if name not in makers:
        raise refuse(function, "layout", value, f"the layouts are {', '.join(list(makers)[1:])}")
    made: Layout | None = makers[name]()
    return made
