"""The Triton kernel of block-sparse weights, against the operators of torch."""

import pytest
import torch

from qtorch import AffineQuantizedTensor, BlockSparseLayout, LinearSpec, PerGroup, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.linear.block_sparse import block_sparse_int8_scaled_mm, block_sparse_weight_only_mm
from qtorch.kernels.registry import Problem, kernels
from qtorch.primitives import compute_error, prune_blocks
from tests.fast_part import matrix_but
from tests.kernels.quantized_weights import ASYMMETRIC_TOKEN, TOKEN

ACTIVATIONS = {"symmetric": TOKEN, "asymmetric": ASYMMETRIC_TOKEN, "none": None}
WEIGHTS = [QuantSpec("int8"), QuantSpec("int8", PerGroup(32)), QuantSpec("int4", PerGroup(64)), QuantSpec("int3")]
KERNELS = {kernel.name: kernel for kernel in kernels("linear") if kernel.name.startswith("cuda_block_sparse")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("spec", matrix_but(WEIGHTS[1:3], WEIGHTS), ids=str)
def test_against_torch(spec, activation, device):
    layout = BlockSparseLayout(64, 0.6)
    linear = LinearSpec(spec, ACTIVATIONS[activation], layout=layout)
    for rows, dtype in ((1, torch.float32), (20, torch.bfloat16)):
        values = prune_blocks(torch.randn(128, 320), 64, 0.6).to(dtype)
        weight = AffineQuantizedTensor.from_float(values, linear).to(device)
        x, bias = torch.randn(rows, 320, device=device).to(dtype), torch.randn(128, device=device).to(dtype)
        kernel = KERNELS["cuda_block_sparse_weight_mm" if activation == "none" else "cuda_block_sparse_int8_mm"]
        assert kernel.rejects(Problem("linear", weight.scheme, dtype, "cuda")) is None
        with forced(LaunchConfig(16)), record_kernels() as ran:
            y = kernel(x, weight, bias)
        assert ran[-1] == "triton.block_sparse_mm"
        if activation == "none":
            expected = block_sparse_weight_only_mm(x, weight, bias)
            assert compute_error(expected, y) > (100 if dtype == torch.float32 else 38)
            x[0, 7] = torch.nan
            with forced(LaunchConfig(16)):
                assert kernel(x, weight, bias)[0].isnan().all()
        else:
            assert torch.equal(y, block_sparse_int8_scaled_mm(x, weight, bias))


def test_what_does_not_fit_is_refused(device):
    spec = LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.5))
    weight = AffineQuantizedTensor.from_float(prune_blocks(torch.randn(64, 64), 16, 0.5), spec)
    problem = Problem("linear", weight.scheme, torch.float32, "cuda")
    assert "blocks of 32, 64 or 128" in KERNELS["cuda_block_sparse_weight_mm"].rejects(problem)
