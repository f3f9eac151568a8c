"""Products with vectors in bytes: every variant on every machine's library, sizes, dtypes, files and models."""

import pytest
import torch
from torch import nn

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PerRow, compute_error
from qtorch.kernels.cpu import compiled_library, variants
from qtorch.kernels.linear import reference
from qtorch.primitives.layouts import VectorCodebookLayout
from qtorch.primitives.vector_spec import RotatedVectorSpec, VectorSpec, codebook_arguments
from tests.kernels.test_every_kernel import LEAST

SIZES = [(64, 512, 256), (37, 1024, 128), (40, 352, -1), (5, 64, 32), (33, 24, 8), (7, 2048, -1), (1, 128, 128)]
COMPILED = ("fixed", "dot", "tile", "float")
needs_library = pytest.mark.skipif(compiled_library.missing() is not None, reason="the compiled kernels are missing")


def weight_of(n, k, group, dtype, kind=RotatedVectorSpec):
    granularity = PerRow() if group == -1 else PerGroup(group)
    spec = kind(granularity=granularity, scale_dtype=torch.bfloat16, **codebook_arguments())
    return AffineQuantizedTensor.from_float(
        torch.randn(n, k).to(dtype) * torch.rand(n, 1).to(dtype), LinearSpec(spec, layout=VectorCodebookLayout())
    )


@needs_library
@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize("dtype", LEAST)
def test_compiled(dtype, variant):
    for n, k, group in SIZES:
        for kind in (RotatedVectorSpec, VectorSpec):
            weight, bias = weight_of(n, k, group, dtype, kind), torch.randn(n).to(dtype)
            for rows in (1, 2, 3, 4, 5, 20):
                x = torch.randn(rows, k).to(dtype)
                with variants.force(variant), qtorch.kernels.record_kernels() as ran:
                    y = nn.functional.linear(x, weight, bias)
                name = f"cpu_vector_codebook_mm.{compiled_library.library().instruction_set}.{variant}"
                assert ran == ["linear:cpu_vector_codebook_mm", "cpu_vector_codebook_mm", name]
                wanted = reference.linear(x, weight, bias)
                assert y.dtype == dtype
                assert compute_error(wanted, y) > LEAST[dtype], (n, k, group, kind, rows)
                with variants.force(variant):  # the call that checks little
                    assert torch.equal(nn.functional.linear(x, weight, bias), y)


@needs_library
def test_rows_that_fixed_point_does_not_hold():
    """Rows of one large number, of zeros, of huge numbers, and what is not finite: no row changes another."""
    weight = weight_of(24, 512, -1, torch.float32, VectorSpec)
    x = torch.randn(4, 512)
    x[0, 3], x[1], x[2] = 1e7, 0, x[2] * 1e30
    with variants.force("fixed"):
        for rows in (x, x[:1], x[1:2], x[2:3]):
            y, wanted = nn.functional.linear(rows, weight), reference.linear(rows, weight, None)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
        x[0, 5], x[2, 7] = float("nan"), float("inf")
        for rows in (x[:1], x[2:3], x):
            y = nn.functional.linear(rows, weight)
            finite = rows.isfinite().all(1)
            assert torch.equal(y.isfinite().all(1), finite)
            assert not y[~finite].isfinite().any()
            torch.testing.assert_close(y[finite], reference.linear(rows[finite], weight, None), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("dtype", LEAST)
def test_in_torch(dtype):
    """The weight, and its transpose, of which a gradient is made."""
    for n, k, group in SIZES:
        for kind in (RotatedVectorSpec, VectorSpec):
            w, x = weight_of(n, k, group, dtype, kind), torch.randn(5, k).to(dtype).requires_grad_()
            with qtorch.kernels.record_kernels() as ran:
                y = nn.functional.linear(x, w)
                y.sum().backward()
            kernel = "linear:vector_codebook_mm"
            assert [name for name in ran if "linear" in name] == [kernel, kernel]
            assert compute_error(reference.linear(x, w, None), y) > LEAST[dtype]
            assert compute_error(w.dequantize(torch.float32).sum(0).expand(5, -1), x.grad.float()) > LEAST[dtype] - 10


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Embedding(32, 64), torch.tensor([[3, 1, 31]])),
        (nn.Conv2d(16, 8, 3), torch.randn(2, 16, 6, 5)),
        (nn.Linear(64, 32, dtype=torch.float16), torch.randn(2, 64, dtype=torch.float16)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers(layer, x, tmp_path):
    """As their dequantized weights."""
    layer = layer.requires_grad_(False)
    qtorch.quantize_(layer, {"weight": qtorch.vector_codebook_weight_only()})
    y = layer(x)
    qtorch.save_quantized(layer, tmp_path / "layer.safetensors")
    qtorch.load_quantized(layer, tmp_path / "layer.safetensors")
    assert torch.equal(layer(x), y)
    qtorch.dequantize_(layer)
    assert compute_error(layer(x), y) > LEAST[y.dtype]


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="vectors of 4 do not divide"):
        qtorch.quantize_(nn.Linear(6, 8), qtorch.vector_codebook_weight_only())
    padded = nn.Linear(70, 8)
    qtorch.quantize_(padded, qtorch.vector_codebook_weight_only(32), on_misfit="pad")
    x = torch.randn(2, 70)
    assert compute_error(nn.functional.linear(x, padded.weight.dequantize(), padded.bias), padded(x)) > 100
    with pytest.raises(ValueError, match="rotates blocks, which is not trained"):
        qtorch.quantize_(nn.Linear(64, 8), qtorch.training.qat(qtorch.vector_codebook_weight_only()))
