"""Which kernel of `linear` runs for a scheme, and its error; the semi-sparse layout. test_every_kernel.py has more."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, MappingType, PerBlock, PerGroup, PerRow, PerTensor, PlainLayout, QuantSpec
from qtorch import SemiSparseLayout as SemiSparse
from qtorch.kernels import features, record_kernels
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.int8_grouped_mm import int8_sums
from qtorch.kernels.ops.weight_only_mm import slice_length
from qtorch.primitives import LinearSpec, ZeroPointDomain, compute_error, prune_2_4
from tests.kernels.quantized_weights import ASYMMETRIC_TOKEN, TOKEN

pytestmark = pytest.mark.usefixtures("torch_kernels")

# The kernels made of torch operators; tests/kernels/cpu has the compiled ones.

INT8 = QuantSpec("int8", quant_min=-127)
TILE = QuantSpec("int8", PerBlock((8, 16)), quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", zero_point_domain=ZeroPointDomain.NONE)
FLOAT4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=ZeroPointDomain.NONE)
ASYMMETRIC = MappingType.ASYMMETRIC
REAL_ZERO = QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
OFFSET = replace(REAL_ZERO, zero_point_domain=ZeroPointDomain.OFFSET)

# name: (spec, kernel for fp32 on CPU, SQNR of the layer's output in dB: at least, at most)
SCHEMES = {
    "int8 row": (LinearSpec(INT8), "weight_only_mm", 38, 50),
    "int8 tensor": (LinearSpec(QuantSpec("int8", PerTensor())), "weight_only_mm", 32, 46),
    "uint8 row": (LinearSpec(QuantSpec("uint8", PerRow(), ASYMMETRIC)), "weight_only_mm", 38, 52),
    "uint4 group": (LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC)), "weight_only_mm", 18, 26),
    "int3 group": (LinearSpec(QuantSpec("int3", PerGroup(16))), "weight_only_mm", 11, 20),
    "uint4 float zero": (LinearSpec(REAL_ZERO), "weight_only_mm", 18, 26),
    "uint4 offset": (LinearSpec(OFFSET), "weight_only_mm", 18, 26),
    "uint4 fractional zero": (
        LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FRACTIONAL)), "weight_only_mm", 18, 26,
    ),
    "int4 block": (LinearSpec(QuantSpec("int4", PerBlock((8, 16)))), "weight_only_mm", 14, 24),
    "float8 row": (LinearSpec(FLOAT8), "weight_only_mm", 26, 36),
    "float4 group": (LinearSpec(FLOAT4.with_granularity(PerGroup(32))), "weight_only_mm", 16, 24),
    "float4 group, float8 scales": (
        LinearSpec(replace(FLOAT4, scale_spec=FLOAT8.with_granularity(PerTensor()))), "weight_only_mm", 16, 24,
    ),
    "float8, float8": (LinearSpec(FLOAT8, FLOAT8), "emulated_scaled_mm", 25, 33),
    "int8, int8": (LinearSpec(INT8, TOKEN), "int8_scaled_mm", 35, 48),
    "int8, int8 tensor": (LinearSpec(INT8, QuantSpec("int8", PerTensor())), "int8_scaled_mm", 33, 46),
    "int8, int8 asymmetric": (LinearSpec(INT8, QuantSpec("int8", PerRow(), ASYMMETRIC)), "int8_scaled_mm", 35, 48),
    "int4 group, int8": (LinearSpec(QuantSpec("int4", PerGroup(32)), TOKEN), "int8_scaled_mm", 16, 26),
    "uint4 group, int8 asymmetric": (
        LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), QuantSpec("int8", PerRow(), ASYMMETRIC)),
        "int8_scaled_mm",
        17,
        27,
    ),
    "int8 tile, int8 tile": (LinearSpec(TILE, TILE), "int8_block_mm", 35, 48),
    "int8 row, int8 group": (LinearSpec(INT8, TILE.with_granularity(PerGroup(16))), "int8_block_mm", 35, 48),
    "uint8 row, int8": (LinearSpec(QuantSpec("uint8", PerRow(), ASYMMETRIC), TOKEN), "int8_scaled_mm", 35, 50),
}  # fmt: skip


def layer(spec: LinearSpec, dtype: torch.dtype = torch.float32, n: int = 40, k: int = 96):
    """(input, float weight, quantized weight, bias), of odd sizes in the batch."""
    weight, x = torch.randn(n, k, dtype=dtype), torch.randn(3, 5, k, dtype=dtype)
    return x, weight, AffineQuantizedTensor.from_float(weight, spec), torch.randn(n).to(dtype)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_and_the_error(name, dtype):
    spec, kernel, at_least, at_most = SCHEMES[name]
    x, weight, quantized, bias = layer(spec, dtype)
    with record_kernels() as ran:
        y = functional.linear(x, quantized, bias)
    assert [name for name in ran if name.startswith("linear:")] == [ran[0]]
    assert ran[0] == f"linear:{kernel}" or (dtype != torch.float32 and ran[0] == "linear:int8_weight_mm")
    assert y.dtype == dtype
    error = compute_error(functional.linear(x.float(), weight.float(), bias.float()), y)
    assert min(at_least, 38) - 1 < error < at_most + 1


@pytest.mark.parametrize("name", ["int8, int8", "int4 group, int8", "uint4 group, int8 asymmetric"])
def test_integer_results_do_not_depend_on_the_processor(name, monkeypatch):
    """A scale per row: one product in int32. Groups: exact products in fp32, inside the operator."""
    x, _, quantized, bias = layer(SCHEMES[name][0], k=2080)
    results = []
    # Without 8-bit dot products torch._int_mm saturates, so it is not to be forced where they are not.
    for vnni in (features.cpu_has("vnni"), False):
        monkeypatch.setattr(features, "cpu_has", lambda feature, vnni=vnni: vnni)
        with record_kernels() as ran:
            results.append(functional.linear(x, quantized, bias))
        assert ran[1] == ("int_matmul" if name == "int8, int8" else "int8_grouped_mm")
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("rows, packed_with_bf16", [(1, True), (16, True), (17, False), (200, False)])
def test_int8_weight_mm_chooses_by_rows_and_processor(dtype, has_bf16, rows, packed_with_bf16, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: has_bf16)
    weight = torch.randn(40, 96, dtype=dtype)
    quantized = AffineQuantizedTensor.from_float(weight, INT8)
    x = torch.randn(rows, 96, dtype=dtype)
    with record_kernels() as ran:
        y = functional.linear(x, quantized)
    packed = packed_with_bf16 or not has_bf16
    assert ran == ["linear:int8_weight_mm", "int8_weight_mm", "int8_weight_mm.int8pack" if packed else "weight_only_mm"]
    error = compute_error(reference.linear(x, quantized, None), y)
    assert (40 if dtype == torch.bfloat16 else 55) < error < 90


@pytest.mark.parametrize(("block", "limit", "want"), [
    (1, 292, 256), (1, 128, 128), (1, 127, 127), (1, 0, 1), (32, 292, 256), (32, 100, 96), (100, 292, 200),
    (300, 292, 300),
])  # fmt: skip
def test_slices_are_whole_blocks_and_even_where_there_is_room(block, limit, want):
    for dtype in (torch.float32, torch.bfloat16):
        assert slice_length(torch.empty(2, 64, dtype=dtype), 64, block, limit * 64 * dtype.itemsize) == want


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
    x, sparse, _ = pair(INT8, INTEGER_ACTIVATIONS[1])
    x[1, 7] = torch.inf
    assert functional.linear(x, sparse).isfinite().all(1).tolist() == [True, False, True, True, True]


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
    assert (sparse.qdata.shape, sparse.qdata.dtype) == ((64, 80), spec.dtype.storage)
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


def test_sums_of_codes_less_zero_points():
    """Both sides may have zero points; those of unsigned codes are shifted with the codes."""
    xq, xz = torch.randint(-128, 128, (3, 40), dtype=torch.int8), torch.tensor([[-128], [5], [127]], dtype=torch.int32)
    for kind, low in ((torch.int8, -128), (torch.uint8, 0)):
        wq, wz = (
            torch.randint(low, low + 256, (4, 40)).to(kind),
            torch.randint(low, low + 256, (4, 1), dtype=torch.int32),
        )
        for of_x, of_w in itertools.product((None, xz), (None, wz)):
            x, w = (q.long() - (0 if z is None else z.long()) for q, z in ((xq, of_x), (wq, of_w)))
            assert torch.equal(int8_sums(xq, of_x, wq, of_w).long(), x @ w.t())
