"""The rows of docs/reference/movement.md: every kind of quantized tensor, in a small module that uses it.

A new recipe is a row by itself. Modules of the same seed are equal, and so are those of another number of rows up to
their rows, so that every process can make the same one.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from qtorch import LinearSpec, MappingType, PerGroup, int4_weight_only, int8_dynamic_activation_int8_weight, quantize_
from qtorch.dtypes import AffineQuantizedTensor, PlainLayout, to_uintx
from qtorch.model import install, misfit
from qtorch.primitives import qdtype
from qtorch.training import int8_mixed_precision_training, int8_weight_only_quantized_training, optim, qat
from qtorch.training.optim.qgalore import stored
from tests import every_recipe
from tests.attack import subject, training_recipes

K = 64
"""Features of the inputs."""

FROZEN, LAYOUT, FORM = "Frozen weights of linear layers", "In other layouts", "Frozen weights of other modules"
TRAINING, OTHER = "Weights in training", "Other tensors"
FAMILIES = (FROZEN, LAYOUT, FORM, TRAINING, OTHER)

Make = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Kind:
    """A row.

    Attributes:
        name, family: on the page.
        module: (seed, rows) -> a module whose parameter `weight` has that many rows.
        inputs: what it is called with.
        rows: an even number, and one that two processes do not divide.
        recipe: of `quantize_`, if it is a recipe for a linear layer.
        multiplies: whether products are called with it.
    """

    name: str
    family: str
    module: Make
    inputs: Callable[[], Tensor]
    rows: tuple[int, int] = (64, 97)
    recipe: Any = None
    multiplies: bool = True

    def __str__(self) -> str:
        return self.name

    def make(self, seed: int = 0, rows: int | None = None) -> nn.Module:
        """The module; ranges that are learned or observed have had an input, the same for all seeds."""
        with torch.random.fork_rng(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            module = self.module(seed, rows or self.rows[0])
            if any(isinstance(part, install.PreparedModule) for part in module.modules()):
                module(self.inputs())
        return module

    @property
    def trains(self) -> bool:
        return self.family == TRAINING


def normal(*shape: int, seed: int = 1) -> Tensor:
    """The same numbers for one seed, and for fewer rows the first of them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- modules ---
def linear(recipe: Any, columns: int = K) -> Make:
    def make(seed: int, rows: int) -> nn.Module:
        layer = nn.Linear(columns, rows)
        quantize_(layer, recipe)
        return layer

    return make


def quantized(layer: nn.Module, recipe: Any) -> nn.Module:
    quantize_(nn.ModuleDict({"layer": layer}), {"layer": recipe})
    return layer


def _conv(recipe: Any) -> Make:
    return lambda seed, rows: quantized(nn.Conv2d(8, rows, 3), recipe)


def embedding(recipe: Any) -> Make:
    return lambda seed, rows: quantized(nn.Embedding(rows, K), recipe)


def _experts(recipe: Any) -> Make:
    def make(seed: int, rows: int) -> nn.Module:
        module = subject.Experts(rows, 32)
        weight = recipe.apply(module.weight.detach())
        module.weight = nn.Parameter(weight, hasattr(recipe, "training_spec") or isinstance(recipe, qat))
        return module

    return make


class Conv1D(nn.Module):
    """As in GPT-2: the weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def _transposed(recipe: Any) -> Make:
    """Its rows are the inputs."""

    def make(seed: int, rows: int) -> nn.Module:
        return quantized(Conv1D(K, rows), recipe)

    return make


class Read(nn.Module):
    """A tensor that is read and multiplies nothing."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:1, :1] + self.weight.dequantize()


def _moment(name: str, key: str) -> Make:
    """A state of an optimizer after a step."""

    def make(seed: int, rows: int) -> nn.Module:
        layer = nn.Linear(K, rows, bias=False)
        optimizer = getattr(optim, name)(layer.parameters())
        layer.weight.grad = torch.randn(rows, K)
        optimizer.step()
        return Read(optimizer.state[layer.weight][key])

    return make


def _uintx(seed: int, rows: int) -> nn.Module:
    return Read(to_uintx(torch.randint(0, 8, (rows, K), dtype=torch.uint8), torch.uint3))


