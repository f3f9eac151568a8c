"""Recipe: how a weight is quantized. Recipes are registered under the name of the function that makes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, fields, replace
from difflib import get_close_matches
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import dataclass_transform

from ..dtypes import QuantizedTensor, quantized_type
from ..dtypes.parameter import FROZEN
from ..model.install import PreparedModule, keep_attributes
from ..model.report import CalibrationReport, TransformReport
from ..model.targets import Target
from ..model.weight_kinds import WeightKind
from ..primitives import LinearSpec, Scheme, granularity
from ..primitives.jsonable import jsonable, wrong_type

if TYPE_CHECKING:  # what looks at data is imported when it is used
    from ..calibration.data import Data
    from ..calibration.engine.in_order import BlockLearner
    from ..calibration.statistics import Statistics

RECIPES: dict[str, type[Recipe]] = {}

FOREIGN: dict[str, Callable[[Any], str]] = {}
"""Name of another package -> function that says what its configuration object is here, a clause of an error."""

C = TypeVar("C", bound="type[Recipe]")
T = TypeVar("T")

Branch = tuple[Tensor, Tensor]
"""(up, down) of a `LowRankWeight`: (N, R) and (R, K)."""


ExpertStatistics = Mapping[int, "Statistics"]
"""The statistics of each matrix of a weight (E, N, K), by its index; those of experts without inputs are missing."""


class Calibrated(NamedTuple):
    """A weight made by `Recipe.make_in_order`, the report on it, and what `learner` needs to change it, or None."""

    weight: Tensor
    report: CalibrationReport
    learnable: Any = None


class Recipe:
    """How a weight is quantized: a frozen dataclass, printable, comparable, JSON-able.

    Attributes:
        name: name of the function that makes it.
        trains: whether the new weights require gradients; otherwise they are frozen.
        selects: types of the weights, or of their modules, to which it applies; empty for those that
            `targets` of `quantize_` reaches.
        statistics: the statistics of the inputs of a weight that `apply_calibrated` needs, collected over `data`.
        in_order: weights are quantized in the order in which the model runs, each with the inputs that it meets in the
            model as quantized so far (see `blockwise`); otherwise all at once, with those of the float model.
        transforms: of the float weights of the whole model, before any is quantized; see `transform`.
        branch_rank: of the branch beside the codes (`low_rank`), 0 without one.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = False
    selects: ClassVar[tuple[type, ...]] = ()
    statistics: ClassVar[tuple[type, ...]] = ()
    in_order: ClassVar[bool] = False
    transforms: Sequence[Any] = ()
    branch_rank: int = 0

    @property
    def quant_method(self) -> NoReturn:
        """What transformers asks a configuration for; a recipe is none."""
        raise AttributeError(f"a recipe is no quantization_config of transformers: write QtorchConfig({self})")

    @property
    def learner(self) -> BlockLearner | None:
        """What improves the weights of a block together, for recipes that quantize `in_order`."""
        return None

    @property
    def data(self) -> Data | None:
        """The data on which `quantize_` runs the model before `make`; None for recipes that need weights only."""
        return None

    def check_complete(self) -> None:
        """Raise `ValueError` if the recipe lacks something that neither the weight nor its data has."""

    def check(self, weight: Tensor) -> None:
        """Raise `ValueError` or `TypeError` if `apply` would fail; the weight is not changed."""
        raise NotImplementedError

    def apply(self, weight: Tensor) -> Tensor:
        """The new weight."""
        raise NotImplementedError

    def apply_calibrated(self, weight: Tensor, statistics: Statistics) -> Tensor:
        """`apply` with the `statistics` that the recipe requests."""
        raise NotImplementedError

    def transform(self, model: nn.Module, targets: Sequence[Target[Any]]) -> tuple[TransformReport, ...]:
        """Replace float parameters of `model` by those that `transforms` make; `quantize_` undoes it after an error.

        Args:
            targets: all weights, each with its recipe or None.
        """
        raise NotImplementedError

    def declines(self, kind: WeightKind) -> str | None:
        """Why weights of a kind stay in floating point unless they are asked for by name; None if they do not."""
        return None

    # `quantize_` calls these; a recipe that depends on the modules, or changes them, overrides them.

    def placed(self, index: int, count: int) -> Recipe:
        """The recipe for weight `index` of the `count` weights that this one applies to, in the order of the model."""
        return self

    def check_target(self, target: Target[Any]) -> None:
        """`check`, for a weight and the modules that hold it."""
        for slot in target.slots:
            if isinstance(slot.module, PreparedModule):
                raise ValueError("is in training; finish it by convert() first")
        kind = target.kind
        if kind.held is None or nn.parameter.is_lazy(target.parameter):
            self.check(target.parameter)
            return
        if self.branch_rank:
            what = "a convolution" if kind.is_conv else "a module that stores (inputs, outputs)"
            raise ValueError(f"is the weight of {what}, beside which there is no branch of low rank; leave it out")
        shape, matrix = tuple(target.parameter.shape), kind.view(target.parameter.detach())
        try:
            self.check(matrix)
        except ValueError as error:
            what = "a convolution's weight" if kind.is_conv else "a weight stored as (inputs, outputs)"
            raised = granularity.IndivisibleError if isinstance(error, granularity.IndivisibleError) else ValueError
            raise raised(f"{error} ({what} {shape}, seen as the matrix {tuple(matrix.shape)})") from error

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Any:
        """Make the replacement of the parameter, whose data is `weight`, without changing the modules.

        It must have `nbytes`, and `dequantize()` for the report.

        Args:
            statistics: of the inputs of the weight, if the recipe requests any.
        """
        matrix = target.kind.to_matrix(weight)
        matrix = self.apply(matrix) if statistics is None else self.apply_calibrated(matrix, statistics)
        return target.kind.from_matrix(matrix, weight.shape)

    def make_in_order(
        self, target: Target[Any], weight: Tensor, statistics: Statistics | ExpertStatistics
    ) -> Calibrated:
        """`make` for recipes that quantize `in_order`.

        Args:
            statistics: of the whole weight, or of each expert of a weight (E, N, K); empty if it was not used.
        """
        raise NotImplementedError

    def has_made(self, target: Target[Any]) -> bool:
        """Whether the weight is already the result of `make`, so that an interrupted `quantize_` can continue."""
        return False

    def install(self, target: Target[Any], made: Any) -> None:
        """Install the result of `make` in the modules; `quantize_` undoes it after an error.

        Attributes that the user has set on the parameter are kept.
        """
        parameter = nn.Parameter(made, self.trains and target.parameter.requires_grad)
        keep_attributes(parameter, target.parameter)
        if target.parameter.requires_grad and not parameter.requires_grad:
            FROZEN.add(id(parameter))
        for slot in target.slots:
            slot.module._parameters[slot.attribute] = parameter

    def __str__(self) -> str:
        """The call that makes the recipe, without default arguments and without data."""
        return _call(self)


