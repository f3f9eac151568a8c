"""The training recipes: as values, which kernels they run, optimizers, checkpoints, and a model that learns."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

import qtorch
from qtorch import PerBlock, PerGroup, PerTensor, compute_error, int4_weight_only, quantize_, training
from qtorch.calibration import min_max
from qtorch.recipes.base import RECIPES as REGISTERED
from qtorch.recipes.base import Recipe
from qtorch.training import Int8MixedPrecisionTrainingConfig, float8_training, int8_mixed_precision_training
from qtorch.training.engine import contraction
from qtorch.training.recipes.base import TrainingRecipe
from tests.attack import training_recipes
from tests.every_recipe import is_of_users
from tests.refusals import refuses

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

ALL = [
    int8_mixed_precision_training(),
    int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(grad_weight=False)),
    int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(stochastic_rounding=True)),
    training.switchback_training(),
    training.int8_tilewise_training(),
    float8_training("rowwise"),
    float8_training("tensorwise"),
    training.mxfp8_training(),
    training.bitnet_training(),
    training.mixed_precision_training(training.fully_quantized(4, 8)),
    training.int8_weight_only_quantized_training(),
    training.int4_weight_only_quantized_training(),
    training.nvfp4_training(),
    training.mxfp4_training(),
    float8_training(PerBlock((32, 32))),
]
KNOWN = {recipe.name for recipe in ALL}
ALL += [cls() for cls in REGISTERED.values() if issubclass(cls, TrainingRecipe) and is_of_users(cls)]
every_recipe = pytest.mark.parametrize("recipe", ALL, ids=[f"{i} {recipe.name}" for i, recipe in enumerate(ALL)])


@pytest.fixture(autouse=True)
def quiet() -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="qtorch: .* gradients of weights from")
        yield


def model(recipe: Recipe | None) -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False))
    if recipe is not None:
        quantize_(made, recipe)
    return made


def test_every_recipe_is_tested() -> None:
    mine = {name for name, cls in REGISTERED.items() if cls.__module__.startswith("qtorch.training")}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in mine if f"{name}(" not in tests] == []
    assert mine <= set(qtorch.training.__all__)


STATIC = qtorch.int8_static_activation_int8_weight(0.03)
VALUES = [
    *ALL,
    *(training_recipes.make(name) for name in training_recipes.NAMES),
    training.lsq(2, None, PerGroup(32), edge_bits=8),
    training.lsq(recipe=int4_weight_only()),
    training.pact(),
    training.qat(int4_weight_only(group_size=32), compute_dtype=torch.bfloat16),
    training.scheduled_qat(STATIC, 2, 5, "min_max"),
    training.scheduled_training(
        training.fully_quantized(8, 8, PerTensor()), training.QuantizationSchedule(1, 9, ("output.lhs",), min_max())
    ),
]


@pytest.mark.parametrize("recipe", VALUES, ids=[f"{i} {recipe.name}" for i, recipe in enumerate(VALUES)])
def test_is_a_value(recipe: Recipe) -> None:
    assert qtorch.primitives.from_json(json.loads(json.dumps(qtorch.primitives.to_json(recipe)))) == recipe
    assert dataclasses.replace(recipe) == recipe
    assert hash(dataclasses.replace(recipe)) == hash(recipe)
    assert str(recipe).startswith(f"{recipe.name}(")


@every_recipe
def test_weights_train_and_a_model_learns(recipe: Recipe) -> None:
    made = model(None)
    bias = made[0].bias
    report = quantize_(made, recipe)
    assert len(report.quantized) == 2
    assert all(
        isinstance(made[i].weight, training.TrainingWeight | nn.Parameter) and made[i].weight.requires_grad
        for i in (0, 2)
    )
    assert made[0].bias is bias
    frozen = model(None).requires_grad_(False)
    quantize_(frozen, recipe)
    assert not frozen[0].weight.requires_grad
    loss = {}
    for name, made in (("float", model(None)), ("quantized", model(recipe))):
        loss[name] = train(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
        start = train(made, torch.optim.SGD(made.parameters(), lr=0), 1)
        assert start < 0.3
    limit = {"bitnet_training": 6, "int4_weight_only_quantized_training": 4, "mixed_precision_training": 2}
    assert loss["quantized"] < limit.get(recipe.name, 1.5) * loss["float"] + 0.002


def test_the_report_names_the_kernel_that_will_serve() -> None:
    kernels = {r.name: quantize_(model(None), r).quantized[0].kernel for r in ALL if r.name in KNOWN}
    assert_expected_inline(
        "\n".join(f"{name}: {kernel}" for name, kernel in kernels.items()),
        """\
