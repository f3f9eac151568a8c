"""Linear on the semi-sparse layout: the bits of the plain one with int8 activations, transposed weights, operators."""

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, PerBlock, PerGroup, PerRow, PerTensor, PlainLayout
from qtorch import SemiSparseLayout as SemiSparse
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import QuantSpec, ZeroPointDomain, compute_error, prune_2_4
from tests.kernels.quantized_weights import ASYMMETRIC_TOKEN, TOKEN

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

INT8 = QuantSpec("int8", quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", zero_point_domain=ZeroPointDomain.NONE)
INTEGER_ACTIVATIONS = [TOKEN, QuantSpec("int8", PerTensor()), ASYMMETRIC_TOKEN]


def pair(spec: QuantSpec, activation: QuantSpec | None = None, dtype: torch.dtype = torch.float32, k: int = 90):
    """(input, semi-sparse weight, the same in the plain layout)."""
    weight = prune_2_4(torch.randn(44, k, dtype=dtype))
    sparse = AffineQuantizedTensor.from_float(weight, LinearSpec(spec, activation, layout=SemiSparse()))
    return torch.randn(5, k, dtype=dtype), sparse, sparse.to_layout(PlainLayout())


def test_static_int8_activations():
    weight, x = prune_2_4(torch.randn(44, 90)), torch.randn(5, 90)
    spec = LinearSpec(INT8, INTEGER_ACTIVATIONS[1], static=True, layout=SemiSparse())
    sparse = AffineQuantizedTensor.from_float(weight, spec, act_scale=torch.full((1, 1), 0.03))
    with record_kernels() as ran:
        y = functional.linear(x, sparse)
    assert ran[0] == "linear:semi_sparse_int8_scaled_mm"
    assert torch.equal(y, reference.linear(x, sparse, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
@pytest.mark.parametrize("weight", [FLOAT8, INT8], ids=str)
def test_float8_activations(weight, granularity, dtype):
    x, sparse, plain = pair(weight, FLOAT8.with_granularity(granularity), dtype)
    with record_kernels() as ran:
        y = functional.linear(x, sparse)
    assert ran == ["linear:emulated_semi_sparse_mm", "semi_sparse_weight_mm"]
    assert torch.equal(y, functional.linear(x, plain))
    assert compute_error(reference.linear(x, sparse, None), y) > (45 if dtype == torch.bfloat16 else 110)
    assert 25 < compute_error(functional.linear(x, plain.dequantize()), y) < 36, "the activation is quantized"


def cusparselt_in_plain_torch(monkeypatch):
    """The three calls of cuSPARSELt as their documentation has them, the compressed form one of our own: the kernel's
    padding, transposition and scales are then run here too."""
    kept = {}

    def compress(codes):
        n, k = codes.shape
        assert n % 32 == k % 32 == 0
        compressed = torch.randint(-8, 8, (n * k * 10 // 16,)).to(codes.dtype)
        kept[compressed.data_ptr()] = (codes.clone(), compressed)
        return compressed

    def multiply(compressed, dense, out_dtype):
        codes = kept[compressed.data_ptr()][0]
        assert dense.dtype == codes.dtype == compressed.dtype
        assert dense.shape[0] == codes.shape[1]
        assert dense.shape[1] % 16 == 0
        assert dense.shape[1] >= 16
        assert not dense.is_contiguous(), "B is column-major"
        return (codes.double() @ dense.double()).to(out_dtype)

    from qtorch.primitives.layouts import semi_sparse

    monkeypatch.setattr(torch, "_cslt_compress", compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(semi_sparse, "has_cusparselt", lambda codes: True)
    monkeypatch.setattr(SemiSparse, "packing", lambda self, device: "cusparselt")


@pytest.mark.parametrize("rows", [0, 1, 16, 17])
@pytest.mark.parametrize("spec", [
    INT8, FLOAT8, FLOAT8.with_granularity(PerBlock((4, -1))), QuantSpec("int8", PerGroup(30))
], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", [*INTEGER_ACTIVATIONS, FLOAT8, None], ids=str)
def test_the_branches_for_cusparselt(spec, activation, rows, monkeypatch):
    if spec.dtype is FLOAT8.dtype and activation in INTEGER_ACTIVATIONS:
        pytest.skip("no such kernel on any device")
    cusparselt_in_plain_torch(monkeypatch)
    _, sparse, _ = pair(spec, activation)
    assert (sparse.qdata.shape, sparse.qdata.dtype) == ((64, 60), spec.dtype.storage)
    x = torch.randn(rows, 90)
    with record_kernels() as ran:
        y = functional.linear(x, sparse)
    fast = (spec is INT8 and activation in INTEGER_ACTIVATIONS[:2]) or (spec is FLOAT8 and activation is FLOAT8)
    assert "semi_sparse" in ran[0]
    assert ("cusparselt_mm" in ran) == fast
    wanted = reference.linear(x, sparse, None)
    if activation in INTEGER_ACTIVATIONS:
        assert torch.equal(y, wanted)
    else:
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, n, k", [(1, 44, 90), (17, 256, 512), (300, 1024, 768)])
@pytest.mark.parametrize("spec, activation", [(INT8, INTEGER_ACTIVATIONS[0]), (FLOAT8, FLOAT8)], ids=["int8", "float8"])
def test_on_cuda(spec, activation, m, n, k, dtype):
    weight = prune_2_4(torch.randn(n, k, dtype=dtype))
    sparse = AffineQuantizedTensor.from_float(weight, LinearSpec(spec, activation, layout=SemiSparse())).cuda()
    x = torch.randn(m, k, dtype=dtype).cuda()
    with record_kernels() as ran:
        y = functional.linear(x, sparse)
    if torch.backends.cusparselt.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        assert "cusparselt_mm" in ran
    expected = reference.linear(x, sparse, None)
    if spec is INT8:
        assert torch.equal(y, expected)
    else:
        # Tensor cores add up float8 products with some 14 bits.
        assert compute_error(expected, y) > 38
    grad = torch.randn(m, n, dtype=dtype).cuda()
    assert compute_error(grad.float() @ sparse.dequantize(torch.float32), grad @ sparse.with_activation(None)) > 38