def _call(value: Any) -> str:
    """How a recipe, or an argument of one, is written, without default arguments and without data."""
    if type(value) is tuple:
        return f"({', '.join(map(_call, value))}{',' * (len(value) == 1)})"
    if not (made := getattr(type(value), "__dataclass_params__", None)) or not made.repr:
        return value.name if isinstance(value, Enum) else repr(value)
    given = [(each, getattr(value, each.name)) for each in fields(value) if each.repr]
    arguments = [f"{each.name}={_call(argument)}" for each, argument in given if argument != each.default]
    return f"{value.name if isinstance(value, Recipe) else type(value).__name__}({', '.join(arguments)})"


def check_float_weight(weight: Tensor) -> None:
    """Raise `ValueError` unless `weight` is initialized, in floating point and not quantized."""
    if nn.parameter.is_lazy(weight):
        raise ValueError("the weight is not initialized yet; run the model once")
    if isinstance(weight, QuantizedTensor):
        raise ValueError(f"is already quantized: {weight!r}; take the float model, or dequantize_(model) first")
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"takes float32, float16 or bfloat16 weights, this one is {weight.dtype}")


_sizes_only = ContextVar("_sizes_only", default=False)


@contextmanager
def sizes_only(only: bool) -> Iterator[None]:
    """If `only`, let weights on the meta device pass the checks of recipes: a dry run has no use for their values."""
    token = _sizes_only.set(only)
    try:
        yield
    finally:
        _sizes_only.reset(token)


def check_has_values(weight: Tensor, recipe: Recipe) -> None:
    """Raise `ValueError` where `weight` is on the meta device."""
    if weight.is_meta and not _sizes_only.get():
        raise ValueError(f"the weight is on the meta device, without values for {recipe.name}(); load it first")


