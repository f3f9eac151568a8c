"""The compiled layers of int8 activations: the bits of the reference, in every build that this machine runs."""

import functools

import pytest
import torch
from torch.nn import functional

from qtorch import (
    AffineQuantizedTensor,
    LinearSpec,
    MappingType,
    PackedLayout,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    PlainLayout,
    QuantSpec,
    int8_dynamic_activation_int8_weight,
    quantize_,
)
from qtorch.dtypes.linear import multiply
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library, int8_linear, variants
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm
from qtorch.primitives.layouts.packed import pack_codes
from qtorch.primitives.qdtype import qdtype
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY

ASYMMETRIC = MappingType.ASYMMETRIC
ACTIVATIONS = {
    "symmetric": QuantSpec("int8", PerToken(), quant_min=-127),
    "asymmetric": QuantSpec("int8", PerToken(), ASYMMETRIC),
    "narrow": QuantSpec("int8", PerToken(), ASYMMETRIC, quant_min=-100, quant_max=99),
    "tensor": QuantSpec("int8", PerTensor()),
}
WEIGHTS = {
    "int8 row": QuantSpec("int8", quant_min=-127),
    "int8 row asymmetric": QuantSpec("int8", PerRow(), ASYMMETRIC),
    "uint8 group": QuantSpec("uint8", PerGroup(64), ASYMMETRIC),
    "int4 group": QuantSpec("int4", PerGroup(32)),
    "uint4 group": QuantSpec("uint4", PerGroup(96), ASYMMETRIC),
    "int3 row": QuantSpec("int3", PerRow()),
    "uint4 group 64": QuantSpec("uint4", PerGroup(64), ASYMMETRIC),
    "int4 group 128": QuantSpec("int4", PerGroup(128)),
    "int4 long group": QuantSpec("int4", PerGroup(1536)),
}
SHAPES = {True: [(37, 192), (70, 1152), (9, 4608)], False: [(5, 77), (33, 130), (6, 5029)]}


@functools.cache
def cases(name, activation):
    """(weight, x, the result of the reference, which takes long)"""
    spec, made = WEIGHTS[name], []
    for n, k in SHAPES[isinstance(spec.granularity, PerGroup)]:
        if k % getattr(spec.granularity, "group_size", 1):
            continue
        layout = PlainLayout() if spec.dtype.bits == 8 else PackedLayout()
        linear_spec = LinearSpec(spec, ACTIVATIONS[activation], layout=layout)
        weight = AffineQuantizedTensor.from_float(torch.randn(n, k), linear_spec)
        for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (8, torch.float16), (17, torch.float32)):
            x = (torch.randn(rows, k) + 0.3).to(dtype)
            made.append((weight, x, reference.linear(x, weight, None)))
    return made


