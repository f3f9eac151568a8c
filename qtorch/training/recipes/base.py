"""TrainingRecipe, which a `TrainingSpec` describes and which keeps weights in floating point; and convert, from weights
in training to weights for inference."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ...calibration.statistics import Statistics
from ...model import targets, weight_kinds
from ...model.install import PreparedModule
from ...recipes.base import Recipe, check_float_weight, register_recipe
from ..engine import contraction, gemm_spec, numerics
from ..weights.base import TrainingWeight
from ..weights.master import MasterWeight


class TrainingRecipe(Recipe):
    """Weights stay in floating point; their matmuls run as `training_spec` says. No value is read: a model may be on
    the meta device, to be sharded, materialized and initialized after `quantize_`."""

    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.training_spec()

    def training_spec(self) -> gemm_spec.TrainingSpec:
        raise NotImplementedError

    def check(self, weight: Tensor) -> None:
        check_trainable(weight, matrices=True)
        spec = self.training_spec().output.rhs
        if spec is not None:
            # Training could complete blocks with zeros, but the weight would not convert.
            spec.block_size(weight.shape)

    def apply(self, weight: Tensor) -> Tensor:
        return MasterWeight.of(weight, self.training_spec())

    def install(self, target: targets.Target[Any], made: Tensor) -> None:
        kinds = {spec.dtype.name for spec in self.training_spec().operands if not spec.dtype.is_small_integer}
        if kinds and made.device.type == "cpu":
            contraction.warn_once(
                self.name,
                f"{self.name} is slower than training in floating point on a CPU, which multiplies no "
                f"{', '.join(sorted(kinds))}: products run in fp32; int8_mixed_precision_training() is faster there",
            )
        super().install(target, made)

    def has_made(self, target: targets.Target[Any]) -> bool:
        weight = target.parameter
        return isinstance(weight, MasterWeight) and weight.scheme.training == self.training_spec()  # type: ignore[attr-defined]


def declines_experts(recipe: Recipe, kind: weight_kinds.WeightKind) -> str | None:
    """`Recipe.declines` of recipes that take matrices."""
    return f"experts in one parameter, and {recipe.name} takes matrices" if kind.name == "experts" else None


def check_trainable(weight: Tensor, matrices: bool = False) -> None:
    """Raise `ValueError` unless `weight` is a float matrix; or, with `matrices`, those of experts."""
    check_float_weight(weight)
    if weight.dim() != 2 and not (matrices and weight.dim() == 3):
        raise ValueError(f"takes matrices, this weight has shape {tuple(weight.shape)}")


@register_recipe("mixed_precision_training")
class MixedPrecisionTraining(TrainingRecipe):
    """Weights in floating point, matmuls as `spec` says. The other recipes are presets of this one.

    Args:
        spec: of the three matmuls. `fully_quantized(fwd_bits=8, bwd_bits=8)` and `fully_quantized_float8()` make one.
    """

    spec: gemm_spec.TrainingSpec = numerics.fully_quantized()

    def training_spec(self) -> gemm_spec.TrainingSpec:
        return self.spec


class EdgeRecipe(TrainingRecipe):
    """A recipe whose first and last weight have a forward in integers of `edge_bits`; None: as all others."""

    edge_bits: int | None

    def placed(self, index: int, count: int) -> Recipe:
        if self.edge_bits is not None and index in (0, count - 1):
            return MixedPrecisionTraining(numerics.fully_quantized(self.edge_bits, None, grad_weight=False))
        inside: Any = self
        return replace(inside, edge_bits=None)


@register_recipe("convert")
class Convert(Recipe):
    """Replace every weight in training by the weight for inference that its recipe has trained it for: the codes that
    the forward multiplied by, at their true size. The model computes what it computed in training: the same bits where
    sums are integers, and elsewhere the same up to the rounding of sums, which is equal where the same kernel runs.

    Modules whose class was exchanged for training get their own class back. Weights in floating point that no training
    recipe has changed stay as they are.
    """

    selects: ClassVar[tuple[type, ...]] = (TrainingWeight, PreparedModule)

    def check(self, weight: Tensor) -> None:
        if not isinstance(weight, TrainingWeight):
            raise ValueError(f"convert takes weights in training, this is a {type(weight).__name__}")
        weight.check_convert()

    def apply(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, TrainingWeight)
        return weight.convert()

    def check_target(self, target: targets.Target[Any]) -> None:
        prepared = _prepared(target)
        for module in prepared:
            module.check_convert()
        if not prepared:
            super().check_target(target)

    def make(self, target: targets.Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Tensor:
        prepared = _prepared(target)
        return prepared[0].convert() if prepared else super().make(target, weight)

    def install(self, target: targets.Target[Any], made: Tensor) -> None:
        for module in _prepared(target):
            module.restore()
        super().install(target, made)


def _prepared(target: targets.Target[Any]) -> list[PreparedModule]:
    return [module for module in target.modules if isinstance(module, PreparedModule)]
