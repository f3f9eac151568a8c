"""Weights stored as (inputs, outputs), and matrices of fused experts."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch.dtypes import QuantizedTensor, TransposedWeight
from qtorch.recipes.base import WeightRecipe
from qtorch.training import qat

RECIPES: list[WeightRecipe] = [
    qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32), qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(), qtorch.nf4_weight_only(group_size=32), qtorch.lut_weight_only(bits=3),
    qtorch.mxfp4_weight_only(), qtorch.nvfp4_weight_only(),
]  # fmt: skip

EACH = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def pair(recipe: WeightRecipe, *shape: int) -> tuple[TransposedWeight, Tensor]:
    """A weight (..., K, N), and the weight (..., N, K) of the linear layer that it stands for."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    matrix = recipe.apply(weight.mT.contiguous())
    assert isinstance(matrix, QuantizedTensor)
    return TransposedWeight.of(matrix, shape), matrix


class InOut(nn.Module):
    """As `Conv1D` of transformers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, False), nn.Parameter(torch.randn(weight.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


@EACH
def test_products_of_layers_and_experts(recipe: WeightRecipe) -> None:
    weight, matrix = pair(recipe, 64, 96)
    x, bias = torch.randn(5, 64), torch.randn(96)
    wanted = functional.linear(x, matrix)
    assert torch.equal(x @ weight, wanted)
    assert torch.equal(torch.mm(x, weight), wanted)
    assert torch.equal(functional.linear(x, weight.t()), wanted)
    assert torch.equal(functional.linear(x, weight.mT), wanted)
    assert torch.equal(torch.addmm(bias, x, weight), functional.linear(x, matrix, bias))
    torch.testing.assert_close(torch.addmm(bias, x, weight, beta=2, alpha=3), 2 * bias + 3 * wanted)
    out = torch.empty(0)
    assert torch.mm(x, weight, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(weight.dequantize(), matrix.dequantize().mT)
    weight, matrix = pair(recipe, 3, 64, 96)
    x = torch.randn(3, 5, 64)
    wanted = torch.stack([functional.linear(rows, matrix[e]) for e, rows in enumerate(x)])  # type: ignore[arg-type]
    assert torch.equal(torch.bmm(x, weight), wanted)
    torch.testing.assert_close(torch.baddbmm(torch.ones(3, 1, 96), x, weight), wanted + 1)
    torch.testing.assert_close(torch.baddbmm(torch.full((3, 1, 96), torch.nan), x, weight, beta=0), wanted)
    assert torch.equal(x[1] @ weight[1], wanted[1])
    gathered = weight[torch.tensor([2, 0])]
    assert isinstance(gathered, TransposedWeight)
    assert torch.equal(torch.bmm(x[[2, 0]], gathered), wanted[[2, 0]])


def test_parts() -> None:
    """What only selects or cuts is held as the weight is; other views are views of the transposed matrix."""
    weight, _ = pair(qtorch.int4_weight_only(group_size=32), 3, 64, 96)
    floats = weight.dequantize()
    for part, wanted in (
        (weight[1:], floats[1:]), (weight[:, 32:], floats[:, 32:]), (weight[..., 5:7], floats[..., 5:7]),
        (weight.chunk(2, -1)[1], floats.chunk(2, -1)[1]), (weight.unbind(0)[2], floats[2]),
    ):  # fmt: skip
        assert isinstance(part, TransposedWeight)
        assert torch.equal(part.dequantize(), wanted)
    assert torch.equal(weight.reshape(1, 3, 64, 96).dequantize(), floats.reshape(1, 3, 64, 96))
    with pytest.raises(ValueError, match="cuts blocks of 32"):
        weight[:, 16:48]


@pytest.mark.skipif(qtorch.kernels.cpu.compiled_library.library() is None, reason="nothing is built")
@pytest.mark.parametrize(("recipe", "kernel"), [
    (qtorch.int8_weight_only(), "cpu_weight_only_mm"),
    (qtorch.int4_weight_only(group_size=32), "cpu_weight_only_mm"),
    (qtorch.int8_dynamic_activation_int8_weight(), "cpu_int8_mm"),
    (qtorch.int8_dynamic_activation_int4_weight(), "cpu_int8_mm"),
], ids=str)  # fmt: skip
def test_the_compiled_kernels_run_and_their_fast_path(recipe: WeightRecipe, kernel: str) -> None:
    weight, _ = pair(recipe, 64, 96)
    layer, x = InOut(weight), torch.randn(5, 64)
    assert [each.kernel for each in qtorch.explain(layer)] == [kernel]
    with qtorch.kernels.custom_ops.record_kernels() as ran:
        wanted = layer(x)
    assert ran[:2] == [f"linear:{kernel}", kernel]
    assert torch.equal(layer(x), wanted)
    assert layer.weight.matrix.fast_linear is not None  # type: ignore[union-attr]
    # New numbers, in place or not, are those that the next call multiplies by.
    other, _ = pair(recipe, 64, 96)
    with torch.no_grad():
        layer.weight.copy_(torch.zeros(64, 96))
    assert torch.equal(layer(x), layer.bias.expand(5, 96))
    layer.weight.data = other
    assert torch.equal(layer(x), wanted)


def test_gradients_and_square_weights() -> None:
    weight, matrix = pair(qtorch.int8_weight_only(), 64, 96)
    layer, x = InOut(weight), torch.randn(5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    y = layer(x).detach()
    torch.testing.assert_close(x.grad, 2 * y @ matrix.dequantize())
    torch.testing.assert_close(layer.bias.grad, 2 * y.sum(0))
    weight, matrix = pair(qtorch.int8_weight_only(), 64, 64)
    x = torch.randn(3, 64)
    torch.testing.assert_close(functional.linear(x, weight), x @ matrix.dequantize())
    transformers = pytest.importorskip("transformers.pytorch_utils")
    layer = transformers.Conv1D(96, 64)
    for recipe in (qtorch.training.int8_weight_only_quantized_training(), qtorch.training.lsq()):
        with pytest.raises(ValueError, match=r"stored as \(inputs, outputs\)|exchanges the class of layers"):
            qtorch.quantize_(layer, recipe)
        with pytest.raises(ValueError, match=r"stored as \(inputs, outputs\)|exactly these; this is one of"):
            qtorch.quantize_(layer, {"weight": recipe})
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize("wrap", [qtorch.training.int8_mixed_precision_training, qtorch.training.qat], ids=str)
def test_training_along_the_contracted_axis(wrap: type) -> None:
    """A layer that is stored (inputs, outputs) trains and converts as the linear layer of the same numbers."""
    transformers = pytest.importorskip("transformers.pytorch_utils")
    recipe = wrap() if wrap is not qtorch.training.qat else wrap(qtorch.int8_dynamic_activation_int8_weight())
    layer, linear = transformers.Conv1D(96, 64), nn.Linear(64, 96)
    linear.weight.data, linear.bias.data = layer.weight.detach().mT.contiguous(), layer.bias.detach().clone()
    x = torch.randn(16, 64)
    outputs = []
    for module in (layer, linear):
        qtorch.quantize_(module, recipe)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        trained = module(x)
        qtorch.quantize_(module, qtorch.training.convert())
        assert torch.equal(module(x), trained)
        outputs.append(trained)
    assert isinstance(layer.weight, TransposedWeight)
    torch.testing.assert_close(*outputs)
    assert not torch.equal(outputs[0], functional.linear(x, torch.zeros(96, 64)))


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=str)
def test_exported_in_operators_of_torch(recipe: WeightRecipe) -> None:
    weight, _ = pair(recipe, 64, 96)
    layer, x = InOut(weight), torch.randn(5, 64)
    program = torch.export.export(qtorch.export.portable(layer), (x,))
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)
    assert not any("qtorch" in str(node.target) for node in program.graph.nodes)


EXPERT_RECIPES = [qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=16)]


def experts(recipe: object = EXPERT_RECIPES[0]) -> QuantizedTensor:
    return recipe.apply(torch.randn(3, 8, 32))  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("recipe", EXPERT_RECIPES, ids=str)
def test_it_is_the_same_tensor(recipe: object) -> None:
    weight = experts(recipe)
    assert weight[1] is weight[torch.tensor(1)]
    assert weight[1] is not weight[2]
    assert weight[1].qdata.untyped_storage().data_ptr() == weight.qdata.untyped_storage().data_ptr()
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])
    assert torch.equal(weight[-1].dequantize(), weight.dequantize()[2])
    with pytest.raises(IndexError):
        weight[3]


def test_what_is_picked_anew_and_other_indices() -> None:
    weight = experts()
    whole = weight.dequantize()
    indices = (slice(1, 3), (1, 2), torch.tensor([2, 0]), (slice(None), 3), None, torch.tensor([True, False, True]))
    for index in indices[:4]:
        assert torch.equal(weight[index].dequantize(), whole[index])
    assert weight[0, 1] is not weight[0, 1]
    matrix = weight[1]
    matrix.qdata.fill_(1)
    assert torch.equal(weight.dequantize()[1], weight.scale[1].expand(8, 32))
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])
    # Scales that are quantized themselves become numbers of their own in a view.
    weight = qtorch.nf4_weight_only(group_size=32).apply(torch.randn(3, 64, 64))
    assert weight[1] is not weight[1]
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(3, 8, 32))
    qtorch.quantize_(module, {"experts": qat(qtorch.int8_weight_only())})
    assert module.experts[1] is not module.experts[1]
    functional.linear(torch.randn(2, 32), module.experts[1]).sum().backward()
    assert module.experts.grad[1].any()  # type: ignore[index]


def test_a_change_of_the_weight_and_copies() -> None:
    weight, other = experts(), experts()
    before = weight[1]
    weight.qdata.zero_()
    assert weight[1] is not before
    assert not weight[1].dequantize().any()
    parameter = nn.Parameter(weight, requires_grad=False)
    assert not parameter[2].dequantize().any()
    parameter.data = other
    assert torch.equal(parameter[2].dequantize(), other.dequantize()[2])
    assert torch.equal(parameter.to(torch.bfloat16)[2].dequantize(), parameter.to(torch.bfloat16).dequantize()[2])
    weight = experts()
    size = len(saved(weight))
    for e in range(3):
        functional.linear(torch.randn(1, 32), weight[e])
    assert len(saved(weight)) == size
    for twin in (copy.deepcopy(weight), copy.copy(weight), weight.detach()):
        assert vars(twin).get("matrices") is None
        assert twin[1] is not weight[1]


def saved(weight: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(weight, file)
    return file.getvalue()


def test_inference_mode_gradients_and_torch_func() -> None:
    weight = experts()
    with torch.inference_mode():
        functional.linear(torch.randn(1, 32), weight[1])
        kept = weight[1]
    x = torch.randn(2, 32, requires_grad=True)
    functional.linear(x, weight[1]).sum().backward()
    assert weight[1] is not kept
    torch.testing.assert_close(x.grad, weight.dequantize()[1].sum(0).expand(2, 32))
    weight: qtorch.AffineQuantizedTensor = experts()  # type: ignore[assignment]
    x = torch.randn(4, 32)
    kept = weight[1]
    grad = torch.func.grad(lambda row: functional.linear(row, weight[1]).sum())
    torch.testing.assert_close(torch.func.vmap(grad)(x), kept.dequantize().sum(0).expand(4, 32))