int8_mixed_precision_training: int8_scaled_mm
switchback_training: int8_scaled_mm
int8_tilewise_training: int8_block_mm
float8_training: emulated_scaled_mm
mxfp8_training: emulated_scaled_mm
bitnet_training: packed_int8_scaled_mm
mixed_precision_training: reference
int8_weight_only_quantized_training: weight_only_mm
int4_weight_only_quantized_training: packed_weight_mm
nvfp4_training: emulated_scaled_mm
mxfp4_training: emulated_scaled_mm""",
    )


@pytest.mark.parametrize(("config", "forward", "backward"), [
    (Int8MixedPrecisionTrainingConfig(), 1, 2),
    (Int8MixedPrecisionTrainingConfig(grad_weight=False), 1, 1),
    (Int8MixedPrecisionTrainingConfig(grad_input=False, grad_weight=False), 1, 0),
    (Int8MixedPrecisionTrainingConfig(output=False), 0, 2),
    (Int8MixedPrecisionTrainingConfig(output=False, grad_input=False), 0, 1),
])  # fmt: skip
def test_count_of_int8_matmuls(config: Int8MixedPrecisionTrainingConfig, forward: int, backward: int) -> None:
    made, x = model(int8_mixed_precision_training(config)), torch.randn(300, 64, requires_grad=True)
    with qtorch.kernels.record_kernels() as in_forward:
        y = made(x)
    with qtorch.kernels.record_kernels() as in_backward:
        y.sum().backward()
    assert (in_forward.count("int_matmul"), in_backward.count("int_matmul")) == (2 * forward, 2 * backward)


@pytest.mark.parametrize(("recipe", "forward", "backward"), [
    (training.switchback_training(), {"int_matmul": 1}, {"int_matmul": 1}),
    (training.int8_tilewise_training(), {"int8_block_mm": 1}, {"int8_block_mm": 2}),
    (float8_training(), {"weight_only_mm": 1}, {"weight_only_mm": 2}),
    (float8_training(PerBlock((32, 32))), {"tile_scaled_mm": 1}, {"tile_scaled_mm": 2}),
    (training.mxfp8_training(), {"weight_only_mm": 1}, {"weight_only_mm": 2}),
    (training.nvfp4_training(), {"weight_only_mm": 1}, {"weight_only_mm": 2}),
    (training.mxfp4_training(), {"weight_only_mm": 1}, {"weight_only_mm": 2}),
    (training.bitnet_training(), {"int_matmul": 1}, {"weight_only_mm": 2}),
    (training.mixed_precision_training(training.fully_quantized(4, 8)), {"int_matmul": 1}, {"int_matmul": 2}),
    (training.int8_weight_only_quantized_training(), {"linear:weight_only_mm": 1}, {"linear:weight_only_mm": 1}),
    (training.int4_weight_only_quantized_training(), {"linear:packed_weight_mm": 1}, {"linear:packed_weight_mm": 1}),
], ids=lambda value: value.name if isinstance(value, Recipe) else "")  # fmt: skip
def test_which_kernels_run(recipe: Recipe, forward: dict[str, int], backward: dict[str, int]) -> None:
    layer, x = model(recipe)[:1], torch.randn(300, 64, requires_grad=True)
    with qtorch.kernels.record_kernels() as in_forward:
        y = layer(x)
    with qtorch.kernels.record_kernels() as in_backward:
        y.sum().backward()
    for ran, wanted in ((in_forward, forward), (in_backward, backward)):
        if recipe.name == "int8_tilewise_training":
            ran = [name for name in ran if not name.startswith("int_matmul")]
        assert {name: ran.count(name) for name in wanted} == wanted
        counted = {*wanted, "int_matmul.vnni", "int_matmul.sliced", "weight_only_mm", "packed_weight_mm"}
        counted.add("int8_block_mm.torch")
        assert set(ran) <= counted


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 40) -> float:
    """Fit a fixed function; the last loss."""
    generator = torch.Generator().manual_seed(2)
    target = nn.Linear(64, 32, bias=False)
    torch.nn.init.normal_(target.weight, std=0.125, generator=generator)
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator)
        loss = nn.functional.mse_loss(made(x), target(x).detach().tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("recipe", [ALL[0], training.bitnet_training(), ALL[10], ALL[11]], ids=lambda r: r.name)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers(recipe: Recipe, kind: type, how: dict[str, bool]) -> None:
    """A step moves each weight as it moves a float weight of the same value and gradient."""
    made = model(recipe)
    twins = [
        nn.Parameter(p.detach().dequantize() if isinstance(p, training.TrainingWeight) else p.detach().clone())
        for p in made.parameters()
    ]
    made(torch.randn(40, 64)).square().sum().backward()
    for twin, p in zip(twins, made.parameters()):
        twin.grad = p.grad.clone()
    options = {"lr": 0.01, "weight_decay": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    for parameters in (list(made.parameters()), twins):
        kind(parameters, **options, **how).step()
    for twin, p in zip(twins, made.parameters()):
        if isinstance(p, training.CodesWeight):
            step = p.scales()[0].max()
            assert (p.dequantize() - twin).abs().max() < 1.01 * step * (2 if kind is torch.optim.AdamW else 1)
        else:
            torch.testing.assert_close(
                p.floats() if isinstance(p, training.TrainingWeight) else p, twin, rtol=1e-6, atol=1e-7
            )


@every_recipe
def test_a_float_checkpoint_loads_and_dequantize_goes_back(recipe: Recipe) -> None:
    made = model(recipe)
    values = made[0].weight.dequantize()
    qtorch.dequantize_(made)
    assert type(made[0].weight) is nn.Parameter
    assert torch.equal(made[0].weight, values)
    made, source = model(recipe), model(None)
    with torch.no_grad():
        source[0].weight.normal_()
    made.load_state_dict(source.state_dict())
    assert compute_error(source[0].weight, made[0].weight.dequantize()) > 15
    back = model(None)
    if isinstance(made[0].weight, qtorch.AffineQuantizedTensor):  # held as codes, which a float model would lose
        refuses(r'"0\.weight".*assign=True', lambda: back.load_state_dict(made.state_dict()), RuntimeError)
        return
    back.load_state_dict(made.state_dict())
    assert torch.equal(back[0].weight, made[0].weight.dequantize())


def test_errors_leave_the_model_as_it_was() -> None:
    made = nn.Sequential(nn.Linear(40, 33))
    before = made[0].weight
    with pytest.raises(ValueError, match=r"0: block_size \(32, 32\) does not divide shape \(33, 40\)"):
        quantize_(made, training.int8_tilewise_training())
    refuses("0: block_size", lambda: quantize_(made, training.mxfp8_training()))
    with pytest.raises(ValueError, match=r"0: takes float32, .* weights, this one is torch\.float64"):
        quantize_(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)), training.bitnet_training())
    refuses("granularity is 'rowwise', .* or PerBlock of a square, got 'by block'", lambda: float8_training("by block"))
    refuses(r"PerBlock of a square, got PerBlock\(sizes=\(1, 128\)\)", lambda: float8_training(PerBlock((1, 128))))
    assert made[0].weight is before
    trained = model(int8_mixed_precision_training())
    refuses("0: is already quantized: MasterWeight", lambda: quantize_(trained, float8_training()))


def test_an_optimizer_made_before() -> None:
    made = model(None)
    optimizers = [kind(made.parameters()) for kind in (torch.optim.SGD, torch.optim.AdamW)]
    with pytest.warns(UserWarning, match="the SGD made before quantize_ does not train") as told:
        quantize_(made, int8_mixed_precision_training())
    assert len(told) == len(optimizers)
    assert told[0].filename == __file__


def test_products_and_what_convert_takes() -> None:
    whole = model(int8_mixed_precision_training())
    stacked = lambda: torch.func.stack_module_state([whole, whole])  # noqa: E731
    refuses(r"^aten\.stack\.default of weights", stacked, NotImplementedError)
    with torch.no_grad():
        refuses(r"^aten\.stack\.default of weights", stacked, NotImplementedError)
    weight = whole[0].weight
    with pytest.raises(NotImplementedError, match="in training would run in full precision"):
        torch.tensordot(torch.randn(3, 64), weight, dims=([1], [1]))
    made, x = model(int8_mixed_precision_training()), torch.randn(5, 96)
    weight, wanted = made[2].weight, made[2](x)
    assert torch.equal(torch.einsum("bk,nk->bn", x, weight), wanted)
    assert torch.equal(torch.einsum("nk,bk->bn", weight, x), wanted)
    assert torch.equal(x @ weight.t(), wanted)
    assert torch.equal(torch.addmm(torch.zeros(32), x, weight.t()), wanted)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(made, {"0": int8_mixed_precision_training()})
    other = made[1].weight
    report = quantize_(made, training.convert())
    assert [layer.name for layer in report.quantized] == ["0.weight"]
    assert report.skipped[0].detail == "no TrainingWeight or PreparedModule"
    assert made[1].weight is other
    assert not isinstance(made[0].weight, training.MasterWeight)
    refuses("nothing to quantize", lambda: quantize_(made, training.convert()))


ARRANGED = {
    "stack": lambda w: torch.stack([w, w]), "cat": lambda w: torch.cat([w[:2], w]),
    "pad": lambda w: F.pad(w, (0, 0, 0, 3)), "index": lambda w: w[torch.arange(3)], "flip": lambda w: w.flip(0),
    "index_select": lambda w: w.index_select(0, torch.arange(3)), "roll": lambda w: w.roll(1, 0), "tril": torch.tril,
    "repeat": lambda w: w.repeat(2, 1),
}  # fmt: skip
ELEMENTWISE = (lambda w: w * 0.5, F.normalize, lambda w: w - w.mean(), lambda w: torch.where(w > 0, w, w), torch.tanh)
OF_LOSSES = (lambda w: w**2, torch.abs, lambda w: w - torch.ones(32, 96), torch.zeros_like, lambda w: w.sum(0))
OF_FLOATS = [int8_mixed_precision_training(), training.qat(int4_weight_only(group_size=32)), training.bitnet_training()]


@pytest.mark.parametrize("recipe", OF_FLOATS, ids=str)
def test_functions_of_weights_say_that_products_with_them_are_float(recipe: Recipe) -> None:
    weight = model(recipe)[2].weight
    assert torch.equal(F.linear(torch.eye(96), weight.expand(32, 96).view(-1, 96)), F.linear(torch.eye(96), weight))
    for name, function in ARRANGED.items():
        refuses(
            f"aten.*{name}.* of weights in training", lambda function=function: function(weight), NotImplementedError
        )
        if name != "stack":
            with torch.no_grad():
                function(weight)
    for function in ELEMENTWISE:
        contraction._given.clear()
        with pytest.warns(UserWarning, match="of a weight in training is a plain tensor"):
            function(weight)
    contraction._given.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(function(weight).sum() for function in OF_LOSSES).backward()
        torch.optim.AdamW([weight]).step()
