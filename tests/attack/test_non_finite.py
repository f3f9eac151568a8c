"""NaN and infinities are neither lost nor spread: one in a row of the input reaches all of that row's outputs, and no
bit of another row's. Every recipe and every kernel that is registered, and every way of the compiled ones."""

import copy
import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PerGroup, PerTensor, PerToken, QuantSpec, quantize_
from qtorch.kernels.registry import Kernel, Problem, kernels
from qtorch.primitives import FixedRangeRule, PercentileRule, prune_2_4
from qtorch.recipes.base import RECIPES
from qtorch.training import calibrate, convert, fully_quantized, lsq, qat, scheduled_qat
from tests.attack import training_recipes as of_training
from tests.every_recipe import NAMES, OF_QAT, make
from tests.kernels.cpu.builds import BUILDS
from tests.kernels.every_scheme import in_every_layout, weights_of_every_scheme

VALUES = [math.nan, math.inf, -math.inf]
K, N = 256, 64

every_recipe = pytest.mark.parametrize("name", NAMES)


pytestmark = pytest.mark.filterwarnings("ignore")


def damaged(x: Tensor, row: int, column: int, value: float) -> tuple[Tensor, Tensor]:
    """`x` with `value` in one place, and `x` with zeros for that row."""
    bad, without = x.clone(), x.clone()
    bad[row, column] = value
    without[row] = 0
    return bad, without


