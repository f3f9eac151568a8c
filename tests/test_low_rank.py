"""A branch of low rank beside the codes: its product, what it gains with and without data, files, and refusals.

tests/movement and tests/attack have it among all tensors: copies, moves, graphs, several processes.
"""

import copy
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import LinearSpec, PackedLayout, PerGroup, QuantSpec, explain, low_rank, quantize_
from qtorch.calibration import AutoRound, auto, calibrated, gptq, importance_weighted, smooth
from qtorch.checkpoint.formats.gguf import block_types
from qtorch.checkpoint.save_folder import SAVE_FORMATS
from qtorch.dtypes import LowRankWeight
from qtorch.dtypes.low_rank_weight import low_rank_factors
from qtorch.kernels.cpu import compiled_library, operators
from qtorch.kernels.cpu import low_rank as compiled
from qtorch.primitives import from_json, qdtype, to_json
from qtorch.training import qat
from tests import every_recipe, quantize_model, rounding
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY
from tests.refusals import refuses

N, K, RANK = 192, 256, 8


@qtorch.recipes.base.register_recipe("test_int4_int4")
@dataclass(frozen=True)
class Int4Int4(qtorch.recipes.base.WeightRecipe):
    """Integer W4A4, of a user."""

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(*[QuantSpec(qdtype("int4"), PerGroup(32))] * 2, layout=PackedLayout())


INT3 = qtorch.intx_weight_only("int3", group_size=32)
FOUR_BITS = [Int4Int4(), qtorch.nvfp4_dynamic_activation_nvfp4_weight(), INT3]
four_bits = pytest.mark.parametrize("recipe", FOUR_BITS, ids=lambda recipe: recipe.name)


