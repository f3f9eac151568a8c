"""Products of any shape: experts, transposed layers, matmul, einsum, convolutions."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import qtorch
from qtorch import MappingType, PerRow, PerTensor, QuantSpec, compute_error, quantize_, training
from qtorch.kernels.ops.int8_grouped_mm import int8_sums
from qtorch.training import TrainingSpec, fully_quantized, quantized_conv2d, quantized_einsum, quantized_matmul
from qtorch.training.engine.contraction import contraction
from tests.refusals import refuses
from tests.training import reference

RECIPES = {name: recipe for name, recipe in reference.RECIPES.items() if recipe.training_spec().output.is_quantized}
RECIPES["int8 tensorwise"] = training.mixed_precision_training(fully_quantized(8, 8, PerTensor()))
del RECIPES["bitnet"]  # takes matrices
ASYMMETRIC = training.GemmSpec(*[QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC)] * 2)


@pytest.mark.parametrize("build", ["compiled", None])
@pytest.mark.parametrize("name", [*RECIPES, "int8, zero points"])
def test_more_tokens_than_int32_holds_sums_of(name: str, build: str | None) -> None:
    """The contracted axis of the weight's gradient; codes are the largest of either sign."""
    layer = nn.Linear(32, 32, bias=False)
    quantize_(
        layer, RECIPES[name] if name in RECIPES else training.mixed_precision_training(TrainingSpec(*[ASYMMETRIC] * 3))
    )
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    with nullcontext() if build else qtorch.kernels.cpu.compiled_library.use(None):
        layer(signs.expand(140_032, 32)).backward(signs.flip(0).expand(140_032, 32))
    torch.testing.assert_close(layer.weight.grad, 140_032 * signs.flip(0).outer(signs), rtol=0.02, atol=0)


def test_sums_and_operands() -> None:
    codes = torch.ones(2, 8, dtype=torch.int8)
    assert [int8_sums(codes, None, codes, None, length).dtype for length in (131_071, 131_072)] == [
        torch.int32,
        torch.int64,
    ]
    spec = fully_quantized()

    def scores(a: Tensor, b: Tensor) -> Tensor:
        return quantized_einsum("bsk,nk->bsn", a, b, spec)

    a, b = torch.randn(2, 30, 64), torch.randn(20, 64)
    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(results(compiled, a, b), results(scores, a, b)):
        assert compute_error(wanted, got) > 110
    a, b, g = torch.randn(30, 16), torch.randn(16, 20), torch.randn(30, 20)
    spec = fully_quantized(8, 4)
    y, da, db = reference.three_matmuls(a, b.t(), g, spec)
    a.requires_grad_(), b.requires_grad_()
    got = quantized_einsum("mk,kn->mn", a, b, spec)
    got.backward(g)
    for mine, wanted in ((got, y), (a.grad, da), (b.grad, db.t())):
        assert compute_error(wanted, mine.detach().double()) > 110
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    with qtorch.kernels.record_kernels() as ran:
        y = quantized_einsum("bhqd,bhkd->bhqk", q, k, fully_quantized())
    assert ran.count("int_matmul") == 6
    assert 25 < compute_error(q @ k.mT, y) < 60
    with pytest.raises(ValueError, match=r"shapes \(4, 5\) and \(4, 6\) do not fit"):
        quantized_matmul(torch.randn(4, 5), torch.randn(4, 6), fully_quantized())


class Experts(nn.Module):
    """As modules of transformers store them, (E, N, K) or, with `transposed`, (E, K, N)."""

    is_concatenated = True

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.up_proj = nn.Parameter(torch.randn(4, 32, 64) if transposed else torch.randn(4, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 64, 32) if transposed else torch.randn(4, 32, 64))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        up, down = (w if self.is_transposed else w.mT for w in (self.up_proj, self.down_proj))
        return nn.functional.grouped_mm(torch.relu(nn.functional.grouped_mm(x, up, offs=offs)), down, offs=offs)


