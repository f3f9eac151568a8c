"""Updates in place: the step of Adam, and stochastic rounding, in Triton as in torch."""

import pytest
import torch

from qtorch.kernels import quantize_int8_rowwise, record_kernels, stochastic_update_bf16_, stochastic_update_int8_
from qtorch.kernels.cuda.triton.adam import adam
from qtorch.kernels.cuda.triton.stochastic_update import update_bf16, update_int8
from qtorch.kernels.ops.adam import LARGEST_SCALE, adam_step, check_step
from tests.fast_part import matrix_but
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, check_equals_the_reference, gradient, step, zeros


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("blocks", matrix_but(BLOCKS[::3], BLOCKS), ids=str)
@pytest.mark.parametrize(
    "dtype, count, key, l2",
    [(torch.float32, 2, None, 0.0), (torch.bfloat16, 3, 3_000_000_077, 0.0), (torch.float16, 2, None, 0.01)],
    ids=["fp32", "bf16 amsgrad at random", "fp16 l2"],
)
def test_equals_the_reference(form, blocks, dtype, count, key, l2, device):
    def run(weight, grad, moments, *about):
        check_step(weight, grad, moments, *about)
        adam(weight, grad, moments, *about, LARGEST_SCALE[form])

    with record_kernels() as ran:
        check_equals_the_reference(run, form, blocks, dtype, count, key, l2, device)
    assert ran == ["triton.adam_step"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("form", ALL_FORMS)
def test_runs_on_cuda(form):
    blocks = BLOCKS[0]
    moments, weight = zeros(form, blocks, 2, "cuda"), torch.ones(1500, device="cuda")
    with record_kernels() as ran:
        adam_step(weight, gradient(blocks, torch.float32, 1).cuda(), moments, blocks, step(form, 1))
    assert ran == ["adam_step.triton", "triton.adam_step"]


def seed(device, value):
    return torch.tensor([value], device=device)


@pytest.fixture(params=["triton", "operator"])
def update(request, device):
    """The launcher, or the operator, which on CPU is torch."""
    if request.param == "operator":
        return {"bf16": stochastic_update_bf16_, "int8": stochastic_update_int8_}
    numbers = iter(range(1000))
    return {
        "bf16": lambda *arguments: update_bf16(*arguments, seed(device, next(numbers))),
        "int8": lambda *arguments: update_int8(*arguments, seed(device, next(numbers))),
    }


def test_int8_and_bf16_also_what_cannot_round(update, device):
    weight, change = torch.randn(5, 300, device=device).bfloat16(), torch.randn(5, 300, device=device)
    exact = weight.float() - 1e-3 * change
    total, rounds = torch.zeros_like(exact), 30
    for _ in range(rounds):
        new = weight.clone()
        update["bf16"](new, change, -1e-3)
        step = exact.abs() * 2**-7
        assert ((new.float() - exact).abs() <= step).all()
        total += new.float()
    error, nearest = (total / rounds - exact).abs().mean(), (exact.bfloat16().float() - exact).abs().mean()
    assert 0 < error < nearest / 2
    assert (new != exact.bfloat16()).any()
    weight = torch.tensor([[float("inf"), float("-inf"), float("nan"), 0.0, -1.5, 3e38]], device=device).bfloat16()
    before = weight.clone()
    update["bf16"](weight, torch.zeros(1, 6, device=device), 1.0)
    assert torch.equal(weight.isnan(), before.isnan())
    assert torch.equal(weight.nan_to_num(7), before.nan_to_num(7))
    codes, scale = quantize_int8_rowwise(torch.randn(5, 300, device=device))
    change = torch.randn(5, 300, device=device)
    exact = codes.float() * scale - 0.01 * change
    total, rounds = torch.zeros_like(exact), 30
    for _ in range(rounds):
        new_codes, new_scale = codes.clone(), scale.clone()
        update["int8"](new_codes, new_scale, change, -0.01)
        assert torch.equal(new_scale, quantize_int8_rowwise(exact)[1])
        assert ((new_codes.float() * new_scale - exact).abs() < new_scale).all()
        total += new_codes.float() * new_scale
    nearest = quantize_int8_rowwise(exact)[0].float() * new_scale
    assert 0 < (total / rounds - exact).abs().mean() < (nearest - exact).abs().mean() / 2


def test_strides_seeds_and_errors(device):
    weight = torch.randn(40, 30, device=device).bfloat16()
    change = torch.randn(30, 40, device=device)
    expected = weight.clone().t().contiguous()
    with record_kernels() as ran:
        update_bf16(weight.t(), change, 1.0, seed(device, 3))
        update_bf16(expected, change, 1.0, seed(device, 3))
    assert ran == ["triton.update_bf16"] * 2
    assert torch.equal(weight.t(), expected)
    codes, scale = quantize_int8_rowwise(torch.randn(8, 64, device=device))
    cut, cut_scale = codes.clone()[:, :40], scale.clone()
    with record_kernels() as ran:
        update_int8(cut, cut_scale, change.t()[:8, :30].repeat(1, 2)[:, :40], 0.1, seed(device, 3))
    assert ran == ["triton.update_int8"]
    assert not torch.equal(cut_scale, scale)
    weight, change = torch.randn(9, 9, device=device).bfloat16(), torch.randn(9, 9, device=device)
    results = []
    for number in (5, 5, 6):
        torch.manual_seed(number)
        results.append(stochastic_update_bf16_(weight.clone(), change, 0.1))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    weight, codes = torch.ones(4, 6, device=device).bfloat16(), torch.ones(4, 6, device=device, dtype=torch.int8)
    scale, change = torch.ones(4, 1, device=device), torch.ones(4, 6, device=device)
    with pytest.raises(
        ValueError, match=r"takes a bf16 matrix and an update of its shape, got \(4, 6\) of torch.float32"
    ):
        stochastic_update_bf16_(change, change, 1.0)
    with pytest.raises(ValueError, match=r"got \(4, 6\) of torch.int8, \(4, 1\) and \(4, 5\)"):
        stochastic_update_int8_(codes, scale, change[:, :5], 1.0)
    with pytest.raises(ValueError, match=r"the update must have shape \(4, 6\), got \(6, 4\)"):
        update_bf16(weight, change.t(), 1.0, seed(device, 0))
    with pytest.raises(ValueError, match=r"the seed is one int64, got shape \(1,\) of torch.int32"):
        update_bf16(weight, change, 1.0, seed(device, 0).int())
    with pytest.raises(ValueError, match="takes contiguous rows of at most 16384 codes"):
        update_int8(codes.t(), torch.ones(6, 1, device=device), change.t(), 1.0, seed(device, 0))
