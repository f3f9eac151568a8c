"""Recipe: what becomes of a weight. Recipes register themselves under the name of the function that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .dtypes import ConvWeight, QuantizedTensor, quantized_type
from .install import keep_attributes
from .kernels.im2col import from_matrix, to_matrix
from .prepared_module import PreparedModule
from .primitives import LinearSpec
from .primitives.granularity import IndivisibleError
from .primitives.jsonable import jsonable
from .primitives.scheme import Scheme
from .statistics import Statistic, Statistics
from .targets import Target

RECIPES: dict[str, type[Recipe]] = {}

C = TypeVar("C", bound="type[Recipe]")


class Data(NamedTuple):
    """Batches of inputs of a model, and how it is called with one; see `statistics.run_batches`."""

    batches: Iterable[Any]
    forward: Callable[[nn.Module, Any], Any] | None = None


class Recipe:
    """What becomes of a weight: a frozen dataclass, printable, comparable, JSON-able.

    Attributes:
        name: of the function that makes it.
        trains: the weights it makes keep their gradient; otherwise they are frozen.
        selects: types of the weights, or of the modules, that it is for, wherever they are; none for `nn.Linear`.
        statistics: what `apply_calibrated` needs to know of the inputs of a weight, collected over `data`.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = False
    selects: ClassVar[tuple[type, ...]] = ()
    statistics: ClassVar[tuple[type[Statistic], ...]] = ()

    @property
    def data(self) -> Data | None:
        """What `quantize_` runs the model on before `make`; None for recipes that look at weights alone."""
        return None

    def check(self, weight: Tensor) -> None:
        """Raise `ValueError` or `TypeError` where `apply` could not do its work; the weight is not changed."""
        raise NotImplementedError

    def apply(self, weight: Tensor) -> Tensor:
        """The new weight."""
        raise NotImplementedError

    def apply_calibrated(self, weight: Tensor, statistics: Statistics) -> Tensor:
        """`apply` with the `statistics` that the recipe asks for."""
        raise NotImplementedError

    # What `quantize_` calls; a recipe that depends on the modules, or changes them, overrides these.

    def placed(self, index: int, count: int) -> Recipe:
        """The recipe for the weight `index` of the `count` that it was asked for, in the order of the model."""
        return self

    def check_target(self, target: Target[Any]) -> None:
        """`check`, for a weight and the modules that hold it."""
        for slot in target.slots:
            if isinstance(slot.module, PreparedModule):
                raise ValueError("is in training; finish it by convert() first")
        if not target.asked.is_conv or nn.parameter.is_lazy(target.parameter):
            self.check(target.parameter)
            return
        shape, matrix = tuple(target.parameter.shape), to_matrix(target.parameter.detach())
        try:
            self.check(matrix)
        except ValueError as error:
            seen = f"a convolution's weight {shape}, seen as the matrix {tuple(matrix.shape)}"
            kind = IndivisibleError if isinstance(error, IndivisibleError) else ValueError
            raise kind(f"{error} ({seen})") from error

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Any:
        """What takes the place of the parameter, `weight` its data; the modules are not changed. For the report it has
        `nbytes` and `dequantize()`.

        Args:
            statistics: of the inputs of the weight, if the recipe asks for any.
        """
        is_conv = target.asked.is_conv
        matrix = to_matrix(weight) if is_conv else weight
        matrix = self.apply(matrix) if statistics is None else self.apply_calibrated(matrix, statistics)
        if not is_conv:
            return matrix
        if isinstance(matrix, QuantizedTensor) and not matrix.trains:
            return ConvWeight.of(matrix, weight.shape)
        return from_matrix(matrix, weight.shape).contiguous()

    def has_made(self, target: Target[Any]) -> bool:
        """Whether the weight is what `make` would give already: an interrupted `quantize_` goes on after it."""
        return False

    def install(self, target: Target[Any], made: Any) -> None:
        """Put what `make` has made into the modules; where this fails `quantize_` undoes it. Attributes that the user
        has put on the parameter are kept."""
        parameter = nn.Parameter(made, self.trains and target.parameter.requires_grad)
        keep_attributes(parameter, target.parameter)
        for slot in target.slots:
            slot.module._parameters[slot.attribute] = parameter

    def __str__(self) -> str:
        """The call that makes it, without what is left at its default, and without data."""
        shown = [f.name for f in fields(self) if f.repr and getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{self.name}({', '.join(f'{name}={_word(getattr(self, name))}' for name in shown)})"


def check_float_weight(weight: Tensor) -> None:
    """Raise `ValueError` where `weight` is not one in floating point, initialized and not quantized."""
    if nn.parameter.is_lazy(weight):
        raise ValueError("the weight is not initialized yet; run the model once")
    if isinstance(weight, QuantizedTensor):
        raise ValueError(f"is already quantized: {weight!r}")
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"takes float32, float16 or bfloat16 weights, this one is {weight.dtype}")


class WeightRecipe(Recipe):
    """A recipe for inference that is described by a `LinearSpec` alone.

    Attributes:
        prunes: it drops elements of the weight first.

    Raises:
        ValueError: there is no such spec.
    """

    prunes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        spec = self.linear_spec()
        if spec.layout is not None:
            spec.layout.check_spec(spec.weight)

    def linear_spec(self) -> LinearSpec:
        raise NotImplementedError

    def prune(self, weight: Tensor) -> Tensor:
        """`weight` with zeros in place of what the recipe drops before it quantizes, if `prunes`; differentiable."""
        return weight

    def act_scale(self, device: torch.device) -> Tensor | None:
        """The scale of a static activation, (1, 1) fp32; None where it is computed on each call, or
        activations are not quantized."""
        return None

    def check(self, weight: Tensor) -> None:
        check_float_weight(weight)
        if weight.dim() < 2:
            raise ValueError(f"takes weights of two or more dimensions, this one has shape {tuple(weight.shape)}")
        spec = self.linear_spec()
        spec.weight.block_size(weight.shape)
        if spec.layout is not None:
            spec.layout.check(Scheme(spec, tuple(weight.shape), weight.dtype))
        if weight.is_meta:
            raise ValueError("the weight is on the meta device and has no values to quantize; load it first")
        if not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise ValueError(f"has {bad} values of {weight.numel()} that are NaN or infinite")

    def apply(self, weight: Tensor) -> Tensor:
        spec = self.linear_spec()
        return quantized_type(spec.weight).from_float(self.prune(weight), spec)

    def has_made(self, target: Target[Any]) -> bool:
        weight: Any = target.parameter
        if not isinstance(weight, QuantizedTensor) or weight.trains:
            return False
        made, spec, act_scale = weight.scheme.spec, self.linear_spec(), self.act_scale(weight.device)
        same_layout = spec.layout is None or spec.layout == made.layout
        same_scale = act_scale is None or torch.equal(act_scale, weight.act_scale)  # type: ignore[attr-defined]
        return replace(spec, layout=made.layout) == made and same_layout and same_scale


def register_recipe(name: str) -> Callable[[C], C]:
    """Class decorator of a frozen dataclass: make a recipe known as `name`, and readable from JSON.

    Raises:
        ValueError: the name is taken.
    """

    def decorate(cls: C) -> C:
        if RECIPES.setdefault(name, cls) is not cls:
            raise ValueError(f"register_recipe: {name!r} is taken by {RECIPES[name]!r}")
        cls.name = name
        jsonable(cls)
        return cls

    return decorate


def _word(value: Any) -> str:
    if isinstance(value, Recipe):
        return str(value)
    return value.name if isinstance(value, Enum) else repr(value)
