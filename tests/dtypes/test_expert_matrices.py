"""`weight[e]` of frozen experts is kept, and is never older than the weight."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import AffineQuantizedTensor, int4_weight_only, int8_weight_only, nf4_weight_only, quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.training import qat

RECIPES = [int8_weight_only(), int4_weight_only(group_size=16)]


def experts(recipe: object = RECIPES[0]) -> QuantizedTensor:
    return recipe.apply(torch.randn(3, 8, 32))  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_it_is_the_same_tensor(recipe: object) -> None:
    weight = experts(recipe)
    assert weight[1] is weight[torch.tensor(1)]
    assert weight[1] is not weight[2]
    assert weight[1].qdata.untyped_storage().data_ptr() == weight.qdata.untyped_storage().data_ptr()
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])
    assert torch.equal(weight[-1].dequantize(), weight.dequantize()[2])
    with pytest.raises(IndexError):
        weight[3]


def test_other_indices_are_as_before() -> None:
    weight = experts()
    whole = weight.dequantize()
    indices = (slice(1, 3), (1, 2), torch.tensor([2, 0]), (slice(None), 3), None, torch.tensor([True, False, True]))
    for index in indices[:4]:
        assert torch.equal(weight[index].dequantize(), whole[index])
    assert weight[0, 1] is not weight[0, 1]


def test_a_change_of_the_weight() -> None:
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


def test_the_memory_is_shared() -> None:
    weight = experts()
    matrix = weight[1]
    matrix.qdata.fill_(1)
    assert torch.equal(weight.dequantize()[1], weight.scale[1].expand(8, 32))
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])


def test_copies_and_files_do_not_hold_it() -> None:
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


def test_what_would_be_a_copy_is_not_kept() -> None:
    """Scales that are quantized themselves become numbers of their own in a view."""
    weight = nf4_weight_only(group_size=32).apply(torch.randn(3, 64, 64))
    assert weight[1] is not weight[1]
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])


def test_inference_mode_and_gradients() -> None:
    weight = experts()
    with torch.inference_mode():
        functional.linear(torch.randn(1, 32), weight[1])
        kept = weight[1]
    x = torch.randn(2, 32, requires_grad=True)
    functional.linear(x, weight[1]).sum().backward()
    assert weight[1] is not kept
    torch.testing.assert_close(x.grad, weight.dequantize()[1].sum(0).expand(2, 32))


def test_weights_in_training_are_picked_anew() -> None:
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(3, 8, 32))
    quantize_(module, {"experts": qat(int8_weight_only())})
    assert module.experts[1] is not module.experts[1]
    functional.linear(torch.randn(2, 32), module.experts[1]).sum().backward()
    assert module.experts.grad[1].any()  # type: ignore[index]


def test_functions_of_torch_func() -> None:
    weight: AffineQuantizedTensor = experts()  # type: ignore[assignment]
    x = torch.randn(4, 32)
    kept = weight[1]
    grad = torch.func.grad(lambda row: functional.linear(row, weight[1]).sum())
    torch.testing.assert_close(torch.func.vmap(grad)(x), kept.dequantize().sum(0).expand(4, 32))
