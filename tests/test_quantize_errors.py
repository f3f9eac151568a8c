"""quantize_ refuses before it changes anything, and names every module that is in the way."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from qtorch import int4_weight_only, int8_weight_only, quantize_, quantize_checkpoint
from qtorch.calibration import gptq
from qtorch.recipes.base import Recipe
from tests.float_checkpoints import decoder, save_shards
from tests.quantize_model import INT8, Mlp, same, state_of
from tests.refusals import refuses


def failing(change: Callable[[Mlp], object]) -> Mlp:
    """A model with both linear layers spoilt."""
    model = Mlp()
    for name in ("up", "down"):
        layer = getattr(model, name)
        setattr(model, name, change(layer) or layer)
    return model


def with_value(value: float) -> Callable[[nn.Linear], None]:
    def change(layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight[1, 2:4] = value

    return change


def with_weight(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], None]:
    def change(layer: nn.Linear) -> None:
        layer.weight = nn.Parameter(make(layer.weight.detach()), requires_grad=False)

    return change


@pytest.mark.parametrize(
    ("change", "recipe", "problem"),
    [
        (lambda layer: None, int4_weight_only(group_size=40), "block_size (1, 40) does not divide shape ("),
        (lambda layer: layer.double(), INT8, "takes float32, float16 or bfloat16 weights, this one is torch.float64"),
        (with_weight(Tensor.int), INT8, "takes float32, float16 or bfloat16 weights, this one is torch.int32"),
        (with_weight(lambda w: w.to(torch.float8_e4m3fn)), INT8, "this one is torch.float8_e4m3fn"),
        (with_value(float("nan")), INT8, "has 2 values of 6144 that are NaN or infinite"),
        (with_value(float("-inf")), INT8, "has 2 values of 6144 that are NaN or infinite"),
        (lambda layer: layer.to("meta"), INT8, "the weight is on the meta device, without values to quantize"),
        (lambda layer: nn.LazyLinear(64), INT8, "the weight is not initialized yet; run the model once"),
        (
            lambda layer: quantize_(layer, INT8) and None,
            int4_weight_only(group_size=32),
            "is already quantized: AffineQuantizedTensor(weight int8",
        ),
    ],
    ids=["group", "float64", "int32", "float8", "nan", "inf", "meta", "lazy", "again"],
)
@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"device": "cpu"}], ids=str)
def test_refused_weights(change: Callable, recipe: Recipe, problem: str, options: dict) -> None:
    model = failing(change)
    before = state_of(model)
    if "meta device" in problem and options.get("dry_run"):
        assert quantize_(model, {"up": recipe, "down": recipe}, **options).quantized
        return
    with pytest.raises(ValueError, match=r"^quantize_: ") as caught:
        quantize_(model, {"embed": INT8, ".*": recipe}, **options)
    up, down, last, *entries = str(caught.value).removeprefix("quantize_: ").splitlines()
    assert up.startswith("up: ")
    assert down.startswith("down: ")
    assert problem in up
    assert problem in down
    if "does not divide" in problem:
        assert last.startswith('the model is unchanged; on_misfit="coarser" accepts them; entries of a map')
        assert [entry.partition(":")[0] for entry in entries] == ['"up"', '"down"']
    else:
        assert (last, entries) == ("the model is unchanged", [])
    assert same(before, state_of(model))


def test_every_offending_module_is_named() -> None:
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(10)])
    with pytest.raises(ValueError, match=r"^quantize_: ") as caught:
        quantize_(model, int4_weight_only(group_size=16))
    assert_expected_inline(
        str(caught.value),
        """\