@pytest.mark.parametrize("variant", ["dot", "tile", "channels"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("build", BUILDS)
def test_the_bits_of_the_reference(build, name, activation, variant):
    for weight, x, wanted in cases(name, activation):
        with compiled_library.use(build), variants.force(variant), record_kernels() as ran:
            y = multiply(x, weight)
        assert ran[-1] == f"cpu_int8_mm.{build}.{variant}"
        assert torch.equal(y, wanted)


@functools.cache
def many_rows():
    """(weight, x, the result of the reference)"""
    spec = LinearSpec(WEIGHTS["int4 group"], ACTIVATIONS["asymmetric"], layout=PackedLayout())
    weight = AffineQuantizedTensor.from_float(torch.randn(50, 96), spec)
    x = torch.randn(600, 96)
    return weight, x, reference.linear(x, weight, None)


@pytest.mark.parametrize("variant", ["dot", "tile", "channels"])
@pytest.mark.parametrize("build", BUILDS)
def test_every_number_of_rows(build, variant):
    weight, x, expected = many_rows()
    with compiled_library.use(build), variants.force(variant):
        for rows in (*range(20), 31, 32, 33, 63, 64, 65, 255, 300, 512, 513, 600):
            assert torch.equal(functional.linear(x[:rows], weight), expected[:rows])


@pytest.mark.parametrize("build", BUILDS)
def test_the_largest_codes(build):
    """Instructions that saturate would be wrong here."""
    spec = LinearSpec(QuantSpec("int8"), ACTIVATIONS["symmetric"])
    signs = torch.randint(0, 2, (40, 4096)) * 2.0 - 1
    weight = AffineQuantizedTensor.from_float(signs[:33], spec)
    x = signs[20:38]
    for variant in ("dot", "tile"):
        with compiled_library.use(build), variants.force(variant):
            assert torch.equal(functional.linear(x, weight), reference.linear(x, weight, None))


@pytest.mark.parametrize("name", ["int4 group", "uint4 group", "int4 group 128", "int4 long group"])
@pytest.mark.parametrize("build", BUILDS)
def test_short_groups_take_channels(build, name):
    """Weights whose sums "channels" makes, and no others, have it in the tables; matrix tiles have their own."""
    spec = LinearSpec(WEIGHTS[name], ACTIVATIONS["asymmetric"], layout=PackedLayout())
    weight = AffineQuantizedTensor.from_float(torch.randn(33, 1536), spec)
    with compiled_library.use(build), record_kernels() as ran:
        y = multiply(torch.randn(5, 1536), weight)
    assert y.shape == (5, 33)
    assert ran[-1].startswith(f"cpu_int8_mm.{build}.")
    assert ran[-1].endswith(".channels") == (name != "int4 long group" and build != "amx")


@pytest.mark.parametrize("columns", [32, 192, 1376, 2080])
@pytest.mark.parametrize("activation", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("build", BUILDS)
def test_channels_with_the_largest_codes(build, activation, columns):
    """Sums of products of 4-bit codes are kept in 16 bits for a while; groups end within vectors and runs of codes; the
    bits of the scales in memory, and channels that do not fill a vector."""
    for kind, code in (("uint4", 15), ("int4", -8)):
        zero = torch.full((37, columns // 32), 15 - code, dtype=torch.int32) if kind == "uint4" else None
        codes = torch.full((37, columns), code, dtype=torch.uint8 if kind == "uint4" else torch.int8)
        scale = torch.rand(37, columns // 32).bfloat16()
        xq = torch.tensor([-128, 127] * 3, dtype=torch.int8).unsqueeze(1).repeat(1, columns)
        xs = torch.rand(6, 1)
        xz = torch.tensor([-128, 127, 127, -128, 0, 5], dtype=torch.int32).unsqueeze(1)
        xz = xz if activation == "asymmetric" else None
        packed = pack_codes(codes, qdtype(kind))
        with compiled_library.use(build), variants.force("channels"), record_kernels() as ran:
            y = int8_linear.cpu_int8_mm(xq, xs, xz, [], packed, 37, scale, zero, True, kind, torch.float32, None)
        assert ran[-1] == f"cpu_int8_mm.{build}.channels"
        assert torch.equal(y, int8_grouped_mm(xq, xs, xz, codes, scale, zero, torch.float32))


@pytest.mark.parametrize("variant", ["dot", "tile", "torch"])
@pytest.mark.parametrize("build", BUILDS)
def test_bias(build, variant):
    """Added to the result in its dtype, as the reference does; of another dtype, it is promoted."""
    weight = AffineQuantizedTensor.from_float(
        torch.randn(70, 96), LinearSpec(QuantSpec("int8"), ACTIVATIONS["symmetric"])
    )
    bias = torch.randn(140)
    with compiled_library.use(build), variants.force(variant):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(9, 96).to(dtype)
            for b in (bias[:70].to(dtype), bias[::2].to(dtype), bias[:70]):
                assert torch.equal(multiply(x, weight, b), reference.linear(x, weight, b))


def test_static_activation():
    spec = LinearSpec(WEIGHTS["int8 row"], QuantSpec("int8", PerTensor()), static=True)
    weight = AffineQuantizedTensor.from_float(torch.randn(40, 96), spec, act_scale=torch.full((1, 1), 0.02))
    x = torch.randn(5, 96)
    assert torch.equal(functional.linear(x, weight), reference.linear(x, weight, None))


def test_zero_and_nan_inputs():
    for name in ("symmetric", "asymmetric"):
        weight = AffineQuantizedTensor.from_float(torch.randn(40, 96), LinearSpec(QuantSpec("int8"), ACTIVATIONS[name]))
        x = torch.zeros(3, 96)
        x[1, 4] = float("nan")
        y = functional.linear(x, weight)
        assert (y[[0, 2]] == 0).all()
        assert y[1].isnan().all(), "a NaN does not vanish in the integers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["symmetric", "asymmetric", "narrow"])
@pytest.mark.parametrize("build", BUILDS)
def test_quantization_of_rows(build, activation, dtype):
    """Rows of every magnitude, bit for bit as the primitives have it."""
    spec = ACTIVATIONS[activation]
    quantizer = int8_linear.row_quantizer(spec)
    x = (torch.randn(37, 131) * torch.logspace(-30, 3, 37).unsqueeze(1)).to(dtype)
    x[3], x[5], x[6] = 0, x[5].abs(), -x[6].abs()
    with compiled_library.use(build):
        codes, scale, zero_point = int8_linear.quantize_rows(x, list(quantizer))
    wanted_scale, wanted_zero_point = spec.choose_qparams(x)
    assert torch.equal(scale, wanted_scale)
    assert (zero_point is None) == (wanted_zero_point is None)
    assert zero_point is None or torch.equal(zero_point, wanted_zero_point.int())
    assert torch.equal(codes, spec.quantize(x, wanted_scale, wanted_zero_point))


def test_compiled_with_dynamic_shapes():
    spec = LinearSpec(WEIGHTS["int8 row"], ACTIVATIONS["symmetric"])
    weight = AffineQuantizedTensor.from_float(torch.randn(64, 128), spec)
    compiled = torch.compile(lambda x: functional.linear(x, weight), fullgraph=True, dynamic=True)
    for rows in (2, 5, 40):
        x = torch.randn(rows, 128)
        assert torch.equal(compiled(x), functional.linear(x, weight))


@NEEDS_LIBRARY
def test_operator_is_well_formed():
    codes, scale = torch.randint(-127, 128, (12, 32), dtype=torch.int8), torch.rand(12, 1)
    quantizer = list(int8_linear.row_quantizer(ACTIVATIONS["symmetric"]))
    arguments = (torch.randn(3, 32), None, None, quantizer, codes, 12, scale, None, False, "int8", torch.float32, None)
    torch.library.opcheck(torch.ops.qtorch.cpu_int8_mm.default, arguments)


@pytest.mark.parametrize("build", BUILDS)
def test_a_compiler_fuses_around_the_product_of_matrix_tiles(build):
    layer = torch.nn.Linear(64, 32).requires_grad_(False)
    quantize_(layer, int8_dynamic_activation_int8_weight())
    x = torch.randn(40, 64)
    with compiled_library.use(build):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        compiled(x)
        with record_kernels() as ran:
            y = compiled(x)
    assert ran[0] == ("int_matmul" if build == "amx" else "cpu_int8_mm")
    torch.testing.assert_close(y, layer(x))
