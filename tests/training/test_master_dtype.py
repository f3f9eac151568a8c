"""A weight in training of another dtype than its master, as FSDP2's `param_dtype` makes one: codes of all bits."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, quantize_, training
from qtorch.recipes.base import Recipe
from qtorch.training import MasterWeight, TrainingSpec

RECIPES = [
    training.int8_mixed_precision_training(),
    training.float8_training(),
    training.mxfp8_training(),
    training.nvfp4_training(stochastic_rounding=False, hadamard=False),
    training.mxfp4_training(stochastic_rounding=False, hadamard=False),
    training.int8_tilewise_training(),
    training.switchback_training(),
    training.qat(int4_weight_only(group_size=32)),
    training.qat(int8_dynamic_activation_int8_weight()),
]
BF16 = torch.bfloat16


class OneRank:
    """A mesh of one rank."""

    def size(self) -> int:
        return 1


def layers(recipe: Recipe) -> tuple[nn.Linear, nn.Linear]:
    """A layer in fp32, and the same one whose weight is of bf16 and has the bits of fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    quantize_(layer, recipe)
    mixed = copy.deepcopy(layer)
    mixed._parameters["weight"] = nn.Parameter(gathered(layer.weight))
    return layer, mixed


def gathered(weight: Tensor, dtype: torch.dtype | None = BF16) -> MasterWeight:
    """What FSDP2 gets of one rank under a policy."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    shard = weight.detach()
    sent, metadata = shard.fsdp_pre_all_gather(OneRank(), weight.shape, (), None, policy)  # type: ignore[attr-defined]
    whole: MasterWeight = shard.fsdp_post_all_gather(sent, metadata, dtype)[0]  # type: ignore[attr-defined]
    return whole


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_codes_are_those_of_the_master(recipe: Recipe) -> None:
    layer, mixed = layers(recipe)
    weight = mixed.weight
    assert weight.dtype == BF16
    assert torch.equal(weight.master, layer.weight.master)
    assert not torch.equal(weight.master, weight.master.bfloat16().float())
    one, other = layer.weight.convert(), weight.convert()
    assert torch.equal(one.plain()[0], other.plain()[0])
    # The forward in bf16 takes these codes: with an input of one value each output is a sum of them.
    x = torch.eye(64)
    y, wanted = mixed(x.bfloat16()), layer(x)
    assert y.dtype == BF16
    assert torch.equal(y, wanted.bfloat16())
    assert not torch.equal(y, layer.weight.master.t().bfloat16())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gradients_have_the_dtype_of_the_weight(recipe: Recipe) -> None:
    layer, mixed = layers(recipe)
    x = torch.randn(32, 64).bfloat16()
    leaves = x.clone().requires_grad_(), x.float().requires_grad_()
    mixed(leaves[0]).float().square().mean().backward()
    layer(leaves[1]).square().mean().backward()
    for got, wanted in ((mixed.weight.grad, layer.weight.grad), (leaves[0].grad, leaves[1].grad)):
        assert got is not None
        assert wanted is not None
        assert got.dtype == BF16
        # Codes of four bits that flip differ by more.
        assert 0 < float((got.float() - wanted).norm() / wanted.norm()) < (0.12 if "fp4" in recipe.name else 0.05)


def test_views_copies_and_pickles_keep_both() -> None:
    weight = layers(RECIPES[0])[1].weight
    for other in (weight.detach(), weight[:32], weight.t(), weight.clone(), pickle.loads(pickle.dumps(weight))):
        assert isinstance(other, MasterWeight)
        assert (other.dtype, other.master.dtype) == (BF16, torch.float32)
    for dtype in (torch.float32, torch.float16):
        moved = weight.detach().to(dtype)
        assert (moved.dtype, moved.master.dtype) == (dtype, dtype)
    assert weight.detach().sum().dtype == BF16
    assert weight.dequantize().dtype == BF16
    meta = weight.detach().to("meta")
    assert (meta.dtype, meta.master.dtype) == (BF16, torch.float32)


def test_a_weight_that_is_not_quantized_is_sent_in_the_dtype_of_the_policy() -> None:
    weight = MasterWeight.of(torch.randn(8, 16), TrainingSpec())
    assert gathered(weight).master.dtype == BF16
    assert gathered(weight, None).master.dtype == torch.float32
    assert gathered(layers(RECIPES[0])[0].weight, None).dtype == torch.float32
