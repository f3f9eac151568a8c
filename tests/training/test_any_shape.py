"""What is no linear layer trains too: experts in one parameter, transposed convolutions, tied embedding and head."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import MappingType, PerRow, PerTensor, QuantSpec, compute_error, quantize_, training
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.ops.int8_grouped_mm import int8_sums
from qtorch.training import TrainingSpec, convert, fully_quantized, int8_mixed_precision_training, quantized_grouped_mm
from qtorch.training.engine.contraction import contraction
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
    with nullcontext() if build else compiled_library.use(None):
        layer(signs.expand(140_032, 32)).backward(signs.flip(0).expand(140_032, 32))
    torch.testing.assert_close(layer.weight.grad, 140_032 * signs.flip(0).outer(signs), rtol=0.02, atol=0)


def test_sums_of_parts_of_a_long_axis_are_of_one_dtype() -> None:
    codes = torch.ones(2, 8, dtype=torch.int8)
    assert [int8_sums(codes, None, codes, None, length).dtype for length in (131_071, 131_072)] == [
        torch.int32,
        torch.int64,
    ]


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
        return functional.grouped_mm(torch.relu(functional.grouped_mm(x, up, offs=offs)), down, offs=offs)


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
    with record_kernels() as kernels:
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
        quantize_(model, convert())
        served = experts(x, OFFS)
    assert not experts.up_proj.requires_grad
    if "float8" in name or name == "mxfp8":
        assert compute_error(trained, served) > 100
    else:
        assert torch.equal(trained, served)


def test_experts_one_by_one_and_batched() -> None:
    """`w[e]`, `bmm` and `grouped_mm` of a weight in training."""
    model = nn.Sequential(Experts())
    quantize_(model, int8_mixed_precision_training())
    weight, x = model[0].up_proj, torch.randn(4, 5, 32)
    batched = torch.bmm(x, weight.mT)
    for e in range(4):
        assert torch.equal(batched[e], functional.linear(x[e], weight[e]))
    batched.sum().backward()
    assert (weight.grad != 0).any(-1).any(-1).all()


def test_what_experts_bitnet_leaves() -> None:
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
        wanted = functional.grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(quantized_grouped_mm(a, b, TrainingSpec(), offs), wanted, rtol=1e-5, atol=1e-5)
    y = quantized_grouped_mm(a, b, fully_quantized(), offs)
    assert 25 < compute_error(wanted, y) < 60
    gradients = torch.autograd.grad(wanted.square().sum(), (a, b))
    for got, exact in zip(torch.autograd.grad(y.square().sum(), (a, b)), gradients, strict=True):
        assert 20 < compute_error(exact, got) < 60
    with pytest.raises(ValueError, match="takes offs where an operand is a matrix"):
        quantized_grouped_mm(a, b, TrainingSpec(), torch.tensor([1]) if both else None)


def test_a_module_of_transposed_convolutions() -> None:
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
    functional.cross_entropy(model["head"](torch.tanh(model["table"](ids))), ids).backward()
    assert torch.equal((torch.as_tensor(weight.grad) != 0).any(1), torch.arange(40) < (40 if tied else 9))