class WeightRecipe(Recipe):
    """A recipe for inference that is defined by a `LinearSpec`.

    Attributes:
        prunes: whether it prunes the weight first; then it has `kept`.
        described: what an argument of this type takes, for messages.

    Raises:
        ValueError: the arguments do not make a valid spec.
    """

    prunes: ClassVar[bool] = False
    described: ClassVar[str] = "an inference recipe such as int4_weight_only()"

    def __post_init__(self) -> None:
        spec = self.linear_spec()
        if spec.layout is not None:
            spec.layout.check_spec(spec.weight)

    def linear_spec(self) -> LinearSpec:
        raise NotImplementedError

    def kept(self, importance: Tensor) -> Tensor:
        """Which elements remain, bool, given the importance of each, (N, K) not negative; for recipes that prune."""
        raise NotImplementedError

    def prune(self, weight: Tensor) -> Tensor:
        """`weight` with zeros for the elements that the recipe prunes before it quantizes; differentiable."""
        return torch.where(self.kept(weight.detach().float().square()), weight, 0) if self.prunes else weight

    def fit(
        self, weight: Tensor, dtype: torch.dtype, root: Tensor | None, rounded: Callable[[Tensor], T],
        values: Callable[[T], Tensor],
    ) -> tuple[T, Branch | None]:  # fmt: skip
        """What is made of W (N, K) fp32, of the logical dtype `dtype`, and the branch beside it: see `low_rank`.

        Args:
            root: lower triangular L (K, K), L L^T = E[x x^T], that says which error counts; None for the identity.
            rounded: (N, K) fp32 -> what is made of it.
            values: that -> its values (N, K) in fp32.
        """
        return rounded(weight), None

    def beside(self, made: Tensor, branch: Branch | None) -> Tensor:
        """The weight that has the codes `made`, and the branch of `fit`."""
        return made

    def act_scale(self, device: torch.device) -> Tensor | None:
        """The scale of a static activation, (1, 1) fp32, or None: there is no such activation, or data has to tell."""
        return None

    @property
    def lacks_scale(self) -> bool:
        """Whether it has static activations whose scale only data can tell."""
        return self.linear_spec().static and self.act_scale(torch.device("cpu")) is None

    def check_complete(self) -> None:
        if self.lacks_scale:
            raise ValueError(
                f"{self} has no scale of the activation. Let data choose one for each layer, calibrated({self}, "
                f'batches) or observed({self}, batches); in training, qat({self}, observer="moving_average"); or '
                "give the recipe the scale that you know"
            )

    def check_form(self, weight: Tensor) -> None:
        """`check` of everything but the values; `weight` may be on the meta device."""
        check_float_weight(weight)
        if weight.dim() < 2:
            raise ValueError(f"takes weights of two or more dimensions, this one has shape {tuple(weight.shape)}")
        spec = self.linear_spec()
        spec.weight.block_size(weight.shape)
        if spec.layout is not None:
            spec.layout.check(Scheme(spec, tuple(weight.shape), weight.dtype))

    def check(self, weight: Tensor) -> None:
        self.check_form(weight)
        check_has_values(weight, self)
        if weight.is_meta or not weight.numel():
            return
        # `isfinite` takes ten times as long; a NaN or an infinity is an extreme of the whole.
        if not bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all()):
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
        same_rank = getattr(weight.scheme, "rank", 0) == self.branch_rank
        return replace(spec, layout=made.layout) == made and same_layout and same_scale and same_rank


class OfRecipe(WeightRecipe):
    """Base of the recipes whose weights have the numerics of another one, `recipe`."""

    recipe: WeightRecipe

    def linear_spec(self) -> LinearSpec:
        return self.recipe.linear_spec()


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register_recipe(name: str) -> Callable[[C], C]:
    """Class decorator: make a frozen dataclass, unless it is one, the recipe `name`, readable from JSON.

    Raises:
        ValueError: another recipe has the same name.
    """

    def decorate(cls: C) -> C:
        if RECIPES.setdefault(name, cls) is not cls:
            raise ValueError(f"register_recipe: {name!r} is taken by {RECIPES[name]!r}")
        cls.name = name
        jsonable(cls, name)
        _check_arguments(cls)
        return cls

    return decorate


def _check_arguments(cls: type[Recipe]) -> None:
    """Make the calls of a recipe raise `TypeError` in one line for arguments that it lacks or that have another type
    than their fields: numbers and texts at first, others unless `__post_init__` converts or refuses them."""
    init: Any = cls.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(value, nn.Module) for value in args):
            raise TypeError(f"{cls.name}: takes no model; write quantize_(model, {cls.name}(...))")
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            known = list(signature.parameters)[1:]
            near = [name for key in kwargs if key not in known for name in get_close_matches(key, known, 1)]
            meant = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(known) or 'none'}"
            raise TypeError(f"{cls.name}: {error}{meant}") from None
        plain = {key: value for key, value in given.items() if not isinstance(value, Tensor)}
        if wrong := wrong_type(cls, plain, (int, float, bool, str, NoneType, WeightRecipe)):
            raise TypeError(f"{cls.name}: {wrong}")
        init(self, *args, **kwargs)
        if wrong := wrong_type(cls, vars(self)):
            raise TypeError(f"{cls.name}: {wrong}")

    cls.__init__ = checked  # type: ignore[method-assign]
