"""Weights that groups do not divide: an error, padding, another group size, or floating point."""

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import load_quantized, quantize_, quantize_checkpoint, save_quantized
from qtorch.calibration import gptq
from qtorch.dtypes import PaddedWeight, QuantizedTensor, TransposedWeight
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.custom_ops import record_kernels
from qtorch.model.misfit import Padded
from qtorch.recipes.base import WeightRecipe
from tests.refusals import refuses

GROUPED: list[WeightRecipe] = [
    qtorch.int4_weight_only(group_size=32),
    qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.nf4_weight_only(group_size=32),
    qtorch.lut_weight_only(bits=3, group_size=32),
    qtorch.mxfp4_dynamic_activation_mxfp4_weight(),
    qtorch.nvfp4_weight_only(),
]
EACH = pytest.mark.parametrize("recipe", GROUPED, ids=str)
INT4 = GROUPED[0]


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(k, n) for k, n in itertools.pairwise(sizes)])


def error_of(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - wanted).norm() / wanted.norm())


@EACH
def test_padded_groups_have_the_numbers_of_a_weight_with_zeros(recipe: WeightRecipe) -> None:
    """Of the product with a weight that has zeros at the end of its rows, and an input that has."""
    model, x = net(72, 48), torch.randn(5, 72)
    longer = nn.Linear(96, 48)
    longer.weight.data = functional.pad(model[0].weight.detach(), (0, 24))
    longer.bias.data = model[0].bias.detach().clone()
    wanted = model(x).detach()
    if isinstance(recipe, type(GROUPED[-1])):  # groups of 16: 72 becomes 80
        longer.weight.data = longer.weight.data[:, :80].contiguous()
    quantize_(longer, recipe)
    (row,) = quantize_(model, recipe, on_misfit="pad").quantized
    assert quantize_(model, recipe, on_misfit="pad").quantized == ()
    assert row.detail == f"padded(recipe={recipe}, padding={longer.weight.shape[1] - 72})"
    weight = model[0].weight
    assert isinstance(weight, PaddedWeight)
    assert weight.shape == (48, 72)
    assert torch.equal(weight.dequantize(), longer.weight.dequantize()[:, :72])  # type: ignore[operator]
    assert torch.equal(model(x), longer(functional.pad(x, (0, longer.weight.shape[1] - 72))))
    assert 0 < error_of(model, x, wanted) < 0.4


@pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built")
@pytest.mark.parametrize(
    ("recipe", "kernel"), [(GROUPED[0], "cpu_weight_only_mm"), (GROUPED[1], "cpu_int8_mm")], ids=str
)
def test_kernels_of_padded_weights(recipe: WeightRecipe, kernel: str) -> None:
    model, x = net(72, 48), torch.randn(5, 72)
    (row,) = quantize_(model, recipe, on_misfit="pad").quantized
    assert row.kernel == kernel
    assert [each.kernel for each in qtorch.explain(model)] == [kernel]
    with record_kernels() as ran:
        model(x)
    assert ran[:2] == [f"linear:{kernel}", kernel]
    model(x)
    assert model[0].weight.matrix.fast_linear is not None


def test_views_of_padded_weights() -> None:
    weight: Any = Padded(INT4, 24).apply(torch.randn(3, 48, 72))
    floats = weight.dequantize()
    x = torch.randn(3, 5, 72)
    wanted = torch.bmm(x, floats.mT)
    assert isinstance(weight.mT, TransposedWeight)
    torch.testing.assert_close(torch.bmm(x, weight.mT), wanted)
    torch.testing.assert_close(functional.linear(x[1], weight[1]), wanted[1])
    torch.testing.assert_close(x[1] @ weight[1].t(), wanted[1])
    torch.testing.assert_close(torch.randn(0, 48) @ weight[1], torch.empty(0, 72))
    y = torch.randn(4, 48)
    torch.testing.assert_close(y @ weight[1], y @ floats[1])
    for part, of in ((weight[1:], floats[1:]), (weight[:, 8:16], floats[:, 8:16]), (weight.view(3, 48, 72), floats)):
        assert isinstance(part, PaddedWeight)
        assert torch.equal(part.dequantize(), of)
    assert torch.equal(weight.view(1, 3, 48, 72).dequantize()[0], floats)
    for whole in (torch.stack(list(weight)), torch.cat(weight.split(2)), torch.cat(weight.chunk(2, 1), 1)):
        assert whole.scheme == weight.scheme
        assert torch.equal(whole, weight)
    refuses(r"cuts the contracted axis of .*PaddedWeight", lambda: torch.cat([weight, weight], 2))
    refuses(r"cuts the contracted axis of .*PaddedWeight", lambda: weight[..., :32])