def places(rows: int, columns: int) -> list[tuple[int, int, float]]:
    """Rows, columns and values to damage: the first and the last of each, and some between."""
    return [(0, columns - 1, math.nan), (rows - 1, 0, math.inf), (rows // 2, columns // 3, -math.inf)]


def check_rows(f: Callable[[Tensor], Tensor], x: Tensor, what: object = "") -> None:
    """Neither lost nor spread by `f`, a function of rows, wherever it is in `x` (M, K)."""
    for row, column, value in places(*x.shape):
        bad, without = damaged(x, row, column, value)
        y, expected = f(bad), f(without)
        others = [i for i in range(len(x)) if i != row]
        assert not y[row].isfinite().any(), (what, "lost", row, column, value)
        assert expected[others].isfinite().all(), (what, "was not finite before")
        assert torch.equal(y[others], expected[others]), (what, "spread", row, column, value)


def linear(name: str, dtype: torch.dtype = torch.float32, **options: bool) -> nn.Linear:
    layer = nn.Linear(K, N, dtype=dtype, **options)
    quantize_(layer, make(name))
    return layer


# --- inference: recipes ---
@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("each_library")
def test_every_recipe(name: str, dtype: torch.dtype) -> None:
    layer = linear(name, dtype)
    for rows in (1, 40):
        x = torch.randn(rows, K).to(dtype)
        x[0] *= 30
        check_rows(layer, x, (name, rows))


@every_recipe
@pytest.mark.usefixtures("each_library")
def test_every_recipe_whose_input_is_nothing_else(name: str) -> None:
    """Not even then is a scale chosen from what is no number."""
    layer = linear(name)
    for value in VALUES:
        assert not layer(torch.full((5, K), value)).isfinite().any()


@every_recipe
@pytest.mark.usefixtures("each_library")
def test_every_recipe_as_a_convolution(name: str) -> None:
    """What windows cover the damaged pixel, in all channels, and nothing else; of weight-only recipes as of floats."""
    layer = nn.Sequential(nn.Conv2d(32, 16, 2, padding=1))
    quantize_(layer, {"0": make(name, 32)})
    for value in VALUES:
        x = torch.randn(3, 32, 6, 5)
        x[1] *= 0.1  # its other windows count, and are not to decide a scale that all share
        without = x.clone()
        without[1] = 0
        x[1, 7, 2, 3] = value
        y, expected = layer(x), layer(without)
        assert torch.equal(y[[0, 2]], expected[[0, 2]])
        covered = torch.zeros(7, 6, dtype=torch.bool)
        covered[2:4, 3:5] = True
        assert not y[1][:, covered].isfinite().any()
        assert y[1][:, ~covered].isfinite().all()


@every_recipe
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.usefixtures("each_library")
def test_every_recipe_compiled(name: str, rows: int) -> None:
    layer = linear(name)
    check_rows(torch.compile(layer, fullgraph=True), torch.randn(rows, K), name)


# --- inference: kernels ---
INT8, FLOAT8 = QuantSpec("int8", quant_min=-127), QuantSpec("float8_e4m3fn")
EXTRA_SCHEMES = {
    "int8, percentile": LinearSpec(INT8, QuantSpec("int8", PerToken(), scale_rule=PercentileRule(90.0))),
    "int8, fixed range": LinearSpec(INT8, QuantSpec("int8", PerToken(), scale_rule=FixedRangeRule(-4.0, 4.0))),
    "float8, tensor": LinearSpec(FLOAT8, QuantSpec("float8_e4m3fn", PerTensor()), layout=qtorch.PlainLayout()),
    "int8, asymmetric tensor": LinearSpec(INT8, QuantSpec("int8", PerTensor(), MappingType.ASYMMETRIC)),
}


def weights(dtype: torch.dtype) -> list[tuple[str, AffineQuantizedTensor]]:
    """A weight of every scheme in every layout that takes it."""
    extra = [named for name, spec in EXTRA_SCHEMES.items() for named in in_every_layout(name, spec, dtype)]
    return weights_of_every_scheme(dtype) + extra


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [k for k in kernels("linear") if k.device in (None, "cpu")], ids=lambda k: k.name)
def test_every_kernel(kernel: Kernel, dtype: torch.dtype) -> None:
    for name, weight in weights(dtype):
        if kernel.rejects(Problem("linear", weight.scheme, dtype, "cpu")) is None:
            check_rows(lambda x: kernel(x, weight, None), torch.randn(21, 192).to(dtype), name)  # noqa: B023


WEIGHTS = {
    "int8 row": INT8,
    "int8 asymmetric row": QuantSpec("int8", qtorch.PerRow(), MappingType.ASYMMETRIC),
    "int4 group": QuantSpec("int4", PerGroup(32)),
    "uint4 group": QuantSpec("uint4", PerGroup(64), MappingType.ASYMMETRIC),
}
ACTIVATIONS = {
    "none": None, "symmetric": QuantSpec("int8", PerToken(), quant_min=-127),
    "asymmetric": QuantSpec("int8", PerToken(), MappingType.ASYMMETRIC), "tensor": QuantSpec("int8", PerTensor()),
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("build", BUILDS)
def test_every_way(build: str, name: str, activation: str) -> None:
    spec = WEIGHTS[name]
    both = LinearSpec(spec, ACTIVATIONS[activation], layout=qtorch.PackedLayout() if spec.dtype.bits == 4 else None)
    weight = AffineQuantizedTensor.from_float(torch.randn(37, 1024), both)
    for way in ("dot", "tile", "torch", *(("channels",) if ACTIVATIONS[activation] else ("amx", "fixed", "float"))):
        for rows, dtype in ((2, torch.float32), (19, torch.bfloat16)):
            x = (torch.randn(rows, 1024) + 0.3).to(dtype)
            with qtorch.kernels.cpu.compiled_library.use(build), qtorch.kernels.cpu.variants.force(way):
                check_rows(functools.partial(nn.functional.linear, weight=weight.to(dtype)), x, (way, rows, dtype))


@pytest.mark.parametrize("zero_point", [None, 9])
@pytest.mark.parametrize("build", [None, *BUILDS])
def test_a_static_scale(build: str | None, zero_point: int | None) -> None:
    mapping = MappingType.SYMMETRIC if zero_point is None else MappingType.ASYMMETRIC
    activation = QuantSpec("int8", PerTensor(), mapping)
    given = torch.tensor([[0.02]]), None if zero_point is None else torch.tensor([[zero_point]], dtype=torch.int8)
    weight = AffineQuantizedTensor.from_float(
        torch.randn(37, 192), LinearSpec(WEIGHTS["int8 row"], activation, static=True), *given
    )
    with qtorch.kernels.cpu.compiled_library.use(build):
        for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (21, torch.float16)):
            x, typed = (3 * torch.randn(rows, 192)).to(dtype), weight.to(dtype)
            assert torch.equal(nn.functional.linear(x, typed), qtorch.kernels.linear.reference.linear(x, typed, None))
            check_rows(functools.partial(nn.functional.linear, weight=typed), x)
    assert torch.equal(weight.act_scale, torch.tensor([[0.02]]))


# --- training ---
TOKENS, FEATURES, OUTPUTS = 40, 64, 96

Layer = Callable[[], nn.Sequential]


def prepared(recipe: object, data: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, OUTPUTS, bias=False))
    quantize_(model, recipe)
    if data:
        calibrate(model, [torch.randn(TOKENS, FEATURES)])
    return model


