"""Inner tensors are those that the scheme says, and those of a parameter too; tests/attack changes them later on."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import qtorch
from qtorch import int4_weight_only, int8_weight_only, lut_weight_only, quantize_
from qtorch.dtypes import MatrixWeight, QuantizedTensor, base, copying
from qtorch.kernels.custom_ops import number_of
from qtorch.primitives.layouts.base import check_inner_tensors
from qtorch.recipes.base import Recipe, WeightRecipe
from qtorch.training import TrainingWeight, bitnet_training, int8_mixed_precision_training, qat, switchback_training
from qtorch.training.engine.operand import quantize_operand
from qtorch.training.weights.base import TrainingScheme
from qtorch.training.weights.codes import WeightInCodes
from qtorch.training.weights.gathered import GatheredWeight
from tests.attack import battery, pickles
from tests.every_recipe import NAMES, make
from tests.movement import holding, kinds
from tests.refusals import refuses

RECIPES = [make(name) for name in ("int8_weight_only", "int4_weight_only", "nf4_weight_only")]
RECIPES += [make("int8_dynamic_activation_int8_weight"), make("int8_dynamic_activation_int4_weight", 32)]


def quantized(recipe: WeightRecipe = RECIPES[0]) -> QuantizedTensor:
    return recipe.apply(torch.randn(256, 256))  # type: ignore[return-value]


class Crafted:
    """Pickled as a call of `rebuild` with these arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return base.rebuild, self.args


def load(*args: Any) -> Any:
    return holding.through_file({"weight": Crafted(*args)})["weight"]


def arguments(weight: QuantizedTensor, **changes: Any) -> list[Any]:
    """Of `rebuild`, some changed by position or inner tensor."""
    name, tensors, scheme, requires_grad, is_parameter, state = weight.__reduce_ex__(2)[1]
    return [
        changes.pop("type_name", name), {**tensors, **changes.pop("tensors", {})}, changes.pop("scheme", scheme),
        requires_grad, is_parameter, changes.pop("state", state),
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", ["[200000, 4096]", "[512, 256]", "[256, 512]", "[255, 256]", "[256]", "[-1, 256]"])
def test_a_scheme_of_another_shape(recipe: WeightRecipe, shape: str) -> None:
    weight = quantized(recipe)
    scheme = weight.__reduce_ex__(2)[1][2].replace("[256, 256]", shape)
    refuses("damaged: ", lambda: load(*arguments(weight, scheme=scheme)))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("change", [
    {"scale": torch.empty(0, 1)}, {"scale": torch.ones(1, 1)}, {"scale": torch.ones(255, 1)},
    {"scale": torch.ones(256, 1, dtype=torch.int32)}, {"scale": torch.sparse_coo_tensor(size=(256, 1))},
    {"scale": None}, {"qdata": torch.empty(2, 2, dtype=torch.int8)},
    {"qdata": torch.empty(256, 256, device="meta", dtype=torch.int8)}, {"more": torch.ones(1)}, {"qdata": "no tensor"},
], ids=["empty", "one", "fewer", "integers", "sparse", "missing", "small", "meta", "more", "text"])  # fmt: skip
def test_inner_tensors_of_another_kind(recipe: WeightRecipe, change: dict[str, Any]) -> None:
    refuses("damaged: ", lambda: load(*arguments(quantized(recipe), tensors=change)))


@pytest.mark.parametrize("state", [
    {"qdata": torch.empty(1, 1, dtype=torch.int8)}, {"scale": 1}, {"plain": 1}, {"scheme": 1}, {"dequantize": 1},
    {"fast_linear": 1}, {"__class__": 1}, {"shape": 1}, {1: 1}, [],
])  # fmt: skip
def test_attributes_replace_nothing(state: Any) -> None:
    refuses("damaged: ", lambda: load(*arguments(quantized(), state=state)))


@pytest.mark.parametrize("type_name", ["LUTQuantizedTensor", "ConvWeight", "MasterWeight", "QuantizedTensor", "?", 1])
def test_another_type(type_name: Any) -> None:
    refuses("the file holds a", lambda: load(*arguments(quantized(), type_name=type_name)))


def test_sizes_and_classes() -> None:
    """They may be called by themselves. From 2.15 on, torch makes every error of an operator in C++ a RuntimeError."""
    x, codes, scale = torch.randn(2, 256), torch.zeros(256, 256, dtype=torch.int8), torch.ones(256, 1)
    mm = torch.ops.qtorch.cpu_weight_only_mm
    about = (False, number_of("int8"), -127.0, 127.0, number_of("NONE"))
    mm(x, codes, 256, scale, None, *about, None)
    wrong: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor | None]] = [
        (codes, 512, scale, None), (codes[:8], 256, scale, None), (codes, 256, scale[:8], None),
        (codes, 256, scale, torch.zeros(8)),
    ]  # fmt: skip
    for args in wrong:
        with pytest.raises((ValueError, RuntimeError), match="shape"):
            mm(x, args[0], args[1], args[2], None, *about, args[3])
    bases = {QuantizedTensor, MatrixWeight, TrainingWeight, WeightInCodes}
    # Other tests register classes of their own.
    known = {kind for kind in copying._TYPES.values() if kind.__module__.startswith("qtorch.")}
    assert {type(weight) for weight in OF_CLASSES.values()} == known - bases


@pytest.mark.parametrize("name", NAMES)
def test_forms_are_those_of_what_layouts_pack(name: str) -> None:
    weight = make(name, 32).apply(torch.randn(64, 128))
    assert isinstance(weight, QuantizedTensor)
    check_inner_tensors(weight.inner_tensors, type(weight).forms(weight.scheme), weight.scheme)


