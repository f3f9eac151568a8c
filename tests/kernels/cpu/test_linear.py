"""The compiled linear layers, in every build and variant: weight-only ones against exact arithmetic; those of int8
activations have the bits of the reference."""

import functools
import itertools

import pytest
import torch
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PackedLayout, PerGroup, PerRow, PerToken, PlainLayout
from qtorch.dtypes.linear import multiply
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import int8_linear, variants, weight_only
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm
from qtorch.primitives import PerTensor, QuantSpec, ZeroPointDomain, compute_error, qdtype
from tests import fast_part, rounding
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, TOKEN, weight_of

REAL_ZERO = {"mapping": ASYMMETRIC, "zero_point_domain": ZeroPointDomain.FLOAT, "preserve_zero": False}
OFFSET = {**REAL_ZERO, "zero_point_domain": ZeroPointDomain.OFFSET}
FRACTIONAL = {"mapping": ASYMMETRIC, "zero_point_domain": ZeroPointDomain.FRACTIONAL}
SPECS = {
    "int8 row": QuantSpec("int8", quant_min=-127),
    "int8 tensor": QuantSpec("int8", PerTensor()),
    "int8 group": QuantSpec("int8", PerGroup(32), ASYMMETRIC),
    "uint8 row": QuantSpec("uint8", PerRow(), ASYMMETRIC),
    "uint8 no zero point": QuantSpec("uint8", PerRow(), zero_point_domain=ZeroPointDomain.NONE),
    "uint4 group 128": QuantSpec("uint4", PerGroup(128), ASYMMETRIC),
    "uint4 group 32, real zero": QuantSpec("uint4", PerGroup(32), **REAL_ZERO),
    "uint4 narrow, real zero": QuantSpec("uint4", PerGroup(64), **REAL_ZERO, quant_max=12),
    "uint4 group 32, offset": QuantSpec("uint4", PerGroup(32), **OFFSET),
    "int5 row, offset": QuantSpec("int5", PerRow(), ASYMMETRIC, ZeroPointDomain.OFFSET),
    "uint8 group 32, offset": QuantSpec("uint8", PerGroup(32), **OFFSET),
    "uint4 group 64, fractional": QuantSpec("uint4", PerGroup(64), **FRACTIONAL),
    "int8 row, fractional": QuantSpec("int8", PerRow(), **FRACTIONAL),
    "int4 row": QuantSpec("int4", PerRow()),
    "int4 group 10": QuantSpec("int4", PerGroup(10)),
    **{f"int{bits}": QuantSpec(f"int{bits}", PerGroup(64)) for bits in (2, 3, 5, 6, 7)},
    **{f"uint{bits}": QuantSpec(f"uint{bits}", PerRow(), ASYMMETRIC) for bits in (1, 2, 3, 5, 6, 7)},
}
STAND_FOR_THE_OTHERS = ("int8 row", "uint4 group 32, real zero", "int5 row, offset", "int4 group 10", "uint3", "int6")
# Weights of layers with int8 activations, whose reference takes long: with long groups and short ones.
OF_CODES = {
    "int8 row": SPECS["int8 row"],
    "int8 row asymmetric": QuantSpec("int8", PerRow(), ASYMMETRIC),
    "uint8 group": QuantSpec("uint8", PerGroup(64), ASYMMETRIC),
    "int4 group": QuantSpec("int4", PerGroup(32)),
    "uint4 group": QuantSpec("uint4", PerGroup(96), ASYMMETRIC),
    "int3 row": QuantSpec("int3", PerRow()),
    "int4 group 128": QuantSpec("int4", PerGroup(128)),
    "int4 long group": QuantSpec("int4", PerGroup(1536)),
}
ACTIVATIONS = {
    "symmetric": TOKEN,
    "asymmetric": ASYMMETRIC_TOKEN,
    "narrow": QuantSpec("int8", PerToken(), ASYMMETRIC, quant_min=-100, quant_max=99),
    "tensor": QuantSpec("int8", PerTensor()),
    None: None,
}
# (N, K): of groups, odd in N and in the bytes of a packed run, but for the last ones; of rows, odd in both.
SHAPES = {True: [(37, 128), (70, 960), (1, 1280), (9, 1536), (6, 1024)], False: [(5, 77), (33, 1029), (70, 4), (1, 64)]}
SHAPES_OF_CODES = {True: [(37, 192), (70, 1152), (9, 4608)], False: [(5, 77), (33, 130), (6, 5029)]}
INPUTS = [(1, torch.float32), (3, torch.bfloat16), (8, torch.float16), (17, torch.float32), (37, torch.bfloat16)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# In bf16 the result is rounded, and matrix tiles round the weights too: half a unit, 2^-9, each.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
FLOAT_VARIANTS, CODE_VARIANTS = [*variants.VARIANTS, "float"], ["dot", "tile", "channels"]
every_activation = pytest.mark.parametrize("activation", [None, "asymmetric"])


def quantized(spec: QuantSpec, shape: tuple[int, int], activation: str | None = None) -> AffineQuantizedTensor:
    return weight_of(spec, shape, activation=ACTIVATIONS[activation])


def weights(spec: QuantSpec, dtype: torch.dtype = torch.float32) -> list[AffineQuantizedTensor]:
    """Weight-only ones, of codes with less than 8 bits in both layouts."""
    made, layouts = [], [PlainLayout(), PackedLayout()][: 1 + (spec.dtype.bits < 8)]
    for n, k in SHAPES[isinstance(spec.granularity, PerGroup)]:
        if k % getattr(spec.granularity, "group_size", 1) == 0:
            for layout in layouts:
                linear_spec = LinearSpec(spec, layout=layout)
                made.append(AffineQuantizedTensor.from_float(torch.randn(n, k).to(dtype), linear_spec))
    return made


def error(y: torch.Tensor, x: torch.Tensor, weight: AffineQuantizedTensor) -> float:
    """Largest error, relative to what the sums are made of."""
    exact = weight.scheme.weight.dequantize(*weight.plain()).double()
    scale = weight.scale.double()
    largest = 2.0 ** (weight.scheme.weight.dtype.bits - 1)
    size = (largest * scale).repeat_interleave(exact.shape[1] // scale.shape[1], 1).expand_as(exact)
    return float(((y.double() - x.double() @ exact.t()).abs() / (x.double().abs() @ size.t() + 1e-30)).max())


def tolerance(variant: str, dtype: torch.dtype, terms: int) -> float:
    """Of `error`. The order of our sums is that of the sources; torch's is its own, in F.linear, which takes a weight
    that is rounded to the dtype, too."""
    return 2 * TOLERANCE[dtype] + rounding.gamma(terms + rounding.EXTRA) if variant == "float" else TOLERANCE[dtype]


@pytest.mark.parametrize("variant", FLOAT_VARIANTS)
@pytest.mark.parametrize("name", fast_part.matrix_but(STAND_FOR_THE_OTHERS, SPECS))
def test_against_exact_arithmetic(build, name, variant):
    with variants.force(variant), record_kernels() as ran:
        for weight, (rows, dtype) in itertools.product(weights(SPECS[name]), INPUTS):
            x = torch.randn(rows, weight.shape[1]).to(dtype)
            y = multiply(x, weight)
            assert ran[-1] == f"cpu_weight_only_mm.{build}.{variant}"
            assert y.dtype == dtype
            assert error(y, x, weight) < tolerance(variant, dtype, weight.shape[1]), (weight, rows)


@functools.cache
def cases(name, activation):
    """(weight, x, the result of the reference, which takes long)"""
    spec, made = OF_CODES[name], []
    for n, k in SHAPES_OF_CODES[isinstance(spec.granularity, PerGroup)]:
        if k % getattr(spec.granularity, "group_size", 1) == 0:
            weight = quantized(spec, (n, k), activation)
            inputs = [(torch.randn(rows, k) + 0.3).to(dtype) for rows, dtype in INPUTS[:4]]
            made += [(weight, x, reference.linear(x, weight, None)) for x in inputs]
    return made


@pytest.mark.parametrize("variant", CODE_VARIANTS)
@pytest.mark.parametrize("activation", list(ACTIVATIONS)[:4])
@pytest.mark.parametrize("name", fast_part.matrix_but(("int8 row", "uint8 group", "int4 group", "int3 row"), OF_CODES))
def test_the_bits_of_the_reference(build, name, activation, variant):
    for weight, x, wanted in cases(name, activation):
        with variants.force(variant), record_kernels() as ran:
            y = multiply(x, weight)
        assert ran[-1] == f"cpu_int8_mm.{build}.{variant}"
        assert torch.equal(y, wanted)


@functools.cache
def many_rows(activation):
    """(weight, x, the result of the reference)"""
    weight, x = quantized(OF_CODES["int4 group"], (50, 160), activation), torch.randn(600, 160)
    return weight, x, reference.linear(x, weight, None)


@every_activation
@pytest.mark.parametrize("variant", FLOAT_VARIANTS)
def test_every_number_of_rows(build, variant, activation):
    if activation and variant not in CODE_VARIANTS:
        pytest.skip("x is in codes")
    weight, x, expected = many_rows(activation)
    with variants.force(variant):
        for rows in (*range(20), 31, 32, 33, 63, 64, 65, 255, 300, 512, 513, 600):
            y = functional.linear(x[:rows], weight)
            assert y.shape == (rows, 50)
            if activation:
                assert torch.equal(y, expected[:rows])
            elif rows:
                assert error(y, x[:rows], weight) < tolerance(variant, torch.float32, 160)


@pytest.mark.usefixtures("build")
def test_views_static_activations_and_small_numbers_beside_large_ones():
    weight = quantized(SPECS["int8 row"], (50, 96))
    wide, bias = torch.randn(9, 200), torch.randn(50)
    for x in (wide[:, 5:101], wide[::2, :96], torch.randn(96, 9).t(), wide[:1, :96].expand(7, 96)):
        torch.testing.assert_close(functional.linear(x, weight, bias), functional.linear(x.clone(), weight, bias))
    part = weight[3:20]
    assert error(functional.linear(wide[:, :96], part), wide[:, :96], part) < rounding.gamma(96 + rounding.EXTRA)
    # A column that no weight reads does not take the precision of the others, by one more slice or another variant.
    weight = torch.randn(40, 96)
    weight[:, 7] = 0
    weight = AffineQuantizedTensor.from_float(weight, SPECS["int8 row"])
    for outlier in (1e2, 1e4, 1e7):
        x = torch.randn(20, 96)
        y = functional.linear(x, weight)
        x[:, 7] = outlier
        with variants.force("fixed"):
            assert compute_error(y, functional.linear(x, weight)) > 100, outlier
    spec = LinearSpec(SPECS["int8 row"], ACTIVATIONS["tensor"], static=True)
    weight = AffineQuantizedTensor.from_float(torch.randn(40, 96), spec, act_scale=torch.full((1, 1), 0.02))
    x = torch.randn(5, 96)
    assert torch.equal(functional.linear(x, weight), reference.linear(x, weight, None))


@pytest.mark.parametrize("activation", [None, "symmetric"])
@pytest.mark.parametrize("variant", [*FLOAT_VARIANTS, "torch"])
@pytest.mark.usefixtures("build")
def test_bias(variant, activation):
    """Added to the result in its dtype, as the reference does; of another dtype, it is promoted."""
    if activation and variant not in (*CODE_VARIANTS, "torch"):
        pytest.skip("x is in codes")
    weight, bias = quantized(SPECS["int8 row"], (70, 96), activation), torch.randn(140)
    with variants.force(variant):
        for dtype in FLOATS:
            x = torch.randn(9, 96).to(dtype)
            for b in (bias[:70].to(dtype), bias[::2].to(dtype), bias[:70]):
                y = multiply(x, weight, b)
                assert y.dtype == torch.promote_types(dtype, b.dtype)
                if activation:
                    assert torch.equal(y, reference.linear(x, weight, b))
                else:  # within two roundings of the result
                    torch.testing.assert_close(y, multiply(x, weight) + b, rtol=0, atol=40 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", fast_part.matrix_but(STAND_FOR_THE_OTHERS, list(SPECS)[::2]))
def test_dequantized_slices(build, name, dtype, monkeypatch):
    """The numbers are those of `dequantize`, whatever the size of a slice."""
    for weight in weights(SPECS[name]):
        n, k = weight.shape
        if k > 200:
            continue
        identity, wanted = torch.eye(k, dtype=dtype), weight.dequantize(dtype)
        for rows in (16, n):
            monkeypatch.setattr(weight_only, "SLICE_BYTES", rows * k * dtype.itemsize)
            with variants.force("float"), record_kernels() as ran:
                y = multiply(identity, weight)
            assert ran[-1] == f"cpu_weight_only_mm.{build}.float"
            # A product and a sum, rounded once or twice, before they are rounded to the dtype.
            torch.testing.assert_close(y.t(), wanted, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", fast_part.matrix_but(STAND_FOR_THE_OTHERS, SPECS))
def test_norms_of_errors(build, name):
    """In double, of numbers that are rounded to the dtype of the weight."""
    for dtype in FLOATS:
        for weight in weights(SPECS[name], dtype):
            floats = torch.randn(weight.shape).to(dtype)
            with record_kernels() as ran:
                found = qtorch.kernels.ops.quantize.error_norms(floats, weight)
            assert ran == [f"error_norms.{build}"]
            x, y = floats.double(), weight.dequantize().double()
            torch.testing.assert_close(found.double(), torch.stack([x.norm(), (x - y).norm()]), rtol=1e-7, atol=0)


@pytest.mark.usefixtures("build")
def test_the_largest_codes_and_special_values():
    """Instructions that saturate would be wrong here."""
    signs = torch.randint(0, 2, (40, 4096)) * 2.0 - 1
    weight = AffineQuantizedTensor.from_float(signs[:33], LinearSpec(QuantSpec("int8"), ACTIVATIONS["symmetric"]))
    for variant in ("dot", "tile"):
        with variants.force(variant):
            assert torch.equal(functional.linear(signs[20:38], weight), reference.linear(signs[20:38], weight, None))
    # Infinities and NaN stay in their row; huge and tiny numbers are exact, if sums of codes times them fit.
    weight = AffineQuantizedTensor.from_float(torch.randn(40, 96).abs() + 0.1, SPECS["int8 row"])
    x = torch.ones(20, 96)
    x[3, 5], x[4, 7] = float("inf"), float("nan")
    x[5], x[6] = 1e34, 1e-30
    for variant in variants.VARIANTS:
        with variants.force(variant):
            y = functional.linear(x, weight)
        # In fixed point such a row has no scale.
        assert (y[3].isnan() if variant == "fixed" else y[3] == float("inf")).all(), variant
        assert y[4].isnan().all(), variant
        rest = [i for i in range(20) if i not in (3, 4)]
        assert error(y[rest], x[rest], weight) < 1e-6


@pytest.mark.parametrize("name", ["int4 group", "uint4 group", "int4 group 128", "int4 long group"])
def test_short_groups_take_channels(build, name):
    """Weights whose sums "channels" makes, and no others, have it in the tables; matrix tiles have their own."""
    with record_kernels() as ran:
        y = multiply(torch.randn(5, 1536), quantized(OF_CODES[name], (33, 1536), "asymmetric"))
    assert y.shape == (5, 33)
    assert ran[-1].startswith(f"cpu_int8_mm.{build}.")
    assert ran[-1].endswith(".channels") == (name != "int4 long group" and build != "amx")


@pytest.mark.parametrize("columns", [32, 192, 1376, 2080])
@pytest.mark.parametrize("activation", ["symmetric", "asymmetric"])
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
        packed = qtorch.primitives.layouts.packed.pack_codes(codes, qdtype(kind))
        with variants.force("channels"), record_kernels() as ran:
            about = packed, 37, scale, zero, True, kind, torch.float32, None
            y = int8_linear.cpu_int8_mm(xq, xs, xz, *int8_linear.NO_QUANTIZER, *about)
        assert ran[-1] == f"cpu_int8_mm.{build}.channels"
        assert torch.equal(y, int8_grouped_mm(xq, xs, xz, codes, scale, zero, torch.float32))


@pytest.mark.parametrize("rows_of_weight, columns, group", [
    (8, 512, 32), (37, 1536, 64), (19, 2816, 128), (11, 1280, 320), (16, 2048, 2048), (7, 256, 32),
    (21, 1536, 96), (17, 1024, 32),
])  # fmt: skip
def test_one_row_of_codes(build, rows_of_weight, columns, group):
    """Sums of products stay within 16 bits for a while, also less a zero point; the last rows are a block that begins
    earlier; groups end within runs of codes. Seven rows are too few for a block."""
    groups = columns // group
    scale = torch.rand(rows_of_weight, groups) + 0.1
    xs = torch.rand(1, 1)
    largest = torch.full((rows_of_weight, columns), 15, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (rows_of_weight, groups), dtype=torch.int32)
    inputs = [torch.full((1, columns), code, dtype=torch.int8) for code in (-128, 127)]
    inputs.append(torch.randint(-128, 128, (1, columns), dtype=torch.int8))
    weights_of = {
        "uint4": (largest, torch.randint_like(largest, 16)),
        "int4": [torch.randint_like(largest, 16).to(torch.int8) - 8],
    }
    for variant, (kind, all_codes), zero in itertools.product(CODE_VARIANTS, weights_of.items(), (None, zeros)):
        for codes, xq, xz in itertools.product(all_codes, inputs, (None, -128, -3, 127)):
            packed = qtorch.primitives.layouts.packed.pack_codes(codes, qdtype(kind))
            x_zero = None if xz is None else torch.full((1, 1), xz, dtype=torch.int32)
            arguments = packed, rows_of_weight, scale, zero, True, kind, torch.float32, None
            with variants.force(variant), record_kernels() as ran:
                y = int8_linear.cpu_int8_mm(xq, xs, x_zero, *int8_linear.NO_QUANTIZER, *arguments)
            assert ran[-1] == f"cpu_int8_mm.{build}.{variant}"
            assert torch.equal(y, int8_grouped_mm(xq, xs, x_zero, codes, scale, zero, torch.float32))
