"""Quantization-aware training for any inference recipe.

quantize_(model, qat(int8_dynamic_activation_int4_weight()))
...  # train as usual
quantize_(model, convert())

Prepared and converted weights are described by the same `LinearSpec`, that of the recipe: there is nothing to keep in
step.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ....calibration.observers import Observer, observer_of
from ....calibration.statistics import Statistics
from ....model import targets, weight_kinds
from ....primitives import HQQRule, QuantSpec
from ....recipes.base import OfRecipe, Recipe, WeightRecipe, register_recipe
from .. import qat_weight, quantizers
from ..schedule import QuantizationSchedule
from .base import ModuleRecipe, check_inference_recipe
from .lora_qat import LoRAQAT


@register_recipe("scheduled_qat")
class ScheduledQAT(ModuleRecipe, OfRecipe):
    """Layers, `nn.Linear`, `nn.Embedding` and convolutions exactly, are trained for `recipe`; they hold the state.

        step < start_step       floating point
        step < freeze_step      fake quantization; scales follow the weights, observed ranges the data
        step >= freeze_step     fake quantization with the scales of the last step before it

    Args:
        recipe: for inference, what the weights become by `convert()`.
        start_step, freeze_step: forward passes in training mode, of each layer; see `Schedule`.
        observer: of recipes with static activations: None keeps the scale that the recipe gives; an observer, or the
            word for one with its defaults, chooses it from what passes in `qtorch.training.calibrate`.
            ``moving_average()`` and ``min_max()`` follow what passes in training too; the range of the others stays.

    Raises:
        TypeError: `recipe` is not an inference recipe.
        ValueError: steps that make no sense; an unknown observer, or one without static activations; weights by look-up
            tables or pruned, or scales in codes of their own that are to freeze: these have no state here.
    """

    recipe: WeightRecipe
    start_step: int = 0
    freeze_step: int | None = None
    observer: Observer | str | None = None

    def __post_init__(self) -> None:
        check_inference_recipe(self.recipe, self.name)
        spec = self.recipe.linear_spec()
        if not isinstance(spec.weight, QuantSpec):
            raise ValueError(f"{self.name}: {self.recipe} has weights of {type(spec.weight).__name__}, not QuantSpec")
        if self.freeze_step is not None and spec.weight.scale_spec is not None:
            raise ValueError(f"{self.name}: the scales of {self.recipe} are codes, which cannot freeze one by one")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, self.name))
            if not spec.static:
                raise ValueError(f"{self.name}: {self.recipe} has no static activations to observe")
        super().__post_init__()

    def check_complete(self) -> None:
        if self.observer is None:
            self.recipe.check_complete()

    def input_quantizer(self, spec: QuantSpec, static: bool) -> quantizers.Quantizer:
        if not static:
            return quantizers.Dynamic(spec, (1, 1))
        if self.observer is None:
            scale = self.recipe.act_scale(torch.device("cpu"))
            assert scale is not None
            return quantizers.Fixed(spec, scale)
        return quantizers.ObservedRange(spec, (1, 1), self.freezes, observer_of(self.observer, self.name))


@register_recipe("qat")
class QAT(Recipe):
    """Weights stay in floating point and are trained; layers compute what they will compute when converted: bit for
    bit where the recipe sums integers (int8 activations), and up to the order of fp32 sums elsewhere. The codes of
    weights are the same in all cases. Gradients pass straight through rounding.

    It reaches what the recipe itself does: what multiplies like a linear layer; by name embeddings, convolutions and
    bare matrices.

    Args:
        recipe: for inference, what the weights become by `convert()`.
        compute_dtype: of the arithmetic of fake quantization. None is fp32, as in the kernels for inference. A
            dtype, that of the model say, is faster in bf16; products are then of fake-quantized floats, and conversion
            changes numbers by the rounding of that dtype. For affine codes.
        start_step, freeze_step, observer: a schedule, and observed ranges of static activations; see `ScheduledQAT`.
            Their state is in the layers, whose class is exchanged.
        schedule: the three in one, a `QuantizationSchedule`, in place of them.
        lora_rank: train adapters of this rank instead of the weights, see `LoRAQAT`; 0 trains the weights.
        lora_alpha: weight of the adapters; None is their rank.

    Raises:
        TypeError: `recipe` is not an inference recipe.
        ValueError: `HQQRule`, which would search anew in each step; a `compute_dtype` that is not in floating point, or
            one together with look-up tables.
    """

    trains: ClassVar[bool] = True

    recipe: WeightRecipe
    compute_dtype: torch.dtype | None = None
    start_step: int = 0
    freeze_step: int | None = None
    observer: Observer | str | None = None
    lora_rank: int = 0
    lora_alpha: float | None = None
    schedule: QuantizationSchedule | None = None

    def __post_init__(self) -> None:
        check_inference_recipe(self.recipe, self.name)
        linear = self.recipe.linear_spec()
        if isinstance(linear.weight, QuantSpec) and isinstance(linear.weight.scale_rule, HQQRule):
            raise ValueError(
                f"qat: {self.recipe} would search its scales anew in each step, at some 25 times the cost of the "
                "layer; train with scale_rule=MinMaxRule(), or by lsq(recipe=...), which starts from these scales"
            )
        if self.compute_dtype is not None:
            if not self.compute_dtype.is_floating_point:
                raise ValueError(f"qat: compute_dtype is a floating-point dtype or None, got {self.compute_dtype}")
            for spec in (linear.weight, linear.activation):
                if spec is not None and not isinstance(spec, QuantSpec):
                    raise ValueError(f"qat: compute_dtype takes affine codes, {self.recipe} has {spec}")

        if self.schedule is not None:
            self._check_schedule(self.schedule)
        if self._has_state:
            if self.compute_dtype is not None:
                raise ValueError("qat: compute_dtype is for training without a schedule or an observer")
            if self.lora_rank:
                raise ValueError("qat: adapters have no schedule and no observer; leave lora_rank out, or those")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, self.name))
        self.placed(0, 1)

    @property
    def _has_state(self) -> bool:
        state = self.start_step != 0 or self.freeze_step is not None or self.observer is not None
        return state or self.schedule is not None

    def _check_schedule(self, schedule: QuantizationSchedule) -> None:
        if self.start_step or self.freeze_step is not None or self.observer is not None:
            raise ValueError("qat: the schedule has start_step, freeze_step and observer; leave these out")
        if schedule.static not in ((), ("output.lhs",)):
            raise ValueError(f"qat: the static operand of a recipe is its input, output.lhs, got {schedule.static}")
        if (schedule.static != ()) is not self.recipe.linear_spec().static:
            raise ValueError(
                f"qat: static operands of the schedule are {schedule.static}; {self.recipe} has "
                f"{'a static' if self.recipe.linear_spec().static else 'no static'} activation"
            )

    def placed(self, index: int, count: int) -> Recipe:
        if (schedule := self.schedule) is not None:
            observer = schedule.following if schedule.static else None
            return ScheduledQAT(self.recipe, schedule.start_step, schedule.freeze_step, observer)
        if self._has_state:
            return ScheduledQAT(self.recipe, self.start_step, self.freeze_step, self.observer)
        if self.lora_rank or self.lora_alpha is not None:
            return LoRAQAT(self.recipe, self.lora_rank, self.lora_alpha, self.compute_dtype)
        return self

    def check_complete(self) -> None:
        if self.observer is None and self.schedule is None:
            self.recipe.check_complete()

    def declines(self, kind: weight_kinds.WeightKind) -> str | None:
        placed = self.placed(0, 1)
        return None if placed is self else placed.declines(kind)

    def check(self, weight: Tensor) -> None:
        (self.recipe.check_form if weight.is_meta else self.recipe.check)(weight)

    def apply(self, weight: Tensor) -> Tensor:
        return qat_weight.FakeQuantizedWeight.of(weight, qat_weight.QATSpec(self.recipe, self.compute_dtype))

    def has_made(self, target: targets.Target[Any]) -> bool:
        weight = target.parameter
        wanted = qat_weight.QATSpec(self.recipe, self.compute_dtype)
        return isinstance(weight, qat_weight.FakeQuantizedWeight) and weight.qat_spec.of_whole() == wanted

    def make(self, target: targets.Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Tensor:
        if target.kind.is_transposed:
            return super().make(target, weight)
        return self.apply(weight)  # that of a convolution keeps its shape
