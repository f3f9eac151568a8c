"""The step of Adam in Triton: the bits of the one in torch operators."""

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.triton.adam import adam
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
