"""Recipes that exchange the class of layers for one of `TrainedLayer`, and keep what they add in these."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ....calibration.statistics import Statistics
from ....model import targets, weight_kinds
from ....model.install import PreparedModule
from ....primitives import QuantSpec
from ....recipes.base import Recipe, WeightRecipe
from ..layers import LAYERS, FakeQuantizedLayer, Layers, Prepared, layer_for
from ..quantizers import Dynamic, Quantizer
from ..schedule import Schedule, check_steps


class LayerRecipe(Recipe):
    """Base of these recipes: what each float module becomes, and a `hint` at what there is for others."""

    trains: ClassVar[bool] = True
    layers: ClassVar[Layers]
    hint: ClassVar[str] = ""

    def declines(self, kind: weight_kinds.WeightKind) -> str | None:
        if kind.is_layer and not kind.is_transposed:
            return None
        return f"no weight of a layer of torch, and {self.name} exchanges the class of layers"

    def check_target(self, target: targets.Target[Any]) -> None:
        for slot in target.slots:
            if not isinstance(slot.module, PreparedModule):
                layer_for(slot.module, self.layers, self.hint)
            if slot.attribute != "weight":
                raise ValueError(f"is the {slot.attribute} of a layer, not its weight")
        super().check_target(target)

    def install(self, target: targets.Target[Any], made: Any) -> None:
        for module in target.modules:
            layer_for(module, self.layers).prepare(module, made.added)


class ModuleRecipe(LayerRecipe, WeightRecipe):
    """Layers learn, or observe, the scales of `linear_spec()`; the converted weights keep them. A weight in several
    layers has one set of quantizers, which these layers share: the converted weight has one set of scales."""

    layers = LAYERS

    start_step: int
    freeze_step: int | None

    def __post_init__(self) -> None:
        check_steps(self.start_step, self.freeze_step)
        layout = self.linear_spec().layout
        if layout is not None and not layout.any_codes:
            raise ValueError(f"{self.name}: {self.linear_spec()} prunes its weights; layers are trained for dense ones")
        super().__post_init__()

    def check_complete(self) -> None:
        """Scales that the recipe does not give are learned, or observed."""

    def weight_quantizer(self, spec: QuantSpec, weight: Tensor) -> Quantizer:
        """For `weight`, which gives the state its start."""
        return Dynamic(spec, spec.scale_shape(weight.shape), self.freezes)

    def input_quantizer(self, spec: QuantSpec, static: bool) -> Quantizer:
        """For the input of a layer."""
        raise NotImplementedError

    @property
    def freezes(self) -> bool:
        """Whether scales are held from some step on."""
        return self.freeze_step is not None

    def schedule(self) -> Schedule | None:
        """A new one; None: fake-quantized from the first step to the last."""
        return Schedule(self.start_step, self.freeze_step) if self.start_step or self.freezes else None

    def has_made(self, target: targets.Target[Any]) -> bool:
        return all(isinstance(m, FakeQuantizedLayer) and m.recipe == self for m in target.modules)

    def make(self, target: targets.Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Prepared:
        spec, module = self.linear_spec(), target.modules[0]
        layer = LAYERS[type(module)]
        matrix = layer.to_matrix(module, weight)
        if all(isinstance(each, nn.Embedding) for each in target.modules):
            spec = replace(spec, activation=None, static=False)
        of_input = None if spec.activation is None else self.input_quantizer(spec.activation, spec.static)
        of_weight = self.weight_quantizer(spec.weight, matrix)
        state = [quantizer.to(weight.device) for quantizer in (of_weight, of_input) if quantizer is not None]
        nbytes = weight.nbytes + sum(t.nbytes for quantizer in state for t in quantizer.state_dict().values())
        values = layer.from_matrix(module, of_weight.eval()(matrix).values, weight.shape)
        schedule = self.schedule()
        schedule = None if schedule is None else schedule.to(weight.device)
        added = {"recipe": self, "linear_spec": spec, "schedule": schedule}
        return Prepared(values, nbytes, {**added, "weight_quantizer": of_weight, "input_quantizer": of_input})


def check_inference_recipe(recipe: Any, name: str) -> None:
    """Raise `TypeError` unless `recipe` is a recipe for inference. `name` is that of the caller, for the message."""
    if not isinstance(recipe, WeightRecipe) or recipe.trains:
        raise TypeError(f"{name} takes an inference recipe such as int4_weight_only(), got {recipe!r}")
    if recipe.branch_rank:
        raise TypeError(f"{name} trains no branch of low rank, got {recipe!r}; give it the inner recipe")
    if recipe.data is not None:
        raise TypeError(f"{name} learns from training, without data: give it the inner recipe of {recipe!r}")
