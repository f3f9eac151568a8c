"""Small quantized tensors of every class and every recipe: what the attack on pickles starts from."""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtorch import LinearSpec, PerGroup, QuantSpec, TensorCoreTiledLayout, ZeroPointDomain, quantize_
from qtorch.dtypes import AffineQuantizedTensor, PlainLayout, QuantizedTensor, to_uintx
from qtorch.primitives import MappingType, PerRow, PerTensor, PerToken, qdtype
from qtorch.recipes.base import RECIPES
from tests import every_recipe
from tests.attack import training_recipes
from tests.movement import kinds

N, K = 96, 64


def _linear(name: str) -> Tensor:
    layer = nn.Linear(K, N)
    recipe = every_recipe.make(name, 32) if name in every_recipe.NAMES else training_recipes.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(layer, recipe)
    return layer.weight


def _convolution(name: str) -> Tensor:
    model = nn.ModuleDict({"conv": nn.Conv2d(8, 16, 2)})
    quantize_(model, {"conv": every_recipe.make(name, 32)})
    return model["conv"].weight


def _experts(name: str) -> Tensor:
    return nn.Parameter(every_recipe.make(name, 32).apply(torch.randn(3, 32, K)), requires_grad=False)


def _tiled() -> Tensor:
    layout = TensorCoreTiledLayout()
    recipe = RECIPES["int4_weight_only"](group_size=32, zero_point_domain=ZeroPointDomain.FLOAT, layout=layout)
    return recipe.apply(torch.randn(N, K, dtype=torch.bfloat16))


def _static_with_zero_point() -> Tensor:
    weight = QuantSpec(qdtype("int8"), PerRow(), quant_min=-127)
    spec = LinearSpec(weight, QuantSpec(qdtype("int8"), PerTensor(), MappingType.ASYMMETRIC), static=True)
    return AffineQuantizedTensor.from_float(
        torch.randn(N, K), spec, act_scale=torch.full((1, 1), 0.02), act_zero_point=torch.full((1, 1), 3)
    )


def _int4_in_bytes() -> Tensor:
    spec = QuantSpec(qdtype("uint4"), PerGroup(32), MappingType.ASYMMETRIC)
    return AffineQuantizedTensor.from_float(torch.randn(N, K), LinearSpec(spec, layout=PlainLayout()))


def _dynamic_asymmetric() -> Tensor:
    spec = QuantSpec(qdtype("int8"), PerToken(), MappingType.ASYMMETRIC)
    return AffineQuantizedTensor.from_float(torch.randn(N, K), LinearSpec(QuantSpec(qdtype("int8"), PerRow()), spec))


def _of_kind(name: str) -> Tensor:
    return kinds.BY_NAME[name].make().weight.detach()  # type: ignore[operator,union-attr]


OF_KINDS = ("int4, last group padded", "int4, Conv1D of GPT-2", "AdamW8bit, exp_avg_sq", "AdamWFp8, exp_avg")

SOURCES: dict[str, Callable[[], Tensor]] = {
    **{name: functools.partial(_linear, name) for name in [*every_recipe.NAMES, *training_recipes.NAMES]},
    **{f"{name}, a convolution": functools.partial(_convolution, name) for name in every_recipe.NAMES},
    **{
        f"{name}, experts": functools.partial(_experts, name)
        for name in ("int8_weight_only", "int4_weight_only", "nf4_weight_only")
    },
    "transposed": lambda: _linear("int8_weight_only").detach().t(),
    "packed, transposed": lambda: _linear("int4_weight_only").detach().t(),
    "tiled": _tiled,
    "int4 in bytes": _int4_in_bytes,
    "uintx": lambda: to_uintx(torch.randint(0, 8, (N, K), dtype=torch.uint8), torch.uint3),
    "static, with a zero point": _static_with_zero_point,
    "dynamic, with zero points": _dynamic_asymmetric,
    "qat of an embedding": lambda: _linear("qat of int8_weight_only"),
    **{name: functools.partial(_of_kind, name) for name in OF_KINDS},
}


@functools.cache
def source(name: str) -> QuantizedTensor | None:
    """The tensor, the same on each call; None for a recipe that leaves a plain parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = SOURCES[name]()
    return made if isinstance(made, QuantizedTensor) else None


NAMES = [name for name in SOURCES if source(name) is not None]