def layer(recipe: Any = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """With outliers in four input channels, one in each of the first four groups, as `smooth` moves them there."""
    torch.manual_seed(0)
    made = nn.Linear(K, N).requires_grad_(False)
    made.weight.normal_(std=0.02)[:, 5:128:32] *= 25
    made.to(dtype)
    if recipe is not None:
        quantize_(made, recipe)
    return made


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", [name for name in every_recipe.NAMES if not every_recipe.make(name).prunes])
def test_the_product_is_that_of_the_codes_and_of_the_branch(name: str) -> None:
    recipe = low_rank(every_recipe.make(name, 32), RANK)
    for dtype in (torch.float32, torch.bfloat16):
        check_product(recipe, dtype)
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


def check_product(recipe: Any, dtype: torch.dtype) -> None:
    made, x = layer(recipe, dtype), torch.randn(3, 5, K, dtype=dtype)
    weight: Any = made.weight
    branch = weight.up.double() @ weight.down.double()
    with qtorch.kernels.record_kernels() as ran:
        y = made(x)
    assert ran[0] == f"linear:{explain(weight).kernel}"
    assert "beside a branch of rank 8" in explain(weight).note
    codes = nn.functional.linear(x, weight.matrix, made.bias)
    size = x.double().abs() @ (weight.matrix.dequantize().double().abs() + branch.abs()).t() + 1
    size += (x.double().abs() @ weight.down.double().abs().t()) @ weight.up.double().abs().t()
    bound = 2 * rounding.gamma(K + RANK + 8) * size if dtype == torch.float32 else 2**-6 * size
    assert bool(((y.double() - codes.double() - x.double() @ branch.t()).abs() <= bound).all())
    dequantized = weight.matrix.dequantize(torch.float32).double() + branch
    assert relative(weight.dequantize(torch.float32), dequantized) < 1e-6
    assert weight.nbytes == weight.matrix.nbytes + 2 * RANK * (N + K)


BRANCHES = [(1, 64, 64, 4), (3, 37, 51, 5), (9, 130, 1000, 128), (17, 200, 513, 1), (530, 70, 96, 65), (0, 8, 8, 2)]


@pytest.mark.parametrize("name", [*BUILDS, "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_branch(name: str, dtype: torch.dtype) -> None:
    """Rounded once; a row has the same bits alone, and in any order of memory."""
    for (m, n, k, rank), half in itertools.product(BRANCHES, sorted(compiled.HALVES, key=str)):
        y, x = torch.randn(m, n).to(dtype), torch.randn(m, k).to(dtype)
        down, up = (torch.randn(shape).to(half) for shape in ((rank, k), (n, rank)))
        with compiled_library.use(None if name == "torch" else name), qtorch.kernels.record_kernels() as ran:
            found = compiled.cpu_low_rank_mm(y, x, down, up)
            assert ran == ["cpu_low_rank_mm", f"cpu_low_rank_mm.{name}"]
            if name != "torch":
                strided = [each.t().contiguous().t() for each in (y, x, down, up)]
                assert torch.equal(found, compiled.cpu_low_rank_mm(*strided))
                for i in (0, m // 2, m - 1)[: 3 * (m > 0)]:
                    row = slice(i, i + 1)
                    assert torch.equal(found[row], compiled.cpu_low_rank_mm(y[row], x[row], down, up))
        a, b, c = x.double(), down.double().t(), up.double().t()
        exact, size = y.double() + a @ b @ c, y.double().abs() + a.abs() @ b.abs() @ c.abs()
        error, unit = (found.double() - exact).abs(), torch.finfo(dtype).eps / 2
        assert bool((error <= rounding.gamma(k + rank) * size + unit * exact.abs()).all())
        if m * n > 999:
            assert 0.2 * unit < relative(found, exact) < (9 * unit if dtype is torch.float32 else 0.8 * unit)


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_that_follow_and_gradients_and_graphs(dtype: torch.dtype) -> None:
    made, x = layer(low_rank(qtorch.int4_weight_only(group_size=32), RANK), dtype), torch.randn(3, K, dtype=dtype)
    weight: Any = made.weight
    y = made(x)
    assert weight.fast_linear is not None
    assert torch.equal(made(x), y)
    inputs = x.clone().requires_grad_()
    compiled_layer = torch.compile(made, fullgraph=True, backend="aot_eager")
    for function in (made, compiled_layer, made):
        inputs.grad, weight.fast_linear = None, None
        result = function(inputs)
        assert torch.equal(result, y)
        result.sum().backward()
        wanted = weight.dequantize(torch.float32).double().sum(0)
        assert relative(inputs.grad[1], wanted) < (1e-6 if dtype is torch.float32 else 2e-2)
    before = operators.calls()
    with torch.no_grad():
        assert torch.equal(compiled_layer(x), y)
    assert operators.calls() == before + 2 * operators.attached()
    made(x)
    weight.up.mul_(2)  # the next call sees it
    assert relative(made(x), x.float() @ weight.dequantize(torch.float32).t() + made.bias.float()) < 1e-2
    weight.down = weight.down.clone().zero_()
    assert torch.equal(made(x), nn.functional.linear(x, weight.matrix, made.bias))
    assert made.to("meta")(x.to("meta")).shape == y.shape


@four_bits
def test_the_error_is_that_of_the_rest_alone(recipe: qtorch.recipes.base.WeightRecipe) -> None:
    """Far below that without the branch, and what rounding the exact remainder of rank R costs, up to 16 bits."""
    x, floats = torch.randn(64, K), layer()
    u, s, v = torch.linalg.svd(floats.weight.double(), full_matrices=False)
    rest = copy.deepcopy(floats)
    rest.weight.copy_((u[:, RANK:] * s[RANK:]) @ v[RANK:])
    exact = float((floats.weight - rest.weight).norm())
    wanted = rest(x)
    quantize_(rest, recipe)
    least = relative(rest(x) - wanted + floats(x), floats(x))
    plain = relative(layer(recipe)(x), floats(x))
    made = layer(low_rank(recipe, RANK))
    found = relative(made(x), floats(x))
    assert 0.8 * least < found < 1.2 * least
    assert found < 0.4 * plain
    branch = made.weight.up.float() @ made.weight.down.float()  # type: ignore[operator, union-attr]
    assert abs(float(branch.norm()) / exact - 1) < 1e-3
    better = layer(low_rank(recipe, RANK, iterations=4))
    assert relative(better.weight.dequantize(), floats.weight) < relative(made.weight.dequantize(), floats.weight)


@pytest.mark.parametrize(("shape", "rank"), [((300, 200), 4), ((40, 90), 30), ((20, 30), 25)])
@pytest.mark.parametrize("weighted", [False, True])
def test_factors_are_the_best_of_their_rank(shape: tuple[int, int], rank: int, weighted: bool) -> None:
    torch.manual_seed(1)
    matrix, root = torch.randn(shape), None
    if weighted:
        inputs = torch.randn(1000, shape[1]) * torch.rand(shape[1]).exp2() ** 3
        root = torch.linalg.cholesky(inputs.t() @ inputs / 1000)
    left, right = low_rank_factors(matrix, rank, root)
    assert (left.shape, right.shape) == ((shape[0], rank), (rank, shape[1]))
    scaled = (lambda values: values) if root is None else (lambda values: values.double() @ root.double())
    least = torch.linalg.svdvals(scaled(matrix.double()))[rank:].norm()
    found = scaled((matrix - left @ right).double()).norm()
    assert float(found) <= 1.005 * float(least) + 1e-4
    assert all(torch.equal(a, b) for a, b in zip((left, right), low_rank_factors(matrix, rank, root), strict=True))


class Net(nn.Module):
    """A norm, so that `smooth` can scale, and inputs of which some channels are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.RMSNorm(K), nn.Linear(K, N), nn.Linear(N, 64)
        self.norm.weight.data[::40] *= 30

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(self.norm(x))))


def data(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(K, K, generator=torch.Generator().manual_seed(9)) / 16
    return [torch.randn(32, K, generator=generator) @ mixed for _ in range(16)]


@pytest.mark.parametrize("method", [gptq, auto], ids=lambda method: method.__name__)
@pytest.mark.parametrize("recipe", [*FOUR_BITS, qtorch.mxfp4_weight_only()], ids=lambda recipe: recipe.name)
def test_data_says_which_directions_count(recipe: qtorch.recipes.base.WeightRecipe, method: Any) -> None:
    x, wanted = torch.cat(data(1)), Net().eval()(torch.cat(data(1)))
    rotated = recipe.name == "mxfp4_weight_only"
    recipe = qtorch.mxfp4_dynamic_activation_mxfp4_weight(rotated=True) if rotated else recipe
    errors = {}
    for name, each in {
        "nearest": low_rank(recipe, RANK),
        "plain": method(recipe, data(0), transforms=[smooth()]),
        "branch": method(low_rank(recipe, RANK, 2), data(0), transforms=[smooth()]),
    }.items():
        model = Net().eval()
        report = quantize_(model, each)
        errors[name] = relative(model(x), wanted)
    assert errors["branch"] < 0.9 * errors["plain"]
    assert errors["branch"] < 0.95 * errors["nearest"]
    assert errors["branch"] > 0.2 * errors["plain"]
    for row in report.quantized:
        assert row.calibration is not None
        assert row.calibration.method.startswith("low rank + ")
        assert row.calibration.error < row.calibration.nearest_error  # type: ignore[operator]


def test_without_inputs_static_activations_and_tables() -> None:
    unused = nn.ModuleDict({"used": nn.Linear(64, 64), "not": nn.Linear(64, 64)}).requires_grad_(False)
    wanted = copy.deepcopy(unused["not"])
    recipe = low_rank(INT3, RANK)
    options: dict[str, Any] = {"forward": lambda model, batch: model["used"](batch)}
    quantize_(unused, gptq(recipe, [torch.randn(80, 64)], **options))
    quantize_(wanted, recipe)
    assert torch.equal(unused["not"].weight.dequantize(), wanted.weight.dequantize())  # type: ignore[operator, union-attr]
    static = low_rank(qtorch.int8_static_activation_int8_weight(), RANK)
    refuses("no scale of the activation", lambda: layer(static))
    model, x = nn.Sequential(layer()), torch.randn(300, K)
    report = quantize_(model, calibrated(static, [x]))
    assert report.quantized[0].calibration.input_range is not None  # type: ignore[union-attr]
    assert relative(model(x), layer()(x)) < 0.02
    table = nn.Embedding(90, 64).requires_grad_(False)
    quantize_(table, {"weight": recipe})
    ids = torch.tensor([[3, 89], [0, 3]])
    assert relative(table(ids), table.weight.dequantize()[ids]) < 1e-6


def test_views() -> None:
    weight: Any = layer(low_rank(INT3, RANK)).weight
    floats = weight.dequantize()
    for part, wanted in ((weight[32:96], floats[32:96]), (weight[:, 64:], floats[:, 64:]), (weight.t(), floats.t())):
        assert isinstance(part, LowRankWeight)
        assert torch.equal(part.dequantize(), wanted)
    assert relative(torch.ones(N) @ weight, floats.sum(0)) < 1e-6
    refuses("cuts its branch", lambda: weight.reshape(N, 2, K // 2))
    refuses("branches of low rank", lambda: torch.cat([weight, weight]), NotImplementedError)
    plain: Any = layer(INT3).weight
    for into, source in ((weight, plain), (plain, weight)):
        refuses("would change its numbers", lambda into=into, source=source: into.copy_(source))


def test_files(tmp_path: Path) -> None:
    model = layer(low_rank(INT3, RANK))
    weight: Any = model.weight
    made, (_, tensors, scheme, *rest) = weight.__reduce_ex__(2)
    for wrong in ({**tensors, "up": weight.up[:, 1:]}, {name: t for name, t in tensors.items() if name != "down"}):
        refuses("is damaged: (up of|down is missing)", lambda wrong=wrong: made("LowRankWeight", wrong, scheme, *rest))
    for name, format in SAVE_FORMATS.items():
        if name not in ("transformers", "gguf"):  # the first holds everything, the second knows its models
            target = tmp_path / f"{name}{format.suffix}"
            of_model: Any = {"model.layers.0.mlp.up_proj.weight": model.weight}
            refuses(
                "LowRankWeight|branch of low rank",
                lambda name=name, to=target, of_model=of_model: qtorch.save_quantized(of_model, to, format=name),
            )

    refuses("branch of low rank, which no type has", lambda: block_types.encode(weight, "Q4_0"))


def test_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integrations.transformers.tiny_models import build

    model = build("llama")
    report = quantize_(model, low_rank(qtorch.int4_weight_only(group_size=32), RANK))
    assert sum(row.bytes_after for row in report.quantized) == sum(
        weight.nbytes for weight in model.parameters() if isinstance(weight, LowRankWeight)
    )
    model.save_pretrained(tmp_path)
    quantize_model.assert_same(type(model).from_pretrained(tmp_path), model)


def test_refusals() -> None:
    recipe = low_rank(INT3, RANK)
    refuses("rank and iterations are 1 or more", lambda: low_rank(INT3, 0))
    refuses("data comes outside", lambda: low_rank(gptq(INT3, data(0))))
    for inner in (recipe, qtorch.block_sparse(qtorch.int8_dynamic_activation_int8_weight())):
        refuses("takes an inference recipe", lambda inner=inner: low_rank(inner))
    refuses("more than rank=192 rows and columns", lambda: layer(low_rank(INT3, N)))
    refuses("a convolution, beside which", lambda: quantize_(nn.Conv2d(32, 32, 1), {"weight": recipe}))
    experts = nn.ParameterDict({"experts": nn.Parameter(torch.randn(3, 64, 64))})
    refuses("takes matrices", lambda: quantize_(experts, {"experts": recipe}))
    refuses("divide", lambda: quantize_(nn.Linear(40, 64), recipe, on_misfit="pad"))
    refuses("trains no branch", lambda: qat(recipe), TypeError)
    refuses("learns no branch", lambda: auto(recipe, data(0), learn=AutoRound()))
    refuses("block_sparse takes", lambda: qtorch.block_sparse(recipe))
    refuses("importance_weighted takes", lambda: importance_weighted(low_rank(qtorch.lut_weight_only(3)), data(0)))
    made = layer(recipe)
    again = quantize_(nn.ModuleList([made, layer()]), recipe)
    assert [row.action for row in again.layers] == ["skipped", "quantized"]
    for other in (INT3, replace(recipe, rank=4)):
        refuses("already quantized", lambda other=other: quantize_(nn.ModuleList([made, layer()]), other))
