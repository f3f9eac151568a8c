"""Every registered kernel of `linear` against the reference, on every scheme and layout that it accepts.

A new kernel, layout, recipe or number format is covered here by itself.
"""

import pytest
import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.cpu.compiled_library import missing as missing_library
from qtorch.kernels.linear import reference
from qtorch.kernels.registry import REFERENCE, Kernel, Problem, kernels
from qtorch.primitives import compute_error
from tests.kernels.every_scheme import weights_of_every_scheme

KERNELS = [k for k in kernels("linear") if k.priority != REFERENCE and k.device in (None, "cpu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_against_the_reference(kernel: Kernel, dtype: torch.dtype) -> None:
    x, bias = torch.randn(3, 7, 192).to(dtype), torch.randn(64).to(dtype)
    for name, weight in weights_of_every_scheme(dtype):
        if kernel.rejects(Problem("linear", weight.scheme, dtype, "cpu")) is not None:
            continue
        with record_kernels() as ran:
            y = kernel(x, weight, bias)
        expected = reference.linear(x, weight, bias)
        assert ran[0] == f"linear:{kernel.name}"
        assert y.dtype == dtype
        activation = weight.scheme.activation
        if activation is not None and not activation.dtype.is_floating_point:
            assert torch.equal(y, expected), name
        else:
            least = {torch.float32: 105, torch.float16: 50, torch.bfloat16: 38}[dtype]
            assert compute_error(expected, y) > least, name


def test_no_kernel_is_left_out() -> None:
    taken = set()
    for dtype in (torch.float32, torch.bfloat16):
        for _, weight in weights_of_every_scheme(dtype):
            taken |= {k.name for k in KERNELS if k.rejects(Problem("linear", weight.scheme, dtype, "cpu")) is None}
    # Kernels of other tensor types have tests of their own.
    missing = {k.name for k in KERNELS} - taken
    if missing_library() is not None:
        missing -= {k.name for k in KERNELS if k.name.startswith("cpu_")}
    assert missing <= {"lut_weight_mm"}
