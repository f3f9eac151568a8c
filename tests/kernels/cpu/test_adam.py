"""The compiled step of Adam: the bits of the one in torch operators, for every form, shape and dtype."""

import itertools

import pytest
import torch

from qtorch.kernels import custom_ops, record_kernels
from qtorch.kernels.ops.adam import Moment, adam_step
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, check_equals_the_reference, gradient, step, zeros
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.refusals import refuses


@pytest.mark.parametrize("form", ALL_FORMS)
def test_equals_the_reference(build: str, form: str) -> None:
    cases = itertools.product(BLOCKS, (torch.float32, torch.bfloat16, torch.float16), (2, 3), (None, 7), (0.0, 0.01))
    for case in cases:
        with record_kernels() as ran:
            check_equals_the_reference(adam_step, form, *case)
        assert ran == [f"adam_step.{build}"] * 3


@NEEDS_LIBRARY
@pytest.mark.parametrize("form", ["8", "4", "float8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_that_is_lost_says_so(form: str, value: float) -> None:
    """Moments of a block with a gradient that is not finite are NaN, and no other block changes; where its square alone
    is not, the squares are as large as they can be, which moves nothing."""
    blocks = BLOCKS[2]
    results = []
    for function in (adam_step, custom_ops.portable(adam_step)):
        moments, weight = zeros(form, blocks, 2), torch.ones(512)
        grad = gradient(blocks, torch.float32, 1)
        grad[130], grad[300] = value, 3e19
        function(weight, grad, moments, blocks, step(form, 1))
        assert abs(weight[300] - 1) < 1e-2
        results.append((weight, moments))
    (weight, moments), (other, reference) = results
    assert torch.equal(weight.nan_to_num(7), other.nan_to_num(7))
    assert weight.isnan().sum() == 1
    for one, two in zip(moments, reference, strict=True):
        assert one.scale.isnan().flatten().tolist() == [False, True, False, False]
        assert torch.equal(one.scale.nan_to_num(7), two.scale.nan_to_num(7))


@NEEDS_LIBRARY
def test_arguments_are_checked() -> None:
    blocks = BLOCKS[2]
    weight, grad = torch.ones(512), torch.ones(512)

    def call(**changed: object) -> None:
        given = {"weight": weight, "grad": grad, "moments": zeros("8", blocks, 2), **changed}
        adam_step(given["weight"], given["grad"], given["moments"], blocks, step("8", 1))

    call()
    good = zeros("8", blocks, 1)[0]
    for name, wrong in {
        "weight": {"weight": weight[:-1].clone()},
        "grad": {"grad": torch.ones(1024)[::2]},
        "exp_avg must": {"moments": [Moment(good.data[:-1].clone(), good.scale), good]},
        "exp_avg_sq must": {"moments": [good, Moment(good.data.int(), good.scale)]},
        "exp_avg_sq's scale": {"moments": [good, Moment(good.data, good.scale[:-1].clone())]},
    }.items():
        refuses(name, lambda wrong=wrong: call(**wrong))
    empty = zeros("8", blocks, 1)[0]
    empty.data.untyped_storage().resize_(0)
    refuses("no memory", lambda: call(moments=[good, empty]))
