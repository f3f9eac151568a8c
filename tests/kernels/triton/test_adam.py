"""The step of Adam in Triton: the bits of the one in torch operators."""

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.triton.adam import adam
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.adam import LARGEST_SCALE, Moment, adam_step, check_step
from tests.fast_part import slow_but
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, gradient, step, tensors, zeros


def moved(moments: list[Moment], device: str) -> list[Moment]:
    return [Moment(m.data.to(device), None if m.scale is None else m.scale.to(device)) for m in moments]


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("blocks", slow_but(BLOCKS[::3], BLOCKS), ids=str)
@pytest.mark.parametrize(
    "dtype, count, key, l2",
    [(torch.float32, 2, None, 0.0), (torch.bfloat16, 3, 3_000_000_077, 0.0), (torch.float16, 2, None, 0.01)],
    ids=["fp32", "bf16 amsgrad at random", "fp16 l2"],
)
def test_equals_the_reference(form, blocks, dtype, count, key, l2, device):
    ours, reference = moved(zeros(form, blocks, count), device), zeros(form, blocks, count)
    weight = torch.randn(blocks.rows * blocks.length).to(dtype)
    other, weight = weight.clone(), weight.to(device)
    for number in (1, 2):
        grad = gradient(blocks, dtype, number)
        check_step(weight, grad.to(device), ours, blocks, step(form, number, key, l2))
        with record_kernels() as ran:
            adam(weight, grad.to(device), ours, blocks, step(form, number, key, l2), LARGEST_SCALE[form])
        assert ran == ["triton.adam_step"]
        portable(adam_step)(other, grad, reference, blocks, step(form, number, key, l2))
    assert torch.equal(weight.cpu(), other)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(ours), tensors(reference), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ALL_FORMS)
def test_runs_on_cuda(form):
    blocks = BLOCKS[0]
    moments, weight = moved(zeros(form, blocks, 2), "cuda"), torch.ones(1500, device="cuda")
    with record_kernels() as ran:
        adam_step(weight, gradient(blocks, torch.float32, 1).cuda(), moments, blocks, step(form, 1))
    assert ran == ["adam_step.triton", "triton.adam_step"]