def training_recipes() -> Iterator[tuple[str, object, bool]]:
    """Name, recipe, and whether its scales start from data."""
    for name in [*of_training.NAMES, "float8_training by blocks"]:
        yield name, of_training.make(name), name == "lsq"
    yield "float8_training, tensorwise", RECIPES["float8_training"]("tensorwise"), False
    yield "int8 tensors", RECIPES["mixed_precision_training"](fully_quantized(granularity=PerTensor())), False
    yield (
        "int8 blocks",
        RECIPES["mixed_precision_training"](fully_quantized(granularity=qtorch.PerBlock((4, 16)))),
        False,
    )
    for name in OF_QAT:
        yield f"qat {name}", qat(make(name, 32)), False
    yield "qat nvfp4 in fp32", qat(make("nvfp4_dynamic_activation_nvfp4_weight"), compute_dtype=torch.float32), False
    yield "qat int8 static in fp32", qat(make("int8_static_activation_int8_weight"), compute_dtype=torch.float32), False
    yield "lsq, weights and activations clipped", lsq(weights="clip", activations="clip"), True
    yield "lsq, groups", lsq(weight_bits=8, activation_bits=None, granularity=PerGroup(32)), False
    yield "lsq, offset", lsq(activation_offset=True, granularity=PerTensor()), True
    yield "scheduled_qat, static", scheduled_qat(make("int8_static_activation_int8_weight"), observer="min_max"), True


CASES = list(training_recipes())
every_case = pytest.mark.parametrize(("recipe", "data"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])


