"""`quantize_` on small models: what it gives, and what it refuses before it changes anything, by name."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import gptq
from tests.float_checkpoints import decoder, save_shards
from tests.quantize_model import INT8, Mlp, same, state_of
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("torch_kernels")


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


@pytest.mark.parametrize(("change", "recipe", "problem"), [
    (lambda layer: None, qtorch.int4_weight_only(group_size=40), "block_size (1, 40) does not divide shape ("),
    (lambda layer: layer.double(), INT8, "takes float32, float16 or bfloat16 weights, this one is torch.float64"),
    (with_weight(Tensor.int), INT8, "takes float32, float16 or bfloat16 weights, this one is torch.int32"),
    (with_weight(lambda w: w.to(torch.float8_e4m3fn)), INT8, "this one is torch.float8_e4m3fn"),
    (with_value(float("nan")), INT8, "has 2 values of 6144 that are NaN or infinite"),
    (with_value(float("-inf")), INT8, "has 2 values of 6144 that are NaN or infinite"),
    (lambda layer: layer.to("meta"), INT8, "the weight is on the meta device, without values for"),
    (lambda layer: nn.LazyLinear(64), INT8, "the weight is not initialized yet; run the model once"),
    (
        lambda layer: qtorch.quantize_(layer, INT8) and None,
        qtorch.int4_weight_only(group_size=32),
        "is already quantized: AffineQuantizedTensor(weight int8",
    ),
], ids=["group", "float64", "int32", "float8", "nan", "inf", "meta", "lazy", "again"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"device": "cpu"}], ids=str)
def test_refused_weights(change: Callable, recipe: qtorch.recipes.base.Recipe, problem: str, options: dict) -> None:
    model = failing(change)
    before = state_of(model)
    if "meta device" in problem and options.get("dry_run"):
        assert qtorch.quantize_(model, {"up": recipe, "down": recipe}, **options).quantized
        return
    with pytest.raises(ValueError, match=r"^quantize_: ") as caught:
        qtorch.quantize_(model, {"embed": INT8, ".*": recipe}, **options)
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
        qtorch.quantize_(model, qtorch.int4_weight_only(group_size=16))
    problems = [f"{n}: block_size (1, 16) does not divide shape (24, 24): 24 % 16 along axis 1" for n in range(8)]
    entries = [f'"{n}": int4_weight_only(group_size=8),  # or None' for n in range(8)]
    more = 'on_misfit="coarser" accepts them; entries of a mapping that fit, to stand before others:'
    lines = [*problems, "... and 2 more", f"the model is unchanged; {more}", *entries]
    assert str(caught.value) == "quantize_: " + "\n".join(lines)


def test_a_custom_recipe_is_checked_too() -> None:
    class Picky(qtorch.recipes.base.Recipe):
        name = "picky"

        def check(self, weight: Tensor) -> None:
            raise TypeError("no")

    refuses(r"^quantize_: up: no\ndown: no\nthe model is unchanged$", lambda: qtorch.quantize_(Mlp(), Picky()))


@pytest.mark.parametrize(
    "recipe", [qtorch.int8_weight_only, "int8", None, nn.Linear, {"up": qtorch.int8_weight_only}, {"up": "int8"}]
)
def test_not_a_recipe(recipe: object) -> None:
    hint = "; call it: int8_weight_only()" if "Int8WeightOnly" in repr(recipe) else ""
    given = recipe["up"] if isinstance(recipe, dict) else recipe
    hint = "; remove the quotes: int8_weight_only()" if given == "int8" else hint
    message = f"quantize_: takes a recipe such as int8_weight_only(), got {given!r}{hint}"
    refuses(f"^{re.escape(message)}$", lambda: qtorch.quantize_(Mlp(), recipe), TypeError)


@pytest.mark.parametrize(("model", "recipe", "filter_fn", "why"), [
    (nn.ReLU(), INT8, None, "the model has no weight of two or more dimensions"),
    (nn.LayerNorm(8), INT8, None, "the model has no weight of two or more dimensions"),
    (nn.Embedding(4, 8), INT8, None, 'weight: an embedding; ask for it by name, or with targets="all"'),
    (nn.Linear(8, 8), INT8, lambda module, name: False, "weight: filter_fn"),
    (nn.Linear(8, 8), {}, None, "weight: no entry of the mapping asks for it"),
    (nn.Linear(8, 8), {"weight": None}, None, "weight: None for 'weight'"),
])  # fmt: skip
def test_nothing_to_quantize(model: nn.Module, recipe: object, filter_fn: object, why: str) -> None:
    before = state_of(model)
    with pytest.raises(ValueError, match=re.escape(f"quantize_: nothing to quantize: {why}")):
        qtorch.quantize_(model, recipe, filter_fn, device="meta")  # had it been moved, it would have lost its weights
    assert same(before, state_of(model))


@pytest.mark.parametrize("function", [qtorch.quantize_, qtorch.quantize_checkpoint])
@pytest.mark.parametrize(("recipe", "options", "words"), [
    ("int8", {}, "takes a recipe such as"),
    ({1: INT8}, {}, "the mapping takes names and regular expressions, got 1"),
    ({"*.q_proj": INT8}, {}, "is neither a name nor a regular expression"),
    ({"haed": INT8}, {}, "'haed' matches no linear layer"),
    ({r"layers\..*": INT8, "layers.0.q_proj": INT8}, {}, "taken by entries before it"),
    ({".*": None}, {}, "nothing to quantize"),
    (INT8, {"targets": "lines"}, "targets is one or some of"),
    (INT8, {"on_misfit": "round"}, "on_misfit is 'error', 'pad'"),
    (qtorch.int4_weight_only(group_size=48), {}, 'on_misfit="coarser" accepts them'),
    ({"layers.0.q_proj": gptq(INT8, [1]), "layers.1.q_proj": gptq(INT8, [2])}, {}, "take the same data"),
])  # fmt: skip
def test_errors_name_the_function_that_was_called(
    function: Any, recipe: object, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    given: Any = (decoder(),)
    if function is qtorch.quantize_checkpoint:
        given = save_shards(decoder().state_dict(), tmp_path / "float", 1), tmp_path / "q.safetensors"
    with pytest.raises((ValueError, TypeError), match=f"(?s)^{function.__name__}: .*{re.escape(words)}"):
        function(*given, recipe, **options)


# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.

# recipe, lowest and highest SQNR of a model's output in dB, the linear kernel that runs on fp32
CASES = [
    (INT8, 33, 55, "linear:weight_only_mm"),
    (qtorch.int4_weight_only(group_size=32), 13, 30, "linear:packed_weight_mm"),
    (qtorch.int8_dynamic_activation_int8_weight(), 30, 50, "linear:int8_scaled_mm"),
    (qtorch.int8_dynamic_activation_int4_weight(), 13, 30, "linear:packed_int8_scaled_mm"),
]
every_case = pytest.mark.parametrize(("recipe", "low", "high", "kernel"), CASES, ids=[case[0].name for case in CASES])


def output(model: nn.Module, *args: Tensor) -> tuple[Tensor, list[str]]:
    """What the model gives, and which linear kernels ran."""
    with torch.no_grad(), qtorch.kernels.record_kernels() as ran:
        y = model(*args)
    return y, [name for name in ran if name.startswith("linear:")]


@every_case
def test_small_model(recipe: qtorch.recipes.base.Recipe, low: float, high: float, kernel: str) -> None:
    model, ids = Mlp(), torch.randint(32, (4, 5))
    model.up.register_forward_hook(lambda module, args, result: None)
    before, wanted = state_of(model), output(model, ids)[0]
    report = qtorch.quantize_(model, recipe)
    y, ran = output(model, ids)
    assert low < qtorch.compute_error(wanted, y) < high
    assert ran == [kernel] * 2
    assert {layer.kernel for layer in report.quantized} == {kernel.partition(":")[2]}
    changed = [name for (name, old), (_, new) in zip(before, state_of(model), strict=True) if old is not new]
    assert changed == ["up.weight", "down.weight"]


@every_case
def test_transformer_encoder(recipe: qtorch.recipes.base.Recipe, low: float, high: float, kernel: str) -> None:
    """Whose fast path reads the weights itself."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 64)
    wanted = output(model, x)[0]
    assert len(qtorch.quantize_(model, recipe).quantized) == 8
    y, ran = output(model, x)
    assert low - 5 < qtorch.compute_error(wanted, y) < high
    assert ran == [kernel] * 8


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_projection_asked_for_by_name(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=batch_first)
    x = torch.randn(2, 7, 64)
    wanted = attention(x, x, x)[0]
    qtorch.quantize_(attention, {"in_proj_weight": INT8, "out_proj": INT8})
    with qtorch.kernels.record_kernels() as ran:
        y = attention(x, x, x)[0]
    assert 35 < qtorch.compute_error(wanted, y) < 55
    assert ran.count("linear:weight_only_mm") == 2


