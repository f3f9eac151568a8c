"""Small quantized tensors of every class and every recipe: what the attack on pickles starts from."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PerTensor, PerToken, QuantSpec
from qtorch.dtypes import QuantizedTensor
from tests import every_recipe
from tests.movement import kinds

INT8 = QuantSpec("int8", quant_min=-127)


def _of_spec(activation: QuantSpec, **static: Tensor) -> Tensor:
    spec = LinearSpec(INT8, activation, static=bool(static))
    return AffineQuantizedTensor.from_float(torch.randn(96, kinds.K), spec, **static)


def _of_kind(name: str) -> Tensor:
    return kinds.BY_NAME[name].make().weight


def _of_layer(layer: nn.Module, recipe: object) -> Tensor:
    return kinds.quantized(layer, recipe).weight


FAMILIES = (kinds.FROZEN, kinds.LAYOUT, kinds.FORM, kinds.TRAINING)
CONVOLUTIONS = {f"{name}, as a convolution": every_recipe.make(name, 32) for name in every_recipe.NAMES}

SOURCES: dict[str, Callable[[], Tensor]] = {
    **{
        kind.name: functools.partial(_of_kind, kind.name)
        for kind in kinds.KINDS
        if kind.family in FAMILIES and "Conv1D" not in kind.name  # whose products are not those of `F.linear`
    },
    **{name: lambda recipe=recipe: _of_layer(nn.Conv2d(8, 16, 2), recipe) for name, recipe in CONVOLUTIONS.items()},
    "uintx": lambda: _of_kind("to_uintx"),
    "transposed": lambda: _of_kind("int8_weight_only").detach().t(),
    "packed, transposed": lambda: _of_kind("int4_weight_only").detach().t(),
    "static, with a zero point": lambda: _of_spec(
        QuantSpec("int8", PerTensor(), MappingType.ASYMMETRIC),
        act_scale=torch.full((1, 1), 0.02),
        act_zero_point=torch.full((1, 1), 3),
    ),
    "dynamic, with zero points": lambda: _of_spec(QuantSpec("int8", PerToken(), MappingType.ASYMMETRIC)),
}


@functools.cache
def source(name: str) -> QuantizedTensor | None:
    """The tensor, the same on each call; None for a recipe that leaves a plain parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = SOURCES[name]()
    return made if isinstance(made, QuantizedTensor) else None


NAMES = [name for name in SOURCES if source(name) is not None]