def test_a_padded_table() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 24), "head": nn.Linear(24, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    quantize_(model, INT4, on_misfit="pad")
    assert model["head"].weight is model["embed"].weight
    ids = torch.tensor([[1, 3], [9, 0]])
    assert torch.equal(model["embed"](ids), functional.embedding(ids, model["head"].weight.dequantize()))


def test_gradients_of_padded_weights() -> None:
    model = net(72, 48, 31)
    quantize_(model, INT4, on_misfit="pad")
    x = torch.randn(5, 72, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    one, other = (model[i].weight.dequantize() for i in (0, 1))
    torch.testing.assert_close(grad, (torch.ones(5, 31) @ other @ one))


def test_weights_stored_the_other_way_around_are_padded_along_their_inputs() -> None:
    transformers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer, x = transformers.Conv1D(48, 72), torch.randn(5, 72)
    wanted = layer(x).detach()
    weight = layer.weight.detach().clone()
    quantize_(layer, INT4, on_misfit="pad")
    assert isinstance(layer.weight, TransposedWeight)
    assert layer.weight.scheme.padding == 24
    assert 0 < error_of(layer, x, wanted) < 0.2
    assert torch.equal(layer.weight.dequantize().mT, Padded(INT4, 24).apply(weight.mT).dequantize())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("length", "group"), [(72, 24), (48, 16), (64, 32), (40, 8), (31, 31), (7, 7)], ids=lambda n: str(n)
)
def test_coarser_chooses_a_size_that_divides(length: int, group: int) -> None:
    model = net(length, 16)
    (row,) = quantize_(model, INT4, on_misfit="coarser").quantized
    assert row.detail == f"int4_weight_only(group_size={group})"
    model = net(length, 16)
    (row,) = quantize_(model, gptq(INT4, [torch.randn(8, length)]), on_misfit="coarser").quantized
    assert f"int4_weight_only(group_size={group})" in row.detail


def test_skip_leaves_them_and_says_so() -> None:
    model, x = net(64, 48, 8), torch.randn(5, 64)
    wanted = model(x).detach()
    report = quantize_(model, INT4, on_misfit="skip")
    assert [row.name for row in report.quantized] == ["0.weight"]
    (row,) = report.skipped
    assert row.detail.startswith("on_misfit='skip': block_size (1, 32) does not divide shape (8, 48)")
    assert 0 < error_of(model, x, wanted) < 0.2


def test_the_first_recipe_of_a_tuple_that_fits() -> None:
    model = net(64, 48, 31, 8)
    recipes = {".*": (INT4, qtorch.int4_weight_only(group_size=16), None)}
    report = quantize_(model, recipes)
    assert [row.detail for row in report.quantized] == [
        "int4_weight_only(group_size=32)",
        "int4_weight_only(group_size=16)",
    ]
    assert [row.detail for row in report.skipped] == ["None is the first of its recipes that fits"]
    assert quantize_(model, recipes).quantized == ()
    with pytest.raises(ValueError, match="2: block_size \\(1, 16\\) does not divide"):
        quantize_(net(64, 48, 31, 8), {".*": recipes[".*"][:2]})
    with pytest.raises(TypeError, match="takes a recipe such as"):
        quantize_(model, {".*": (INT4, "int8")})  # type: ignore[dict-item]
    refuses("takes a recipe such as", lambda: quantize_(model, {".*": ()}), TypeError)


def test_the_error_ends_with_entries_that_work() -> None:
    model = net(64, 48, 8)
    with pytest.raises(ValueError, match="does not divide") as caught:
        quantize_(model, INT4)
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    last = str(caught.value).splitlines()[-1]
    found = re.fullmatch(r'"(\S+)": (.+),  # or None', last)
    quantize_(model, {found[1]: eval(f"qtorch.{found[2]}"), ".*": INT4})
    with pytest.raises(ValueError, match="on_misfit is 'error', 'pad', 'coarser', 'skip', got 'fit'"):
        quantize_(net(8, 8), INT4, on_misfit="fit")  # type: ignore[arg-type]


def test_what_cannot_be_padded_is_still_an_error() -> None:
    data = [torch.randn(4, 72)]
    for recipe in (gptq(INT4, data), qtorch.training.qat(INT4)):
        with pytest.raises(ValueError, match="72 % 32"):
            quantize_(net(72, 8), recipe, on_misfit="pad")
    refuses("27 % 32", lambda: quantize_(nn.Conv2d(3, 8, 3), INT4, targets="all", on_misfit="pad"))


@pytest.mark.parametrize("on_misfit", ["pad", "coarser"])
def test_checkpoints(on_misfit: Any, tmp_path: Path) -> None:
    """The same bits as in the model."""
    model = net(72, 48, 8)
    save_quantized(model, tmp_path / "float.safetensors")
    quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "q.safetensors", INT4, on_misfit=on_misfit)
    fresh = copy.deepcopy(model)
    load_quantized(fresh, tmp_path / "q.safetensors")
    quantize_(model, INT4, on_misfit=on_misfit)
    x = torch.randn(5, 72)
    assert torch.equal(fresh(x), model(x))


def test_padded_weights_are_exported_in_operators_of_torch() -> None:
    model, x = net(72, 48, 31), torch.randn(5, 72)
    quantize_(model, INT4, on_misfit="pad")
    program = torch.export.export(qtorch.export.portable(model), (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)