def test_dry_run_and_device() -> None:
    model = Mlp()
    before = state_of(model)
    versions = [parameter._version for parameter in model.parameters()]
    predicted = qtorch.quantize_(model, INT8, dry_run=True)
    assert same(before, state_of(model))
    assert versions == [parameter._version for parameter in model.parameters()]
    done = qtorch.quantize_(model, INT8)
    assert predicted.layers == done.layers
    assert (predicted.dry_run, done.dry_run) == (True, False)
    model, ids = Mlp(), torch.randint(32, (4,))
    twin, before = copy.deepcopy(model), state_of(model)
    refuses("device='nowhere' is not available here", lambda: qtorch.quantize_(model, INT8, device="nowhere"))
    assert same(before, state_of(model))
    qtorch.quantize_(model, INT8, device=torch.device("cpu"))
    qtorch.quantize_(twin, INT8, device="cpu")
    assert torch.equal(output(model, ids)[0], output(twin, ids)[0])


@pytest.mark.parametrize("progress", [False, True])
def test_progress(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    qtorch.quantize_(Mlp(), INT8, progress=progress)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert ("quantize: 100%" in captured.err) == progress
    assert progress or not captured.err


def test_dequantize() -> None:
    model, ids = Mlp(), torch.randint(32, (4,))
    original = copy.deepcopy(model)
    qtorch.quantize_(model, {"embed": INT8, ".*": INT8})
    quantized = copy.deepcopy(model)
    assert qtorch.dequantize_(model) is model
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert parameter.shape == original.get_parameter(name).shape
    assert 35 < qtorch.compute_error(original.up.weight, model.up.weight) < 50
    assert qtorch.compute_error(output(quantized, ids)[0], output(model, ids)[0]) > 100
    refuses("dequantize_: no weight of this Mlp is quantized", lambda: qtorch.dequantize_(model))
    # The second time loses nothing: codes of codes.
    qtorch.quantize_(model, INT8)
    assert torch.equal(model.up.weight.plain()[0], quantized.up.weight.plain()[0])
