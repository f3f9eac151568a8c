"""quantized_matmul, quantized_einsum and convolutions against torch's: exactly in full precision, bounded in int8."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from qtorch import compute_error, training
from qtorch.kernels import record_kernels
from qtorch.training import TrainingSpec, fully_quantized, quantized_conv2d, quantized_einsum, quantized_matmul
from tests.refusals import refuses
from tests.training.reference import three_matmuls

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


def test_the_gradient_of_the_right_operand_is_grad_weight() -> None:
    a, b, g = torch.randn(30, 16), torch.randn(16, 20), torch.randn(30, 20)
    spec = fully_quantized(8, 4)
    y, da, db = three_matmuls(a, b.t(), g, spec)
    a.requires_grad_(), b.requires_grad_()
    got = quantized_einsum("mk,kn->mn", a, b, spec)
    got.backward(g)
    for mine, wanted in ((got, y), (a.grad, da), (b.grad, db.t())):
        assert compute_error(wanted, mine.detach().double()) > 110


def test_attention_scores_run_an_int8_product_a_head() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    with record_kernels() as ran:
        y = quantized_einsum("bhqd,bhkd->bhqk", q, k, fully_quantized())
    assert ran.count("int_matmul") == 6
    assert 25 < compute_error(q @ k.mT, y) < 60


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ab", "takes two operands"),
        ("...a,ab->...b", "no ellipsis"),
        ("aab,bc->ac", "axis 'a' is repeated"),
        ("ab,bc->ad", "axis 'd' of the result is in neither"),
        ("ab,cd->abcd", "contracts no axis"),
        ("abc,cd->abd", "'abc' .* has 3 axes, got shape"),
        ("ab,ac->bc", "axis 'a' of .* is 4 and 5"),
    ],
)
def test_einsum_errors(equation: str, message: str) -> None:
    refuses(message, lambda: quantized_einsum(equation, torch.randn(4, 5), torch.randn(5, 6), fully_quantized()))


def test_matmul_errors() -> None:
    with pytest.raises(ValueError, match=r"shapes \(4, 5\) and \(4, 6\) do not fit"):
        quantized_matmul(torch.randn(4, 5), torch.randn(4, 6), fully_quantized())


def test_compile() -> None:
    spec = fully_quantized()

    def scores(a: Tensor, b: Tensor) -> Tensor:
        return quantized_einsum("bsk,nk->bsn", a, b, spec)

    a, b = torch.randn(2, 30, 64), torch.randn(20, 64)
    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(results(compiled, a, b), results(scores, a, b)):
        assert compute_error(wanted, got) > 110


# --- convolutions ---


CONVS = {
    f"conv{of}{ndim}d": (getattr(training, f"quantized_conv{of}{ndim}d"), getattr(functional, f"conv{of}{ndim}d"))
    for of in ("", "_transpose")
    for ndim in (1, 2, 3)
}
OPTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": "same"},
    {"padding": "valid", "dilation": 2},
    {"padding": "same", "dilation": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2, "padding": 2, "dilation": 2},
]
OF_TRANSPOSED = [
    {},
    {"stride": 2},
    {"stride": 3, "padding": 1, "output_padding": 2},
    {"padding": 2, "dilation": 2},
    {"groups": 2, "stride": 2, "output_padding": 1},
]
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
    with record_kernels() as ran:
        got = results(lambda x, w, b: mine(x, w, fully_quantized(), b, **options), x, w, b)
    assert ran.count("int_matmul") == 3 * options.get("groups", 1)
    for a, wanted in zip(got[:3], results(lambda x, w, b: theirs(x, w, b, **options), x, w, b)):
        assert 25 < compute_error(wanted, a) < 60


def test_a_scale_for_each_output_channel_and_window() -> None:
    """A channel, or an image, a thousand times as large leaves the accuracy of the others as it is."""
    x, w, _ = operands("conv2d")
    w[3] *= 1000
    x[1] *= 1000
    y, wanted = quantized_conv2d(x, w, fully_quantized()), functional.conv2d(x, w)
    assert compute_error(wanted[0, 4], y[0, 4]) > 30


def test_without_a_batch() -> None:
    for name in ("conv2d", "conv_transpose2d"):
        x, w, _ = operands(name)
        conv = CONVS[name][0]
        assert torch.equal(conv(x[0], w, fully_quantized()), conv(x[:1], w, fully_quantized())[0])


def test_a_weight_in_training() -> None:
    x, w, b = operands("conv2d")
    weight = torch.nn.Parameter(training.MasterWeight.of(w, fully_quantized()))
    y = functional.conv2d(x, weight, b, padding=1)
    assert torch.equal(y, quantized_conv2d(x, w, fully_quantized(), b, padding=1))
    y.sum().backward()
    assert weight.grad.shape == w.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "8 input channels do not fit a weight of shape"),
        ({"stride": 2, "padding": "same"}, "padding='same' takes a stride of 1"),
        ({"padding": "reflect"}, "padding is 'same', 'valid' or sizes, got 'reflect'"),
        ({"stride": (1, 2, 3)}, "take 1 or 2 sizes"),
        ({"dilation": 9}, "exceeds the padded input"),
    ],
)
def test_errors_of_convolutions(options: dict, message: str) -> None:
    x, w, _ = operands("conv2d")
    refuses(message, lambda: quantized_conv2d(x, w, fully_quantized(), **options))
    refuses("takes an input of 2 or 3 axes", lambda: training.quantized_conv1d(x, w, fully_quantized()))