quantize_: 0: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
1: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
2: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
3: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
4: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
5: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
6: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
7: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1
... and 2 more
the model is unchanged; on_misfit="coarser" accepts them; entries of a mapping that fit, to stand before others:
"0": int4_weight_only(group_size=8),  # or None
"1": int4_weight_only(group_size=8),  # or None
"2": int4_weight_only(group_size=8),  # or None
"3": int4_weight_only(group_size=8),  # or None
"4": int4_weight_only(group_size=8),  # or None
"5": int4_weight_only(group_size=8),  # or None
"6": int4_weight_only(group_size=8),  # or None
"7": int4_weight_only(group_size=8),  # or None""",
    )


def test_a_custom_recipe_is_checked_too() -> None:
    class Picky(Recipe):
        name = "picky"

        def check(self, weight: Tensor) -> None:
            raise TypeError("no")

    refuses(r"^quantize_: up: no\ndown: no\nthe model is unchanged$", lambda: quantize_(Mlp(), Picky()))


@pytest.mark.parametrize(
    "recipe", [int8_weight_only, "int8", None, nn.Linear, {"up": int8_weight_only}, {"up": "int8"}]
)
def test_not_a_recipe(recipe: object) -> None:
    hint = "; call it: int8_weight_only()" if "Int8WeightOnly" in repr(recipe) else ""
    given = recipe["up"] if isinstance(recipe, dict) else recipe
    hint = "; remove the quotes: int8_weight_only()" if given == "int8" else hint
    message = f"quantize_: takes a recipe such as int8_weight_only(), got {given!r}{hint}"
    refuses(f"^{re.escape(message)}$", lambda: quantize_(Mlp(), recipe), TypeError)


@pytest.mark.parametrize(
    ("model", "recipe", "filter_fn", "why"),
    [
        (nn.ReLU(), INT8, None, "the model has no weight of two or more dimensions"),
        (nn.LayerNorm(8), INT8, None, "the model has no weight of two or more dimensions"),
        (nn.Embedding(4, 8), INT8, None, 'weight: an embedding; ask for it by name, or with targets="all"'),
        (nn.Linear(8, 8), INT8, lambda module, name: False, "weight: filter_fn"),
        (nn.Linear(8, 8), {}, None, "weight: no entry of the mapping asks for it"),
        (nn.Linear(8, 8), {"weight": None}, None, "weight: None for 'weight'"),
    ],
)
def test_nothing_to_quantize(model: nn.Module, recipe: object, filter_fn: object, why: str) -> None:
    before = state_of(model)
    with pytest.raises(ValueError, match=re.escape(f"quantize_: nothing to quantize: {why}")):
        quantize_(model, recipe, filter_fn, device="meta")  # had it been moved, it would have lost its weights
    assert same(before, state_of(model))


@pytest.mark.parametrize("function", [quantize_, quantize_checkpoint])
@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("int8", {}, "takes a recipe such as"),
        ({1: INT8}, {}, "the mapping takes names and regular expressions, got 1"),
        ({"*.q_proj": INT8}, {}, "is neither a name nor a regular expression"),
        ({"haed": INT8}, {}, "'haed' matches no linear layer"),
        ({r"layers\..*": INT8, "layers.0.q_proj": INT8}, {}, "taken by entries before it"),
        ({".*": None}, {}, "nothing to quantize"),
        (INT8, {"targets": "lines"}, "targets is one or some of"),
        (INT8, {"on_misfit": "round"}, "on_misfit is 'error', 'pad'"),
        (int4_weight_only(group_size=48), {}, 'on_misfit="coarser" accepts them'),
        ({"layers.0.q_proj": gptq(INT8, [1]), "layers.1.q_proj": gptq(INT8, [2])}, {}, "take the same data"),
    ],
)
def test_errors_name_the_function_that_was_called(
    function: Any, recipe: object, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    given: Any = (decoder(),)
    if function is quantize_checkpoint:
        given = save_shards(decoder().state_dict(), tmp_path / "float", 1), tmp_path / "q.safetensors"
    with pytest.raises((ValueError, TypeError), match=f"(?s)^{function.__name__}: .*{re.escape(words)}"):
        function(*given, recipe, **options)
