"""Every registered kernel of `linear` against the reference, on every scheme and layout that it accepts.

A new kernel, layout, recipe or number format is covered here by itself.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, int8_dynamic_activation_int8_weight, quantize_
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import variants
from qtorch.kernels.cpu.compiled_library import missing as missing_library
from qtorch.kernels.linear import reference
from qtorch.kernels.registry import REFERENCE, Kernel, Problem, kernels
from qtorch.primitives import compute_error
from tests.kernels.every_scheme import in_every_layout, schemes, weights_of_every_scheme

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


@pytest.mark.parametrize("k", [140_032, 270_336])
def test_sums_beyond_int32(k: int) -> None:
    """Of the widest codes, of either sign; those of 2:4 sparse weights are half as long."""
    signs = torch.tensor([[1.0], [-1.0]]).repeat(4, k)
    signs[2:4, ::2] *= -1
    x, long = signs[:3] * 0.7, [(name, spec) for name, spec in schemes().items() if is_long(spec)]
    for name, weight in itertools.chain(*(in_every_layout(*named, values=signs) for named in long)):
        problem, real = Problem("linear", weight.scheme, torch.float32, "cpu"), weight.dequantize().double()
        for kernel in KERNELS:
            if kernel.rejects(problem) is not None:
                continue
            for variant in ("dot", "tile", "fixed", "channels") if kernel.name.startswith("cpu_") else ("torch",):
                with variants.force(variant):
                    y = kernel(x, weight, None)
                largest = float((x.double().abs() @ real.abs().t()).max())
                assert (y.double() - x.double() @ real.t()).abs().max() <= 0.01 * largest, (name, kernel.name, variant)
                if weight.scheme.activation is not None:
                    assert torch.equal(y, reference.linear(x, weight, None)), (name, kernel.name, variant)


def is_long(spec: LinearSpec) -> bool:
    """Whether integers of 8 bits are added up along a whole row."""
    return spec.weight.dtype.name in ("int8", "uint8") and spec.weight.granularity.pattern(2)[1] == -1


def test_sums_of_experts_and_windows_beyond_int32() -> None:
    k = 140_032
    for name, spec in schemes().items():
        if spec.activation is None or spec.activation.dtype.is_floating_point or not is_long(spec):
            continue
        w = torch.ones(2, 8, k) * torch.tensor([1.0, -1.0]).reshape(2, 1, 1)
        experts = AffineQuantizedTensor.from_float(w, replace(spec, layout=None))
        for rows in (2, 40):
            y = functional.grouped_mm(torch.ones(rows, k), experts.mT, offs=torch.tensor([1, rows], dtype=torch.int32))
            wanted = torch.tensor([[k], *[[-k]] * (rows - 1)]).expand(rows, 8)
            assert torch.allclose(y, wanted.float(), rtol=0.2), name
    conv = nn.Sequential(nn.Conv1d(k // 4, 8, 4, bias=False))
    nn.init.ones_(conv[0].weight)
    quantize_(conv, {"0": int8_dynamic_activation_int8_weight()})
    assert torch.allclose(conv(torch.ones(2, k // 4, 6)), torch.tensor(float(k)), rtol=0.01)


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
