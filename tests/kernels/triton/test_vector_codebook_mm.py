"""Products with vectors in bytes, by Triton."""

import pytest
import torch

import qtorch
from qtorch import compute_error
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.vector_codebook_mm import vector_codebook_mm
from qtorch.kernels.linear import reference
from qtorch.kernels.linear.codebooks import rotated_input, rotation_of
from tests.kernels.quantized_weights import LEAST


@pytest.mark.parametrize("path", ["mm", "dense"])
@pytest.mark.parametrize("dtype", LEAST)
def test_against_the_reference(dtype, path, device):
    """Whole rows and groups, tiles that do not divide them, and groups smaller than a tile."""
    for k, group in ((352, -1), (256, 128), (64, 64), (96, 32), (36, -1)):
        weight = qtorch.vector_codebook_weight_only(group).apply(torch.randn(37, k, device=device).to(dtype))
        bias = torch.randn(37, device=device).to(dtype)
        for rows in (1, 19):
            x = torch.randn(rows, k, device=device).to(dtype)
            with forced(LaunchConfig(16, 16, 32, path=path)), record_kernels() as ran:
                y = vector_codebook_mm(rotated_input(x, rotation_of(weight)), weight.qdata, weight.scale, bias)
            assert ran == [f"triton.vector_codebook_mm.{path}"]
            assert y.dtype == dtype
            assert compute_error(reference.linear(x, weight, bias), y) > LEAST[dtype]


def test_strides_and_empty_inputs(device):
    weight = qtorch.vector_codebook_weight_only().apply(torch.randn(16, 64, device=device))
    x = torch.randn(6, 200, device=device)[::2, 40:168:2]
    rotated = rotated_input(x, rotation_of(weight))
    y = vector_codebook_mm(rotated.t().contiguous().t(), weight.qdata, weight.scale)
    assert compute_error(reference.linear(x, weight, None), y) > LEAST[torch.float32]
    assert vector_codebook_mm(x[:0], weight.qdata, weight.scale).shape == (0, 16)


def test_refusals(device):
    weight = qtorch.vector_codebook_weight_only().apply(torch.randn(16, 64, device=device))
    x, codes, scale = torch.randn(2, 64, device=device), weight.qdata, weight.scale
    for arguments, message in (
        ((x[:, :32], codes, scale), "do not fit"),
        ((x, codes.int(), scale), "codes must be a matrix of uint8"),
        ((x, codes, scale[:3]), "scale must have shape"),
        ((x, codes, scale, scale), "bias must have shape"),
        ((x, codes, scale, x[0, ::4]), "bias must be contiguous, got a vector of stride 4"),
        ((x.double(), codes, scale), "x must be a matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            vector_codebook_mm(*arguments)