def _of_spec(spec: LinearSpec, dtype: torch.dtype = torch.float32) -> Make:
    def make(seed: int, rows: int) -> nn.Module:
        layer = nn.Linear(K, rows)
        weight = AffineQuantizedTensor.from_float(layer.weight.detach().to(dtype), spec).to(torch.float32)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    return make


# --- the table ---
rows_of = functools.partial(normal, 8, K)
images = functools.partial(normal, 4, 8, 5, 5)
INT4 = int4_weight_only(group_size=32)
INT4_ROWS = LinearSpec(qtorch.QuantSpec(qdtype("uint4"), PerGroup(32), MappingType.ASYMMETRIC), layout=PlainLayout())


def ids() -> Tensor:
    return torch.tensor([[0, 3, 60], [5, 3, 63]])


def _forms(name: str, recipe: Any, family: str, of_conv: Any = None) -> list[Kind]:
    """A recipe for the weights of other modules than linear layers."""
    return [
        Kind(f"{name}, a convolution", family, _conv(of_conv or recipe), images, (16, 13)),
        Kind(f"{name}, an embedding", family, embedding(recipe), ids),
        Kind(f"{name}, experts", family, _experts(recipe), functools.partial(normal, 1, 4, K), (4, 3)),
    ]


def _kinds() -> list[Kind]:
    tiled = int4_weight_only(32, qtorch.ZeroPointDomain.FLOAT, layout=qtorch.TensorCoreTiledLayout())
    sparse = qtorch.block_sparse(int8_dynamic_activation_int8_weight(), 0.5, block_size=16)
    beside = qtorch.low_rank(INT4, rank=4)
    recipes = {name: every_recipe.make(name, 32) for name in every_recipe.NAMES}
    found = [Kind(name, FROZEN, linear(recipe), rows_of, recipe=recipe) for name, recipe in recipes.items()]
    found += [
        Kind("int4, a byte each", LAYOUT, _of_spec(INT4_ROWS), rows_of),
        Kind("int4, TensorCoreTiledLayout", LAYOUT, linear(tiled), rows_of, recipe=tiled),
        Kind("block_sparse", LAYOUT, linear(sparse), rows_of, (64, 80), recipe=sparse),
        Kind("low_rank", LAYOUT, linear(beside), rows_of, recipe=beside),
        Kind("int4, last group padded", LAYOUT, linear(misfit.Padded(INT4, 24), 40), functools.partial(normal, 8, 40)),
    ]
    of_conv = int4_weight_only(group_size=24)
    for name, recipe in (("int8", qtorch.int8_weight_only()), ("int4", INT4), ("nf4", qtorch.nf4_weight_only())):
        others = _forms(name, recipe, FORM, None if name == "int8" else replace(recipe, group_size=24))
        found += others
        found.append(Kind(f"{name}, Conv1D of GPT-2", FORM, _transposed(recipe), rows_of))
    dynamic = int8_dynamic_activation_int8_weight()
    found.append(Kind("int8 inputs, a convolution", FORM, _conv(dynamic), images, (16, 13)))
    for name in [*training_recipes.NAMES, *training_recipes.VARIANTS]:
        recipe = training_recipes.make(name)
        squares = ("int8_tilewise_training", "mxfp4_training", "nvfp4_training", "float8_training by blocks")
        rows = (64, 96) if name in squares else (64, 97)  # blocks of 16 or 32 rows
        found.append(Kind(name, TRAINING, linear(recipe), rows_of, rows, recipe))
    for name, recipe in (
        ("int8 mixed precision", int8_mixed_precision_training()),
        ("int8 codes", int8_weight_only_quantized_training()),
        ("qat", qat(INT4)),
    ):
        found += _forms(name, recipe, TRAINING, qat(of_conv) if name == "qat" else None)
    for name, key in itertools.product(("AdamW8bit", "AdamW4bit", "AdamWFp8"), ("exp_avg", "exp_avg_sq")):
        found.append(Kind(f"{name}, {key}", OTHER, _moment(name, key), rows_of, multiplies=False))
    projection = lambda seed, rows: Read(stored(torch.randn(rows, K)))  # noqa: E731
    found.append(Kind("QGaLore, projection", OTHER, projection, rows_of, multiplies=False))
    found.append(Kind("to_uintx", OTHER, _uintx, rows_of, multiplies=False))
    return found


KINDS = _kinds()
BY_NAME = {kind.name: kind for kind in KINDS}
assert len(BY_NAME) == len(KINDS)
