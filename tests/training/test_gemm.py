"""The three products of a layer, and the specs that say how each is quantized."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, compute_error
from qtorch.primitives import AbsMeanRule, Granularity, Rounding, from_json, to_json
from qtorch.training import GemmSpec, MasterWeight, TrainingSpec, fully_quantized, fully_quantized_float8
from qtorch.training.engine.contraction import contraction
from qtorch.training.engine.numerics import float8, int8, integer
from tests.refusals import refuses
from tests.training.reference import RECIPES, three_matmuls

every_recipe = pytest.mark.parametrize("name", RECIPES)

SHAPES = [(37, 64, 96), (1, 32, 32), (70, 96, 32)]
"""Tokens, input features, output features; the features fit tiles of 32, the tokens do not."""

SPECS = {
    "reuse, scales folded": TrainingSpec(
        GemmSpec(int8(), int8()), GemmSpec(int8(), reuse_forward=True), GemmSpec(int8(), reuse_forward=True)
    ),
    "tensorwise": fully_quantized(granularity=PerTensor()),
    "groups": fully_quantized(granularity=PerGroup(8)),
    "blocks": fully_quantized(granularity=PerBlock((4, 16))),
    "groups of weights only": TrainingSpec(GemmSpec(int8(), int8(PerGroup(16)))),
    "weight only": TrainingSpec(GemmSpec(None, int8()), GemmSpec(None, int8()), GemmSpec(None, int8())),
    "activation only": TrainingSpec(GemmSpec(int8(), None), GemmSpec(int8(), None), GemmSpec(int8(), None)),
    "int8, float8": TrainingSpec(GemmSpec(int8(), float8()), GemmSpec(float8(), int8())),
    "asymmetric": TrainingSpec(
        GemmSpec(
            QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC), QuantSpec("uint4", PerRow(), MappingType.ASYMMETRIC)
        )
    ),
    "asymmetric, blocks of rows": TrainingSpec(
        GemmSpec(int8(), QuantSpec("uint8", PerBlock((8, 16)), MappingType.ASYMMETRIC))
    ),
    "fp64 sums": TrainingSpec(
        GemmSpec(int8(), int8(), accumulator_dtype=torch.float64),
        GemmSpec(int8(), int8(), accumulator_dtype=torch.float64),
    ),
}


def run(x: Tensor, w: Tensor, g: Tensor, spec: TrainingSpec) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = contraction(x, w, spec)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def assert_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], least: float = 115) -> None:
    for a, b in zip(got, wanted):
        assert a.shape == b.shape
        assert compute_error(b, a.double()) > least


POWER_OF_TWO = QuantSpec("int8", PerRow(), scale_dtype=torch.float8_e8m0fnu, quant_min=-127)
SPECS["power-of-two scales"] = TrainingSpec(*[GemmSpec(POWER_OF_TWO, POWER_OF_TWO)] * 3)
OF_RECIPES = {name: recipe.training_spec() for name, recipe in RECIPES.items()}
ODD = ["int8", "switchback", "float8 rowwise", "mxfp8", "tilewise", "bitnet"]
"""Blocks that do not divide a shape are completed with zeros."""
CASES = [(name, shape, torch.float32) for name in OF_RECIPES for shape in SHAPES]
CASES += [(name, shape, torch.float32) for name in SPECS for shape in [(37, 64, 96), (5, 48, 16)]]
CASES += [(name, shape, torch.float32) for name in ODD for shape in [(7, 33, 29), (1, 1, 1), (3, 1025, 2), (129, 5, 7)]]
CASES += [(name, (40, 64, 96), dtype) for name in OF_RECIPES for dtype in (torch.bfloat16, torch.float16)]
LEAST = {torch.float32: 115, torch.bfloat16: 40, torch.float16: 55}


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=str)
def test_three_matmuls(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    x, w, g = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype), torch.randn(m, n, dtype=dtype)
    spec = {**OF_RECIPES, **SPECS}[name]
    got = run(x, w, g, spec)
    assert {tensor.dtype for tensor in got} == {dtype}
    assert_close(got, three_matmuls(x, w, g, spec), LEAST[dtype])


@every_recipe
def test_the_error_is_bounded_and_autocast(name: str) -> None:
    x, w, g = torch.randn(256, 128), torch.randn(96, 128), torch.randn(256, 96)
    spec = RECIPES[name].training_spec()
    least = {"bitnet": 4, "int4, int8": 14, "nvfp4": 14, "mxfp4": 12}.get(name, 18)
    for gemm, got, wanted in zip(
        (spec.output, spec.grad_input, spec.grad_weight), run(x, w, g, spec), (x @ w.t(), g @ w, g.t() @ x)
    ):
        error = compute_error(wanted, got)
        if gemm.is_quantized:
            assert least < error < 50
        else:
            assert error > 110
    # Activations are in bf16; the weight is quantized from its own dtype, as the weight that serves is.
    linear, x = layer(name), torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert (x.grad.dtype, linear.weight.grad.dtype) == (torch.float32, torch.float32)
    g, spec = torch.ones(16, 96, dtype=torch.bfloat16), RECIPES[name].training_spec()
    wanted_y, dx, dw = three_matmuls(x.detach().bfloat16(), linear.weight.floats(), g, spec)
    wanted_y = wanted_y + linear.bias.detach().bfloat16()
    assert_close((y.detach(), x.grad, linear.weight.grad), (wanted_y, dx, dw), 38)


def test_empty_inputs_and_full_precision() -> None:
    y, dx, dw = run(torch.randn(0, 8), torch.randn(4, 8), torch.randn(0, 4), fully_quantized())
    assert (y.shape, dx.shape) == ((0, 4), (0, 8))
    assert torch.equal(dw, torch.zeros(4, 8))
    spec = TrainingSpec(GemmSpec(int8(), int8(), output_dtype=torch.float32))
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
    y = contraction(x, w, spec)
    assert y.dtype == torch.float32
    assert compute_error(three_matmuls(x, w, y.to(x.dtype), spec)[0], y.double()) > 110
    linear, x = layer("int8"), torch.randn(300, 64)
    with qtorch.kernels.record_kernels() as ran:
        linear(x).sum().backward()
    assert ran.count("int_matmul") == 2
    spec = TrainingSpec()
    assert not any(gemm.is_quantized for gemm in (spec.output, spec.grad_input, spec.grad_weight))
    assert spec.linear_spec is None
    assert str(spec) == "output full precision; grad_input full precision; grad_weight full precision"
    spec = fully_quantized(4, 8, grad_weight=False)
    assert (spec.output, spec.grad_input) == (GemmSpec(integer(4), integer(4)), GemmSpec(int8(), int8()))
    assert spec.grad_weight == GemmSpec()
    assert fully_quantized(None, 8).output == GemmSpec()
    refuses("1 to 22 bits, got 23", lambda: fully_quantized(23))
    gradient = fully_quantized_float8().grad_weight
    assert (gradient.lhs.dtype.name, gradient.rhs.dtype.name) == ("float8_e5m2", "float8_e4m3fn")
    assert fully_quantized().linear_spec.weight == int8()
    tensorwise = TrainingSpec(GemmSpec(int8(), int8(PerTensor()))).linear_spec
    assert tensorwise.weight.granularity == PerRow(), "integer kernels read a scale per row"
    assert fully_quantized_float8(PerTensor()).linear_spec.weight == float8(granularity=PerTensor())
    assert TrainingSpec(GemmSpec(ROWS, GROUPS), GemmSpec(reuse_forward=True)).grad_input.lhs is None


def layer(name: str, bias: bool = True, k: int = 64, n: int = 96) -> nn.Linear:
    linear = nn.Linear(k, n, bias)
    linear.weight = nn.Parameter(RECIPES[name].apply(linear.weight.detach()))
    return linear


@every_recipe
@pytest.mark.parametrize("bias", [True, False])
def test_layer_with_3d_input(name: str, bias: bool) -> None:
    linear, x, g = layer(name, bias), torch.randn(3, 7, 64, requires_grad=True), torch.randn(3, 7, 96)
    y = linear(x)
    y.backward(g)
    spec = RECIPES[name].training_spec()
    wanted_y, dx, dw = three_matmuls(x.detach().flatten(0, 1), linear.weight.floats(), g.flatten(0, 1), spec)
    offset = linear.bias.detach() if bias else 0
    assert_close(
        (y.detach(), x.grad, linear.weight.grad),
        ((wanted_y + offset).unflatten(0, (3, 7)), dx.unflatten(0, (3, 7)), dw),
    )
    if bias:
        torch.testing.assert_close(linear.bias.grad, g.sum((0, 1)))


@every_recipe
def test_frozen_weight_or_input(name: str) -> None:
    """Only what is asked for is computed, and only what it takes is kept."""
    x, g, spec = torch.randn(9, 64), torch.randn(9, 96), RECIPES[name].training_spec()
    linear = layer(name)
    _, dx, dw = three_matmuls(x, linear.weight.floats(), g, spec)
    linear(x).backward(g)
    assert_close((linear.weight.grad,), (dw,))
    frozen = layer(name).requires_grad_(False)
    frozen.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    frozen.bias = linear.bias
    x.requires_grad_()
    frozen(x).backward(g)
    assert_close((x.grad,), (dx,))
    assert frozen.weight.grad is None
    with torch.no_grad():
        assert torch.equal(frozen(x), linear(x))
    with torch.inference_mode():
        assert torch.equal(frozen(x), linear(x))


def test_stochastic_rounding() -> None:
    spec = fully_quantized(stochastic_rounding=True)
    assert spec.grad_weight.lhs.rounding is Rounding.STOCHASTIC
    assert spec.output.lhs.rounding is spec.grad_weight.rhs.rounding is Rounding.NEAREST_EVEN
    count = 100_000
    x, w, g = torch.randn(count, 8), torch.randn(4, 8), torch.randn(1, 4).expand(count, 4)
    wanted = three_matmuls(x[:1], w, g[:1], TrainingSpec(grad_input=GemmSpec(None, int8())))[1]
    samples = run(x, w, g, spec)[1].double()
    assert samples.std(0).min() > 0
    assert ((samples.mean(0) - wanted).abs() < 4 * samples.std(0) / count**0.5).all()
    spec, (x, w, g) = (
        fully_quantized(stochastic_rounding=True),
        (torch.randn(16, 8), torch.randn(4, 8), torch.randn(16, 4)),
    )
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(x, w, g, spec)[1])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_reused_codes_and_rows_that_fill_no_block() -> None:
    """grad_input multiplies by the very codes of the forward."""
    spec = TrainingSpec(GemmSpec(None, int8(rounding=Rounding.STOCHASTIC)), GemmSpec(reuse_forward=True))
    w = torch.randn(8, 8)
    for weight in (w.requires_grad_(), nn.Parameter(MasterWeight.of(w.detach(), spec))):
        x = torch.eye(8, requires_grad=True)
        y = contraction(x, weight, spec)
        y.backward(torch.eye(8))
        torch.testing.assert_close(y.detach(), x.grad.t())
    # Q(T(w)): what is quantized is what enters the product, and gradients reach w through T.
    x, w = torch.randn(20, 16), torch.randn(16, 8, requires_grad=True)
    twin = w.detach().clone().requires_grad_()
    qtorch.training.quantized_matmul(x, torch.tanh(w) * 2, fully_quantized()).square().sum().backward()
    (x @ (torch.tanh(twin) * 2)).square().sum().backward()
    assert 30 < compute_error(twin.grad, w.grad) < 60
    spec = int8(PerBlock((4, 8)))
    x, w, g = torch.randn(5, 16), torch.randn(8, 16), torch.randn(5, 8)
    got = operand_gradients(x, w, g, TrainingSpec(GemmSpec(spec, spec), scale_gradient=True))[0]
    completed = operand_gradients(
        torch.nn.functional.pad(x, (0, 0, 0, 3)), w, torch.nn.functional.pad(g, (0, 0, 0, 3)),
        TrainingSpec(GemmSpec(spec, spec), scale_gradient=True),
    )[0]  # fmt: skip
    torch.testing.assert_close(got, completed[:5])


def test_the_tiles_of_an_activation_are_kept_in_int8() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for name, dtypes in (("tilewise", {torch.int8, torch.float32}), ("int8", {torch.float32})):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            contraction(x, w, RECIPES[name].training_spec())
        of_x = [tensor for tensor in saved if tensor.data_ptr() != w.data_ptr()]
        assert {tensor.dtype for tensor in of_x} == dtypes
        size = sum(tensor.nbytes for tensor in of_x)
        assert size == (64 * 64 + 2 * 2 * 4 if name == "tilewise" else 64 * 64 * 4)


# --- the gradient of a dynamic scale ---
def fake_in_fp64(x: Tensor, spec: QuantSpec) -> Tensor:
    """s round(x / s), s = absmax / Q, rounding straight through, the scale differentiable."""
    view = qtorch.primitives.granularity.BlockView(x.shape, spec.block_size(x.shape))
    blocks = view.split(x)
    scale = blocks.abs().amax(view.dims, keepdim=True) / spec.code_range[1]
    ratio = blocks / scale
    return view.merge(scale * (ratio + (ratio.round() - ratio).detach()))


def operand_gradients(x: Tensor, w: Tensor, g: Tensor, spec: TrainingSpec, wrap: bool = False) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    weight = torch.nn.Parameter(MasterWeight.of(w.clone(), spec) if wrap else w.clone())
    contraction(x, weight, spec).backward(g)
    return x.grad, weight.grad


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor(), PerGroup(8), PerBlock((4, 8))], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_against_autograd(granularity: Granularity, wrapped: bool) -> None:
    gemm = GemmSpec(int8(granularity), integer(4, granularity))
    x, w, g = torch.randn(12, 16), torch.randn(8, 16), torch.randn(12, 8)
    x[0, :2] = 9  # the largest twice: each gets half
    got = operand_gradients(x, w, g, TrainingSpec(gemm, scale_gradient=True), wrapped)
    without = operand_gradients(x, w, g, TrainingSpec(gemm), wrapped)
    # The backward matmuls of this spec are in full precision: they multiply by values, not by codes.
    for mine, plain, operand, other, incoming, spec in (
        (got[0], without[0], x, w, g, gemm.lhs),
        (got[1], without[1], w, x, g.t(), gemm.rhs),
    ):
        exact = operand.double().requires_grad_()
        (fake_in_fp64(exact, spec) @ other.double().t()).backward(incoming.double())
        assert compute_error(exact.grad, mine.double()) > 100
        assert compute_error(exact.grad, plain.double()) < 70


@pytest.mark.parametrize("spec", [fully_quantized(), fully_quantized(4, None), fully_quantized_float8(PerTensor())])
def test_json_round_trip(spec: TrainingSpec) -> None:
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    assert hash(spec) == hash(from_json(to_json(spec)))


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_leave_out_the_lowest_code(bits: int) -> None:
    assert integer(bits).code_range == (-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("granularity", [PerAxis(1), PerBlock((8, 1)), PerBlock((1, 1)), PerGroup(1)], ids=str)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_a_scale_along_the_contracted_axis_is_an_error(granularity: object, side: str) -> None:
    specs = {"lhs": int8(), "rhs": int8(), side: int8(granularity)}
    refuses(f"{side} has a scale for each index of the contracted axis", lambda: GemmSpec(**specs))
    assert GemmSpec(**specs, accumulator_dtype=torch.float32).is_quantized, "dequantized first, it makes sense"


ROWS, TILES, GROUPS = int8(), int8(PerBlock((32, 32))), int8(PerGroup(16))
ASYMMETRIC, UNSIGNED = (QuantSpec(dtype, PerRow(), MappingType.ASYMMETRIC) for dtype in ("int8", "uint8"))
FULL, REUSE = GemmSpec(), GemmSpec(ROWS, reuse_forward=True)
BALANCED = GemmSpec(ROWS, ROWS, mid_alpha=(0.5, 0.5))
MEAN = replace(ROWS, scale_rule=AbsMeanRule())
REFUSED: dict[str, Callable[[], object]] = {
    "leave rhs out": lambda: GemmSpec(ROWS, ROWS, reuse_forward=True),
    "reuse_forward takes rhs as it is": lambda: GemmSpec(reuse_forward=True, mid_alpha=(0.5, 0.5)),
    "fold names an operand that is quantized": lambda: GemmSpec(ROWS, None, fold="rhs"),
    "fold takes a symmetric operand with a scale for each": lambda: GemmSpec(ROWS, ROWS, fold="rhs"),
    "sums products of integers of at most 8": lambda: GemmSpec(ROWS, integer(9), accumulator_dtype=torch.int16),
    r"a float dtype, int32, int16 or None, got torch\.int64": lambda: GemmSpec(ROWS, accumulator_dtype=torch.int64),
    "lhs of an integer product has signed codes, got uint8": lambda: GemmSpec(UNSIGNED, ROWS),
    "one divides the other, got 16 and 24": lambda: GemmSpec(GROUPS, int8(PerGroup(24))),
    "where lhs has blocks, both operands are": lambda: GemmSpec(GROUPS, replace(ASYMMETRIC, granularity=PerGroup(16))),
    "output is the forward itself": lambda: TrainingSpec(REUSE),
    "grad_input contracts n, the output features, along": lambda: TrainingSpec(GemmSpec(ROWS, GROUPS), REUSE),
    "grad_weight contracts m, the tokens": lambda: TrainingSpec(GemmSpec(GROUPS, ROWS), FULL, REUSE),
    "reuses an operand that the forward does not quantize": lambda: TrainingSpec(FULL, REUSE),
    "can reuse symmetric operands only": lambda: TrainingSpec(GemmSpec(ROWS, ASYMMETRIC), REUSE),
    "in blocks of 64 in lhs, which do not divide": lambda: TrainingSpec(
        GemmSpec(TILES, TILES), GemmSpec(int8(PerBlock((64, 64))), reuse_forward=True)
    ),
    "cannot reuse an operand that the forward has changed": lambda: TrainingSpec(BALANCED, REUSE),
    "need the operands as they come": lambda: TrainingSpec(BALANCED, clip_gradient=True),
    "symmetric specs whose scale is absmax": lambda: TrainingSpec(GemmSpec(None, MEAN), scale_gradient=True),
    "grad_weight has only codes of": lambda: TrainingSpec(GemmSpec(ROWS, ROWS), FULL, REUSE, scale_gradient=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    refuses(message, lambda: REFUSED[message]())