# --- attributes that are set later, by a caller or by the state of a parameter in a pickle ---
def _one_of_each() -> dict[str, QuantizedTensor]:
    """A tensor of each class with each set of inner tensors."""
    weights = {kind.name: kind.make().weight.detach() for kind in kinds.KINDS}  # type: ignore[operator,union-attr]
    training = switchback_training().training_spec()
    codes = quantize_operand(torch.randn(64, 128), training.output.rhs)
    scheme = TrainingScheme(training, (64, 128), torch.float32)
    weights["gathered"] = GatheredWeight({"qdata": codes.values, "scale": codes.scale}, scheme)
    found = {(type(w), *w.inner_tensors): name for name, w in weights.items() if isinstance(w, QuantizedTensor)}
    return {name: weights[name] for name in found.values()}


OF_CLASSES = _one_of_each()


def set_by_a_caller(weight: QuantizedTensor, name: str, value: Any) -> QuantizedTensor:
    setattr(weight, name, value)
    return weight


def set_by_a_file(weight: QuantizedTensor, name: str, value: Any) -> QuantizedTensor:
    with_state = torch._utils._rebuild_parameter_with_state  # type: ignore[attr-defined]
    arguments = (weight, False, OrderedDict(), {name: value})
    return holding.through_file([pickles.Reduced(with_state, arguments)])[0]  # type: ignore[no-any-return]


def wrong_values(inner: torch.Tensor) -> list[Any]:
    other = torch.float64 if inner.dtype != torch.float64 else torch.float32
    tensors = [inner.to(torch.complex64 if inner.is_floating_point() else other), inner[None], inner.to("meta")]
    return [None, "text", 0, {}, torch.zeros(0), *tensors, inner.float().to_sparse()]


@pytest.mark.parametrize("set_attribute", [set_by_a_caller, set_by_a_file])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_an_inner_tensor_cannot_be_replaced_by_what_does_not_fit(name: str, set_attribute: Any) -> None:
    weight = OF_CLASSES[name]
    before = dict(vars(weight))
    for inner in (*weight.tensor_names(weight.scheme), "scheme"):
        present = weight.inner_tensors.get(inner)
        for value in ["text", torch.ones(1)] if present is None else wrong_values(present):
            refuses(inner, lambda inner=inner, new=value: set_attribute(weight, inner, new), (ValueError, TypeError))
    assert all(vars(weight)[key] is value for key, value in before.items())


@pytest.mark.parametrize("name", OF_CLASSES)
def test_what_fits_and_what_cannot_be_hidden(name: str) -> None:
    weight = OF_CLASSES[name].clone()
    other = OF_CLASSES[name].clone()
    for inner, tensor in other.inner_tensors.items():
        setattr(weight, inner, tensor.zero_())
    weight.of_the_user = "text"  # type: ignore[attr-defined]
    assert torch.equal(weight.dequantize(), other.dequantize())
    assert holding.through_file([weight])[0].of_the_user == "text"
    # Attributes of torch can be set to what torch takes, and what kernels keep can be dropped.
    for attribute in dir(weight := OF_CLASSES[name]):
        by_torch = (AttributeError, RuntimeError) if hasattr(torch.Tensor, attribute) else ()
        for value in ("text", None, {}, dict):
            try:
                got = set_by_a_caller(weight.clone(), attribute, value)
            except (ValueError, TypeError, *by_torch):
                continue
            battery.whole(got)
            assert torch.equal(got.dequantize(), weight.dequantize()), f"{attribute} = {value}"


PARAMETER_RECIPES: list[Recipe] = [
    int8_weight_only(), int4_weight_only(group_size=32), lut_weight_only(3), int8_mixed_precision_training(),
    qtorch.training.int8_weight_only_quantized_training(stochastic_rounding=False), bitnet_training(),
    qat(int8_weight_only()),
]  # fmt: skip
every_recipe = pytest.mark.parametrize("recipe", PARAMETER_RECIPES, ids=str)


def layer(recipe: Recipe) -> torch.nn.Linear:
    linear = torch.nn.Linear(64, 32)
    quantize_(linear, recipe)
    return linear


@every_recipe
def test_parameters_of_floats_and_data_that_does_not_fit(recipe: Recipe) -> None:
    with pytest.raises(TypeError, match="takes inner tensors and a scheme"):
        type(layer(recipe).weight)(torch.randn(32, 64), requires_grad=False)  # type: ignore[arg-type]
    # tests/attack assigns what fits, before and after calls.
    weight = layer(recipe).weight
    with pytest.raises(ValueError, match=r"\(32, 64\) takes a tensor of that shape, got \(64, 32\)"):
        weight.data = torch.randn(64, 32)
    with pytest.raises(TypeError, match="takes a tensor"):
        weight.data = [1.0]
    assert weight.shape == (32, 64)
    weight.data = weight.data.to(torch.bfloat16)
    assert weight.dtype == torch.bfloat16


READERS: dict[str, Any] = {
    "asarray": np.asarray, "np.from_dlpack": np.from_dlpack, "to_dlpack": torch.utils.dlpack.to_dlpack,
    "storage": lambda w: w.storage()[0], "storage bytes": lambda w: bytes(w.untyped_storage()),
}  # fmt: skip
"""Beside those of tests/attack/raw_memory.py."""


@every_recipe
@pytest.mark.parametrize("reader", READERS)
def test_memory_that_is_not_there(recipe: Recipe, reader: str) -> None:
    weight = layer(recipe).weight.detach()
    assert isinstance(weight, QuantizedTensor)
    refuses(r"dequantize\(\)|data pointer|not allocated", lambda: READERS[reader](weight), (TypeError, RuntimeError))
