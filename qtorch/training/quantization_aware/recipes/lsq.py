"""LSQ and LSQ+: the steps of weights and activations are learned (arXiv 1902.08153 and 2004.09576).

quantize_(model, lsq(weight_bits=4, activation_bits=4, edge_bits=8))
optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, scale_lr=1e-4))
...  # train as usual
quantize_(model, convert())

Equations and gradients: `primitives/fake_quant.py`, and `LearnedStep`.
"""

from dataclasses import replace
from typing import Any

import torch

from ....dtypes import PackedLayout
from ....model.install import check_model
from ....primitives import Granularity, LinearSpec, MappingType, PerRow, PerTensor, QuantSpec, qdtype
from ....primitives.scale_rules import MSERule, ScaleRule
from ....recipes.base import Recipe, WeightRecipe, register_recipe
from .. import learned, quantizers
from .base import ModuleRecipe, check_inference_recipe

LEAST_SQUARES = MSERule(steps=9, smallest=0.2)
"""Where steps start. The papers' `LSQRule()` is some 4 times too coarse at 8 bits."""


WEIGHTS = ("step", "clip", "chosen")
ACTIVATIONS = ("step", "clip")


@register_recipe("lsq")
class LSQ(ModuleRecipe):
    """Weights and activations in few bits, with steps that are trained together with the weights.

    Layers are `nn.Linear`, `nn.Embedding` and `nn.Conv1d` to `nn.Conv3d`, exactly, the latter two where they are named;
    activations have one step for a layer. All parameters are there when `quantize_` returns: build the optimizer then,
    with `parameter_groups`. The steps of activations start from the first batch that is trained on, or from
    `calibrate(model, batches)`.

    Args:
        weight_bits: 2 to 8; signed codes from -2^(b-1) to 2^(b-1) - 1.
        activation_bits: 2 to 8, or None to leave activations in floating point. An input without negative values in
            the first data has unsigned codes.
        granularity: of the weight's steps: `PerRow()`, `PerTensor()` as in the paper, or `PerGroup(n)`.
        activation_offset: learn an offset of the activations too (LSQ+).
        edge_bits: of the weights and activations of the first and the last layer, in the order of the model; None for
            the same as all others.
        weight_init, activation_init: the rule that the steps start from; `LSQRule()` is that of the paper.
        weights: ``"step"``, steps are learned; ``"clip"``, what share of the weight's range they cover is
            (`LearnedClip`), so that they follow the weight; ``"chosen"``, they are chosen anew in each step.
        activations: ``"step"``; ``"clip"``, only what clips moves them (PACT; see `pact`).
        start_step, freeze_step: forward passes in training mode before which a layer is in floating point, and after
            which its scales are held; see `Schedule`.
        recipe: learn the steps of this inference recipe, of integer weights, instead: its weight scales (and zero
            points) from where it would put them; dynamic activation scales stay dynamic, static ones are learned.

    Raises:
        TypeError: `recipe` is not an inference recipe.
        ValueError: bits out of range; `recipe` together with what it says itself, or without integer weights.
    """

    weight_bits: int = 4
    activation_bits: int | None = 4
    granularity: Granularity = PerRow()
    activation_offset: bool = False
    edge_bits: int | None = None
    weight_init: ScaleRule = LEAST_SQUARES
    activation_init: ScaleRule = LEAST_SQUARES
    weights: str = "step"
    activations: str = "step"
    start_step: int = 0
    freeze_step: int | None = None
    recipe: WeightRecipe | None = None

    def __post_init__(self) -> None:
        for name, words in (("weights", WEIGHTS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in words:
                raise ValueError(f"lsq: {name} is one of {', '.join(words)}, got {getattr(self, name)!r}")
        for name in ("weight_bits", "activation_bits", "edge_bits"):
            bits = getattr(self, name)
            if bits not in range(2, 9) and not (bits is None and name != "weight_bits"):
                raise ValueError(f"lsq: {name} is 2 to 8, got {bits}")
        if self.recipe is not None:
            self._check_recipe(self.recipe)
        super().__post_init__()

    def _check_recipe(self, recipe: WeightRecipe) -> None:
        check_inference_recipe(recipe, "lsq")
        own = ("weight_bits", "activation_bits", "granularity", "edge_bits", "weight_init")
        if given := [name for name in own if getattr(self, name) != getattr(LSQ, name)]:
            raise ValueError(f"lsq: {given[0]} is what {recipe} says; leave it out")
        spec = recipe.linear_spec()
        check_learnable(spec.weight, f"lsq: the weights of {recipe}")
        if spec.static and spec.activation is not None:
            check_learnable(spec.activation, f"lsq: the static activations of {recipe}")

    def linear_spec(self) -> LinearSpec:
        if self.recipe is not None:
            return self.recipe.linear_spec()
        layout = PackedLayout() if self.weight_bits < 8 else None
        weight = QuantSpec(qdtype(f"int{self.weight_bits}"), self.granularity, scale_rule=self.weight_init)
        if self.activation_bits is None:
            return LinearSpec(weight, layout=layout)
        return LinearSpec(weight, self._activation(self.activation_bits), static=True, layout=layout)

    def _activation(self, bits: int) -> QuantSpec:
        half, rule = 2 ** (bits - 1), self.activation_init
        kind, mapping = qdtype("int8"), MappingType.ASYMMETRIC
        return QuantSpec(kind, PerTensor(), mapping, scale_rule=rule, quant_min=-half, quant_max=half - 1)

    def placed(self, index: int, count: int) -> Recipe:
        if self.edge_bits is None or 0 < index < count - 1:
            return replace(self, edge_bits=None)
        bits = None if self.activation_bits is None else self.edge_bits
        return replace(self, weight_bits=self.edge_bits, activation_bits=bits, edge_bits=None)

    def weight_quantizer(self, spec: QuantSpec, weight: torch.Tensor) -> quantizers.Quantizer:
        if self.weights == "chosen":
            return super().weight_quantizer(spec, weight)
        shape, dtype = spec.scale_shape(weight.shape), spec.stored_scale_dtype(weight.dtype)
        count = weight.numel() // max(torch.Size(shape).numel(), 1)
        if self.weights == "clip":
            return learned.LearnedClip(spec, shape, self.freezes, scale_dtype=dtype, count=count)
        quantizer = learned.LearnedStep(
            spec, shape, self.freezes, offset=spec.has_zero_point, scale_dtype=dtype, count=count
        ).to(weight.device)
        quantizer.start(*spec.choose_qparams(weight))
        return quantizer

    def input_quantizer(self, spec: QuantSpec, static: bool) -> quantizers.Quantizer:
        if not static:
            return quantizers.Dynamic(spec, (1, 1))
        offset, steps = self.activation_offset and spec.has_zero_point, self.activations == "step"
        quantizer = learned.LearnedStep(spec, (1, 1), self.freezes, offset=offset, through_rounding=steps)
        scale = None if self.recipe is None else self.recipe.act_scale(torch.device("cpu"))
        if scale is not None:
            quantizer.start(scale)
        return quantizer


def check_learnable(spec: QuantSpec, what: str) -> None:
    """Raise `ValueError` where steps of `spec` cannot be learned; the message begins with `what`."""
    if not isinstance(spec, QuantSpec) or spec.dtype.is_floating_point:
        raise ValueError(f"{what} are not integers: {spec}")
    if spec.zero_point_domain.is_real:
        raise ValueError(f"{what} have zero points in floating point; learned ones are codes: {spec}")
    if spec.scale_spec is not None or not (spec.scale_dtype or torch.float32).itemsize > 1:
        raise ValueError(f"{what} have scales in few bits, which cannot be learned: {spec}")


# PACT: activations that are clipped at a learned value (Choi et al., arXiv 1805.06085).
#
#     x_hat = round(clamp(x, 0, a) (2^b - 1) / a) a / (2^b - 1),   dx_hat/da = 1 where x clips, 0 elsewhere
#
# and the loss has a penalty on a^2 (section 3).


def pact(weight_bits: int = 4, activation_bits: int = 4, **options: Any) -> LSQ:
    """`lsq` with the gradient of PACT for activations, and weights whose scales are chosen anew in each step. Inputs
    with negative values are clipped on both sides. A clip that nothing exceeds has no gradient: it starts from least
    squared error, not from the largest value.

    Args:
        weight_bits, activation_bits, options: of `lsq`.
    """
    return LSQ(weight_bits, activation_bits, **{"weights": "chosen", "activations": "clip", **options})


def clip_penalty(model: torch.nn.Module) -> torch.Tensor:
    """sum a^2 over the layers, differentiable, to be added to the loss with a factor: 1e-4 to 1e-3 of weight decay's
    order (the paper gives a the penalty of the weights).

    Raises:
        ValueError: no layer of the model clips its input at a learned value.
    """
    check_model("clip_penalty", model)
    clips = [m for m in model.modules() if isinstance(m, learned.LearnedStep) and not m.through_rounding]
    if not clips:
        raise ValueError("clip_penalty: no layer of the model is prepared by pact()")
    return torch.stack([clip.largest().square().sum() for clip in clips]).sum()