def run(model: nn.Sequential, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a copy of `model`."""
    torch.manual_seed(5)  # of stochastic rounding
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    y = model(x)
    y.backward(g)
    made = {"y": y.detach(), "dx": x.grad}
    return made | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def shows(grad: Tensor) -> bool:
    """Whether a gradient is nowhere a finite number; of weights that are pruned it is zero."""
    return not grad.isfinite().all() and not grad[grad.isfinite()].any()


@every_case
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.usefixtures("each_library")
def test_an_input_or_gradient_in_training(where: str, recipe: object, data: bool) -> None:
    model = prepared(recipe, data)
    x, g = torch.randn(TOKENS, FEATURES), torch.randn(TOKENS, OUTPUTS)
    for row, column, value in places(TOKENS, FEATURES if where == "input" else OUTPUTS):
        others = [i for i in range(TOKENS) if i != row]
        if where == "input":
            got, expected = (run(model, damaged_x, g) for damaged_x in damaged(x, row, column, value))
            assert not got["y"][row].isfinite().any()
            assert expected["y"].isfinite().all()
            assert torch.equal(got["y"][others], expected["y"][others])
        else:
            got, expected = (run(model, x, damaged_g) for damaged_g in damaged(g, row, column, value))
            assert torch.equal(got["y"], expected["y"])
            assert not got["dx"][row].isfinite().any()
        assert expected["dx"].isfinite().all()
        assert torch.equal(got["dx"][others], expected["dx"][others])
        if (dw := got.get("0.weight")) is not None:
            assert shows(dw[:, column] if where == "input" else dw[column])


@every_case
@pytest.mark.usefixtures("each_library")
def test_a_weight_in_training(recipe: object, data: bool) -> None:
    """What an optimizer makes of a gradient that is NaN shows in that row of the weight, and in what it gives."""
    model = prepared(recipe, data)
    weight = next(p for name, p in model.named_parameters() if name.endswith("weight"))
    if not weight.requires_grad:
        pytest.skip("the base is frozen")
    for value in VALUES:
        changed = copy.deepcopy(model)
        weight = changed[0].weight
        before = weight.detach().dequantize() if hasattr(weight, "scheme") else weight.detach().clone()
        grad = torch.zeros_like(before)
        grad[5, 9] = value
        weight.grad = grad
        torch.optim.SGD(changed.parameters(), lr=0.1).step()
        y = changed(torch.randn(TOKENS, FEATURES))
        assert not y[:, 5].isfinite().any()
        assert not changed[0].weight.detach().dequantize()[5].isfinite().all()


@pytest.mark.parametrize("recipe", [
    lsq(),
    lsq(activations="clip"),
    scheduled_qat(make("int8_static_activation_int8_weight"), observer="moving_average"),
], ids=["step", "clip", "observer"])  # fmt: skip
def test_observed_ranges_are_those_of_finite_rows(recipe: object) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, OUTPUTS))
    quantize_(model, recipe)
    x = torch.randn(TOKENS, FEATURES)
    for row, column, value in places(TOKENS, FEATURES):
        bad, without = damaged(x, row, column, value)
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        one(bad)
        other(without)
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers()))
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        calibrate(one, [bad])
        calibrate(other, [without])
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers()))


@pytest.mark.parametrize("recipe", [lsq(), lsq(weight_bits=8, activation_bits=8, activation_offset=True)])
@pytest.mark.usefixtures("each_library")
def test_a_convolution_that_learns_its_steps(recipe: object) -> None:
    """An image shares one scale with the others."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1))
    quantize_(model, {"0": recipe})
    calibrate(model, [torch.randn(3, 8, 6, 6)])
    for served in (False, True):
        if served:
            quantize_(model.eval(), convert())
        for value in VALUES:
            x = torch.randn(3, 8, 6, 6)
            without = x.clone()
            without[1] = 0
            x[1, 5, 2, 2] = value
            y, expected = model(x), model(without)
            assert torch.equal(y[[0, 2]], expected[[0, 2]])
            assert not y[1, :, 1:4, 1:4].isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [
    RECIPES["int8_tilewise_training"](),
    RECIPES["float8_training"]("tensorwise"),
    qat(make("int8_static_activation_int8_weight")),
    qat(make("nvfp4_dynamic_activation_nvfp4_weight")),
    scheduled_qat(make("int8_static_activation_int8_weight")),
], ids=lambda recipe: recipe.name)  # fmt: skip
def test_training_compiled(recipe: object) -> None:
    model = prepared(recipe)
    compiled, g = torch.compile(model, fullgraph=True), torch.randn(TOKENS, OUTPUTS)

    def made(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = compiled(x)
        y.backward(g)
        return y.detach(), x.grad

    x = torch.randn(TOKENS, FEATURES)
    for row, column, value in places(TOKENS, FEATURES):
        bad, without = damaged(x, row, column, value)
        (y, dx), (expected, dx_expected) = made(bad), made(without)
        others = [i for i in range(TOKENS) if i != row]
        assert not y[row].isfinite().any()
        assert torch.equal(y[others], expected[others])
        assert torch.equal(dx[others], dx_expected[others])
        (dw,) = (p.grad for p in model.parameters())
        assert shows(dw[:, column])
        model.zero_grad()


# --- weights ---
@every_recipe
@pytest.mark.parametrize("value", VALUES)
def test_copy_into_a_frozen_weight(name: str, value: float) -> None:
    weight = linear(name).weight
    before = weight.dequantize()
    source = torch.randn(N, K)
    source[3, 4] = value
    for write in (weight.copy_, weight.data.copy_):
        with torch.no_grad(), pytest.raises(ValueError, match=r"^copy_: .* NaN or infinite, .* is unchanged$"):
            write(source)
    layer = nn.Linear(K, N)
    quantize_(layer, make(name))
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        layer.load_state_dict({"weight": source, "bias": torch.zeros(N)})
    assert torch.equal(weight.dequantize(), before)
    source[3, 4] = 0
    with torch.no_grad():
        weight.copy_(prune_2_4(source) if make(name).prunes else source)
    assert not torch.equal(weight.dequantize(), before)
