"""Every registered kernel of `linear` against the reference, on every scheme and layout that it accepts.

A new kernel, layout, recipe or number format is covered here by itself.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, int8_dynamic_activation_int8_weight, quantize_
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library, variants
from qtorch.kernels.linear import reference
from qtorch.kernels.registry import REFERENCE, Kernel, Problem, kernels
from qtorch.primitives import PerGroup, PerRow, QuantSpec, compute_error
from tests import fast_part, rounding
from tests.kernels.every_scheme import in_every_layout, schemes, weights_of_every_scheme

ASYMMETRIC = MappingType.ASYMMETRIC
LEAST = {torch.float32: 105, torch.float16: 50, torch.bfloat16: 38}
"""SQNR in dB of a product whose sums are taken in another order."""

KERNELS = [k for k in kernels("linear") if k.priority != REFERENCE and k.device in (None, "cpu")]


@pytest.mark.parametrize("dtype", fast_part.matrix_but((torch.float32, torch.bfloat16), LEAST))
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
            assert compute_error(expected, y) > LEAST[dtype], name


def first_weight(kernel: Kernel) -> AffineQuantizedTensor:
    """One that the kernel takes."""
    for _, weight in weights_of_every_scheme(torch.float32):
        if kernel.rejects(Problem("linear", weight.scheme, torch.float32, "cpu")) is None:
            return weight
    pytest.skip("takes no such weight")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_shapes_of_inputs(kernel: Kernel) -> None:
    weight, bias = first_weight(kernel), torch.randn(64)
    for shape in ((192,), (1, 192), (0, 192), (2, 1, 4, 192)):
        x = torch.randn(shape)
        y, wanted = kernel(x, weight, bias), reference.linear(x, weight, bias)
        assert y.shape == (*shape[:-1], 64)
        rounding.assert_same_product(y, wanted, x, weight.dequantize(), bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8 row", "uint4 float zero", "int8, int8", "int4 group, int8"])
def test_one_graph_for_every_number_of_rows(name: str, torch_kernels: None) -> None:
    for _, weight in in_every_layout(name, schemes()[name]):
        torch.compiler.reset()
        run = lambda x, weight=weight: functional.linear(x, weight) * 2  # noqa: E731
        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (7, 3, 100):
                x = torch.randn(rows, 192)
                torch.testing.assert_close(compiled(x), run(x))


def test_transposed_and_slices() -> None:
    """What the gradient of the input, and experts stored (K, N), need; of codes packed along the other axis, too."""
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.randn(7, 64, dtype=dtype)
        for name, weight in weights_of_every_scheme(dtype):
            if weight.scheme.activation is None and weight.scheme.layout.name != "portable":
                wanted = grad.float() @ weight.dequantize(torch.float32)
                y = (grad @ weight).float()
                assert compute_error(wanted, y) > LEAST[dtype] or not (wanted.any() or y.any()), name
    # 5 slices, the last one shorter, each with its own scales; of rows, and of columns.
    spec, values = LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC)), torch.randn(2100, 2048)
    x, grad = torch.randn(3, 2048), torch.randn(3, 2100)
    for name, weight in in_every_layout("uint4 group", spec, values=values):
        dense, problem = weight.dequantize(), Problem("linear", weight.scheme, torch.float32, "cpu")
        for kernel in KERNELS:
            if kernel.rejects(problem) is None:
                rounding.assert_same_product(kernel(x, weight, None), functional.linear(x, dense), x, dense)
        if "portable" not in name:
            rounding.assert_same_product(grad @ weight, grad @ dense, grad, dense.t())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("sign", ["", "u"])
def test_codes_of_every_width_with_int8_activations(sign: str, bits: int) -> None:
    x, token = torch.randn(5, 192), QuantSpec("int8", PerRow(), ASYMMETRIC)
    specs = [LinearSpec(QuantSpec(f"{sign}int{bits}", block, ASYMMETRIC), token) for block in (PerRow(), PerGroup(32))]
    for name, weight in itertools.chain(*(in_every_layout("", spec) for spec in specs)):
        wanted, problem = reference.linear(x, weight, None), Problem("linear", weight.scheme, torch.float32, "cpu")
        for kernel in KERNELS:
            if kernel.rejects(problem) is None:
                assert torch.equal(kernel(x, weight, None), wanted), (name, kernel.name)


@pytest.mark.parametrize("k", fast_part.matrix_but((140_032,), (140_032, 270_336)))
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
    conv = torch.nn.Sequential(torch.nn.Conv1d(k // 4, 8, 4, bias=False))
    torch.nn.init.ones_(conv[0].weight)
    quantize_(conv, {"0": int8_dynamic_activation_int8_weight()})
    assert torch.allclose(conv(torch.ones(2, k // 4, 6)), torch.tensor(float(k)), rtol=0.01)


def test_no_kernel_is_left_out() -> None:
    taken = set()
    for dtype in (torch.float32, torch.bfloat16):
        for _, weight in weights_of_every_scheme(dtype):
            taken |= {k.name for k in KERNELS if k.rejects(Problem("linear", weight.scheme, dtype, "cpu")) is None}
    # Kernels of other tensor types, and of transposes, have tests of their own.
    missing = {k.name for k in KERNELS} - taken
    if compiled_library.missing() is not None:
        missing -= {k.name for k in KERNELS if k.name.startswith("cpu_")}
    assert missing <= {"lut_weight_mm", "cpu_lut_mm", "cpu_transposed_mm", "cpu_transposed_lut_mm"}


EMBEDDINGS = [k for k in kernels("embedding") if k.priority != REFERENCE and k.device in (None, "cpu")]


@pytest.mark.parametrize("kernel", EMBEDDINGS, ids=lambda kernel: kernel.name)
def test_embeddings_are_rows_of_the_dequantized_table(kernel: Kernel) -> None:
    """Of any shape, none among them."""
    ids = torch.randint(0, 64, (4, 7))
    for dtype in (torch.float32, torch.bfloat16):
        for name, weight in weights_of_every_scheme(dtype):
            if kernel.rejects(Problem("embedding", weight.scheme, dtype, "cpu")) is None:
                with record_kernels() as ran:
                    rows = kernel(ids, weight)
                assert ran[0] == f"embedding:{kernel.name}"
                assert torch.equal(rows, functional.embedding(ids, weight.dequantize())), name
                assert kernel(ids[:0], weight).shape == (0, 7, 192)