OFFS = torch.tensor([7, 7, 30, 40], dtype=torch.int32)
PARTS = [(0, 7), (7, 7), (7, 30), (30, 40)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_experts(name: str, transposed: bool) -> None:
    """Each expert is a contraction of its own: the bits of one, forward and gradients; then it converts."""
    recipe: Any = RECIPES[name]
    model, x = nn.Sequential(Experts(transposed)), torch.randn(40, 32, requires_grad=True)
    experts = model[0]
    ups, downs = ([e.detach().clone() for e in w] for w in (experts.up_proj, experts.down_proj))
    floats = experts(x, OFFS).detach()
    report = quantize_(model, recipe)
    assert str(report).count("skipped") == 0
    with qtorch.kernels.record_kernels() as kernels:
        y = experts(x, OFFS)
        y.square().sum().backward()
    if "int8" in name:
        assert "int_matmul" in kernels
    z, leaves = torch.zeros_like(y), []
    x2 = x.detach().requires_grad_()
    parts = []
    for e, (start, stop) in enumerate(PARTS):
        up, down = (w[e].mT.contiguous() if transposed else w[e] for w in (ups, downs))
        leaves += [up.requires_grad_(), down.requires_grad_()]
        if stop > start:
            hidden = torch.relu(contraction(x2[start:stop], up, recipe.training_spec()))
            parts.append(contraction(hidden, down, recipe.training_spec()))
    z = torch.cat(parts)
    z.square().sum().backward()
    assert torch.equal(y, z)
    assert 10 < compute_error(floats, y.detach()) < 60
    torch.testing.assert_close(x.grad, x2.grad)
    for e in range(4):
        for parameter, leaf in ((experts.up_proj, leaves[2 * e]), (experts.down_proj, leaves[2 * e + 1])):
            got = torch.as_tensor(parameter.grad)[e]
            wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(got.mT if transposed else got, wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    with torch.no_grad():
        trained = experts(x, OFFS)
        quantize_(model, qtorch.training.convert())
        served = experts(x, OFFS)
    assert not experts.up_proj.requires_grad
    if "float8" in name or name == "mxfp8":
        assert compute_error(trained, served) > 100
    else:
        assert torch.equal(trained, served)


def test_experts_alone_and_what_bitnet_leaves() -> None:
    """`w[e]`, `bmm` and `grouped_mm` of a weight in training."""
    model = nn.Sequential(Experts())
    quantize_(model, qtorch.training.int8_mixed_precision_training())
    weight, x = model[0].up_proj, torch.randn(4, 5, 32)
    batched = torch.bmm(x, weight.mT)
    for e in range(4):
        assert torch.equal(batched[e], nn.functional.linear(x[e], weight[e]))
    batched.sum().backward()
    assert (weight.grad != 0).any(-1).any(-1).all()
    model = nn.Sequential(Experts())
    with pytest.raises(ValueError, match="experts in one parameter, and bitnet_training takes matrices"):
        quantize_(model, training.bitnet_training())
    with pytest.raises(ValueError, match="takes matrices, this weight has shape"):
        quantize_(model, {r"0\.up_proj": training.bitnet_training()})


@pytest.mark.parametrize(
    "shapes", [((6, 16), (3, 16, 8)), ((6, 16), (16, 8)), ((3, 5, 16), (16, 6)), ((3, 4, 16), (3, 16, 8))]
)
def test_quantized_grouped_mm(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """All four kinds of `F.grouped_mm`, with an empty group."""
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    both = a.dim() == b.dim() == 3
    end = {(2, 3): 6, (2, 2): 16, (3, 2): 8}.get((a.dim(), b.dim()), 0)
    offs = None if both else torch.tensor([4, 4, end], dtype=torch.int32)
    if (a.dim(), b.dim()) == (3, 2):  # torch's own wants other strides
        wanted = torch.cat([a[e] @ b[:, start:stop] for e, (start, stop) in enumerate([(0, 4), (4, 4), (4, 8)])], 1)
    else:
        wanted = nn.functional.grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(training.quantized_grouped_mm(a, b, TrainingSpec(), offs), wanted, rtol=1e-5, atol=1e-5)
    y = qtorch.training.quantized_grouped_mm(a, b, fully_quantized(), offs)
    assert 25 < compute_error(wanted, y) < 60
    gradients = torch.autograd.grad(wanted.square().sum(), (a, b))
    for got, exact in zip(torch.autograd.grad(y.square().sum(), (a, b)), gradients, strict=True):
        assert 20 < compute_error(exact, got) < 60
    with pytest.raises(ValueError, match="takes offs where an operand is a matrix"):
        qtorch.training.quantized_grouped_mm(a, b, TrainingSpec(), torch.tensor([1]) if both else None)


def test_convolutions_and_transposed_ones() -> None:
    model, x = (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(6, 2, 2)),
        torch.randn(2, 4, 5, 5),
    )
    injection = training.inject(fully_quantized())
    with injection:
        y = model(x)
    y.sum().backward()
    assert sorted(injection.counts) == ["0:conv_transpose2d", "2:conv_transpose2d"]
    with torch.no_grad():
        injection.convert(model, x)
        with injection:
            assert torch.equal(model(x), y)
    assert model[0].weight.is_meta
    with pytest.raises(ValueError, match="does not fit a weight of shape"):
        training.quantized_conv_transpose2d(torch.randn(2, 5, 5, 5), torch.randn(4, 6, 3, 3), TrainingSpec())
    # A channel, or an image, a thousand times as large leaves the accuracy of the others as it is.
    x, w, _ = operands("conv2d")
    w[3] *= 1000
    x[1] *= 1000
    y, wanted = quantized_conv2d(x, w, fully_quantized()), nn.functional.conv2d(x, w)
    assert compute_error(wanted[0, 4], y[0, 4]) > 30
    for name in ("conv2d", "conv_transpose2d"):
        x, w, _ = operands(name)
        conv = CONVS[name][0]
        assert torch.equal(conv(x[0], w, fully_quantized()), conv(x[:1], w, fully_quantized())[0])
    x, w, b = operands("conv2d")
    weight = torch.nn.Parameter(training.MasterWeight.of(w, fully_quantized()))
    y = nn.functional.conv2d(x, weight, b, padding=1)
    assert torch.equal(y, quantized_conv2d(x, w, fully_quantized(), b, padding=1))
    y.sum().backward()
    assert weight.grad.shape == w.shape


@pytest.mark.parametrize("name", ["int8", "float8 rowwise", "int4, int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_table(name: str, tied: bool) -> None:
    """The codes of both: rows are those that a tied head multiplies by, which has a gradient for every row."""
    model, ids = nn.ModuleDict({"table": nn.Embedding(40, 32), "head": nn.Linear(32, 40, bias=False)}), torch.arange(9)
    if tied:
        model["head"].weight = model["table"].weight
    quantize_(model, {"table": RECIPES[name], "head": RECIPES[name]} if not tied else RECIPES[name])
    weight, rhs = model["table"].weight, RECIPES[name].training_spec().output.rhs
    assert (model["head"].weight is weight) == tied
    torch.testing.assert_close(model["table"](ids), rhs.fake_quantize(weight.master.detach())[ids])
    nn.functional.cross_entropy(model["head"](torch.tanh(model["table"](ids))), ids).backward()
    assert torch.equal((torch.as_tensor(weight.grad) != 0).any(1), torch.arange(40) < (40 if tied else 9))


MATMULS = [((5, 8), (8, 3)), ((2, 5, 8), (8, 3)), ((8,), (8, 3)), ((5, 8), (8,)), ((8,), (8,))]
MATMULS += [((2, 5, 8), (2, 8, 3)), ((4, 1, 5, 8), (2, 8, 3)), ((8,), (2, 8, 3))]
EQUATIONS = ["bk,nk->bn", "bsk,kn->bsn", "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", "k,k->", "ab,cb", "ijk,jkl->il"]
EQUATIONS += ["ij,kj->ki", "abi,bc->ac", "eik,ekj->eij"]


def results(function: object, *operands: Tensor) -> list[Tensor]:
    operands = tuple(x.clone().requires_grad_() for x in operands)
    y = function(*operands)
    y.backward(torch.linspace(-1, 1, max(y.numel(), 2))[: y.numel()].reshape(y.shape))
    return [y.detach(), *(x.grad for x in operands)]


@pytest.mark.parametrize(("left", "right"), MATMULS, ids=str)
def test_matmul_in_full_precision(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left), torch.randn(right)
    for got, wanted in zip(
        results(lambda a, b: quantized_matmul(a, b, TrainingSpec()), a, b), results(torch.matmul, a, b)
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_in_full_precision(equation: str) -> None:
    sizes = {letter: 2 + i for i, letter in enumerate("bcaeijklqdhns")}
    operands = [torch.randn([sizes[x] for x in term]) for term in equation.partition("->")[0].split(",")]
    got = results(lambda a, b: quantized_einsum(equation, a, b, TrainingSpec()), *operands)
    for a, b in zip(got, results(lambda a, b: torch.einsum(equation, a, b), *operands)):
        torch.testing.assert_close(a, b)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_equation(data: st.DataObject) -> None:
    letters = st.lists(st.sampled_from("abcd"), unique=True, max_size=3)
    left, right = data.draw(letters) + ["k"], ["k"] + data.draw(letters)
    free = sorted(({*left} | {*right}) - {"k"})
    result = data.draw(st.permutations(free)) if free else []
    equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    sizes = {"a": 2, "b": 3, "c": 1, "d": 4, "k": 5}
    a, b = torch.randn([sizes[x] for x in left]), torch.randn([sizes[x] for x in right])
    torch.testing.assert_close(quantized_einsum(equation, a, b, TrainingSpec()), torch.einsum(equation, a, b))


@pytest.mark.parametrize("spec", [fully_quantized(), training.fully_quantized_float8()], ids=["int8", "float8"])
def test_quantized_products(spec: TrainingSpec) -> None:
    a, b = torch.randn(2, 30, 64), torch.randn(64, 20)
    for mine, theirs in (
        (lambda a, b: quantized_matmul(a, b, spec), torch.matmul),
        (lambda a, b: quantized_einsum("bmk,kn->bmn", a, b, spec), torch.matmul),
    ):
        for got, wanted in zip(results(mine, a, b), results(theirs, a, b)):
            assert 20 < compute_error(wanted, got) < 60


@pytest.mark.parametrize(("equation", "message"), [
    ("ab", "takes two operands"),
    ("...a,ab->...b", "no ellipsis"),
    ("aab,bc->ac", "axis 'a' is repeated"),
    ("ab,bc->ad", "axis 'd' of the result is in neither"),
    ("ab,cd->abcd", "contracts no axis"),
    ("abc,cd->abd", "'abc' .* has 3 axes, got shape"),
    ("ab,ac->bc", "axis 'a' of .* is 4 and 5"),
])  # fmt: skip
def test_einsum_errors(equation: str, message: str) -> None:
    refuses(message, lambda: quantized_einsum(equation, torch.randn(4, 5), torch.randn(5, 6), fully_quantized()))


# --- convolutions ---
CONVS = {
    f"conv{of}{ndim}d": (getattr(training, f"quantized_conv{of}{ndim}d"), getattr(nn.functional, f"conv{of}{ndim}d"))
    for of in ("", "_transpose")
    for ndim in (1, 2, 3)
}
OPTIONS = [
    {}, {"stride": 2}, {"padding": 1}, {"padding": "same"}, {"padding": "valid", "dilation": 2},
    {"padding": "same", "dilation": 2}, {"groups": 2}, {"groups": 4, "stride": 2, "padding": 2, "dilation": 2},
]  # fmt: skip
OF_TRANSPOSED = [
    {}, {"stride": 2}, {"stride": 3, "padding": 1, "output_padding": 2}, {"padding": 2, "dilation": 2},
    {"groups": 2, "stride": 2, "output_padding": 1},
]  # fmt: skip
CASES = [(name, options) for name in CONVS for options in (OF_TRANSPOSED if "transpose" in name else OPTIONS)]


def operands(name: str, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    ndim = int(name[-2])
    channels = (8, 12 // groups) if "transpose" in name else (12, 8 // groups)
    return torch.randn(2, 8, *(9, 7, 6)[:ndim]), torch.randn(*channels, *(3, 3, 2)[:ndim]), torch.randn(12)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_in_full_precision(name: str, options: dict) -> None:
    mine, theirs = CONVS[name]
    x, w, b = operands(name, options.get("groups", 1))
    got = results(lambda x, w, b: mine(x, w, TrainingSpec(), b, **options), x, w, b)
    for a, wanted in zip(got, results(lambda x, w, b: theirs(x, w, b, **options), x, w, b)):
        torch.testing.assert_close(a, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "options"), [*((name, {"padding": 1}) for name in CONVS), *CASES[-5:]], ids=str)
def test_in_int8(name: str, options: dict) -> None:
    mine, theirs = CONVS[name]
    x, w, b = operands(name, options.get("groups", 1))
    with qtorch.kernels.record_kernels() as ran:
        got = results(lambda x, w, b: mine(x, w, fully_quantized(), b, **options), x, w, b)
    assert ran.count("int_matmul") == 3 * options.get("groups", 1)
    for a, wanted in zip(got[:3], results(lambda x, w, b: theirs(x, w, b, **options), x, w, b)):
        assert 25 < compute_error(wanted, a) < 60


@pytest.mark.parametrize(("options", "message"), [
    ({"groups": 3}, "8 input channels do not fit a weight of shape"),
    ({"stride": 2, "padding": "same"}, "padding='same' takes a stride of 1"),
    ({"padding": "reflect"}, "padding is 'same', 'valid' or sizes, got 'reflect'"),
    ({"stride": (1, 2, 3)}, "take 1 or 2 sizes"),
    ({"dilation": 9}, "exceeds the padded input"),
])  # fmt: skip
def test_errors_of_convolutions(options: dict, message: str) -> None:
    x, w, _ = operands("conv2d")
    refuses(message, lambda: quantized_conv2d(x, w, fully_quantized(), **options))
    refuses("takes an input of 2 or 3 axes", lambda: training.quantized_conv1d(x, w, fully_quantized()))
