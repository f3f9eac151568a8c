"""The compiled weight-only layers against exact arithmetic: every build and variant, odd shapes."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtorch import (
    AffineQuantizedTensor,
    LinearSpec,
    MappingType,
    PackedLayout,
    PerGroup,
    PerRow,
    PerTensor,
    PlainLayout,
    QuantSpec,
    ZeroPointDomain,
    compute_error,
)
from qtorch.dtypes.linear import multiply
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library, variants, weight_only
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY
from tests.rounding import EXTRA, gamma

ASYMMETRIC = MappingType.ASYMMETRIC
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
# (N, K): of rows, odd in both; of groups, in N and in the bytes of a packed run, but for the last two.
SHAPES = {True: [(37, 128), (70, 960), (1, 1280), (9, 1536), (6, 1024)], False: [(5, 77), (33, 1029), (70, 4), (1, 64)]}
# In bf16 the result is rounded, and matrix tiles round the weights too: half a unit, 2^-9, each.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}


def weights(spec: QuantSpec, dtype: torch.dtype = torch.float32) -> list[AffineQuantizedTensor]:
    made = []
    for n, k in SHAPES[isinstance(spec.granularity, PerGroup)]:
        for layout in (PlainLayout(), PackedLayout()):
            size = getattr(spec.granularity, "group_size", 1)
            if not (spec.dtype.bits == 8 and layout == PackedLayout()) and k % size == 0:
                values = torch.randn(n, k).to(dtype)
                made.append(AffineQuantizedTensor.from_float(values, LinearSpec(spec, layout=layout)))
    return made


def error(y: Tensor, x: Tensor, weight: AffineQuantizedTensor) -> float:
    """Largest error, relative to what the sums are made of."""
    exact = weight.scheme.weight.dequantize(*weight.plain()).double()
    scale = weight.scale.double()
    largest = 2.0 ** (weight.scheme.weight.dtype.bits - 1)
    size = (largest * scale).repeat_interleave(exact.shape[1] // scale.shape[1], 1).expand_as(exact)
    return float(((y.double() - x.double() @ exact.t()).abs() / (x.double().abs() @ size.t() + 1e-30)).max())


def tolerance(variant: str, dtype: torch.dtype, terms: int) -> float:
    """Of `error`. The order of our sums is that of the sources; torch's is its own, in F.linear, which takes a weight
    that is rounded to the dtype, too."""
    return 2 * TOLERANCE[dtype] + gamma(terms + EXTRA) if variant == "float" else TOLERANCE[dtype]


@pytest.mark.parametrize("variant", [*variants.VARIANTS, "float"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("build", BUILDS)
def test_against_exact_arithmetic(build, name, variant):
    with compiled_library.use(build), variants.force(variant):
        for weight in weights(SPECS[name]):
            for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (8, torch.float16), (17, torch.float32),
                                (37, torch.bfloat16)):  # fmt: skip
                x = torch.randn(rows, weight.shape[1]).to(dtype)
                with record_kernels() as ran:
                    y = multiply(x, weight)
                assert ran[-1] == f"cpu_weight_only_mm.{build}.{variant}"
                assert y.dtype == dtype
                assert error(y, x, weight) < tolerance(variant, dtype, weight.shape[1]), (weight, rows)


@pytest.mark.parametrize("variant", [*variants.VARIANTS, "float"])
@pytest.mark.parametrize("build", BUILDS)
def test_every_number_of_rows(build, variant):
    weight = AffineQuantizedTensor.from_float(
        torch.randn(50, 160), LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), layout=PackedLayout())
    )
    x = torch.randn(600, 160)
    with compiled_library.use(build), variants.force(variant):
        for rows in (*range(20), 31, 32, 33, 63, 64, 65, 255, 300, 512, 513, 600):
            y = functional.linear(x[:rows], weight)
            assert y.shape == (rows, 50)
            if rows:
                assert error(y, x[:rows], weight) < tolerance(variant, torch.float32, 160)


@pytest.mark.parametrize("build", BUILDS)
def test_inputs_that_are_views(build):
    weight = AffineQuantizedTensor.from_float(torch.randn(50, 96), SPECS["int8 row"])
    wide, bias = torch.randn(9, 200), torch.randn(50)
    with compiled_library.use(build):
        for x in (wide[:, 5:101], wide[::2, :96], torch.randn(96, 9).t(), wide[:1, :96].expand(7, 96)):
            torch.testing.assert_close(functional.linear(x, weight, bias), functional.linear(x.clone(), weight, bias))
        part = weight[3:20]
        assert error(functional.linear(wide[:, :96], part), wide[:, :96], part) < gamma(96 + EXTRA)


@pytest.mark.parametrize("variant", [*variants.VARIANTS, "float", "torch"])
@pytest.mark.parametrize("build", BUILDS)
def test_bias(build, variant):
    weight = AffineQuantizedTensor.from_float(torch.randn(70, 96), SPECS["int8 row"])
    bias = torch.randn(140)
    with compiled_library.use(build), variants.force(variant):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(9, 96).to(dtype)
            for b in (bias[:70].to(dtype), bias[::2].to(dtype), bias[:70]):
                y = multiply(x, weight, b)
                assert y.dtype == torch.promote_types(dtype, b.dtype)
                # Within two roundings of the result.
                torch.testing.assert_close(y, multiply(x, weight) + b, rtol=0, atol=40 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(SPECS)[::2])
@pytest.mark.parametrize("build", BUILDS)
def test_dequantized_slices(build, name, dtype, monkeypatch):
    """The numbers are those of `dequantize`, whatever the size of a slice."""
    for weight in weights(SPECS[name]):
        n, k = weight.shape
        if k > 200:
            continue
        identity, wanted = torch.eye(k, dtype=dtype), weight.dequantize(dtype)
        for rows in (16, n):
            monkeypatch.setattr(weight_only, "SLICE_BYTES", rows * k * dtype.itemsize)
            with compiled_library.use(build), variants.force("float"), record_kernels() as ran:
                y = multiply(identity, weight)
            assert ran[-1] == f"cpu_weight_only_mm.{build}.float"
            # A product and a sum, rounded once or twice, before they are rounded to the dtype.
            torch.testing.assert_close(y.t(), wanted, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("build", BUILDS)
def test_special_values(build):
    """Infinities and NaN stay in their row; huge and tiny numbers are exact, if sums of codes times them fit."""
    weight = AffineQuantizedTensor.from_float(torch.randn(40, 96).abs() + 0.1, SPECS["int8 row"])
    x = torch.ones(20, 96)
    x[3, 5], x[4, 7] = float("inf"), float("nan")
    x[5], x[6] = 1e34, 1e-30
    for variant in variants.VARIANTS:
        with compiled_library.use(build), variants.force(variant):
            y = functional.linear(x, weight)
        # In fixed point such a row has no scale.
        assert (y[3].isnan() if variant == "fixed" else y[3] == float("inf")).all(), variant
        assert y[4].isnan().all(), variant
        rest = [i for i in range(20) if i not in (3, 4)]
        assert error(y[rest], x[rest], weight) < 1e-6


@pytest.mark.parametrize("build", BUILDS)
def test_fixed_point_keeps_small_numbers_beside_large_ones(build):
    """A column that no weight reads does not take the precision of the others, by one more slice or another variant."""
    weight = torch.randn(40, 96)
    weight[:, 7] = 0
    weight = AffineQuantizedTensor.from_float(weight, SPECS["int8 row"])
    for outlier in (1e2, 1e4, 1e7):
        x = torch.randn(20, 96)
        y = functional.linear(x, weight)
        x[:, 7] = outlier
        with compiled_library.use(build), variants.force("fixed"):
            with_outlier = functional.linear(x, weight)
        assert compute_error(y, with_outlier) > 100, outlier


@NEEDS_LIBRARY
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    weight = AffineQuantizedTensor.from_float(torch.randn(301, 256), SPECS["uint4 group 128"])
    before = torch.get_num_threads()
    try:
        for rows in (1, 5, 40):
            x = torch.randn(rows, 256)
            torch.set_num_threads(1)
            expected = functional.linear(x, weight)
            torch.set_num_threads(threads)
            assert torch.equal(functional.linear(x, weight), expected)
    finally:
        torch.set_num_threads(before)


def test_compiled_with_dynamic_shapes():
    """One graph for every number of rows."""
    weight = AffineQuantizedTensor.from_float(torch.randn(64, 128), SPECS["uint4 group 128"])
    compiled = torch.compile(lambda x: functional.linear(x, weight).relu(), fullgraph=True, dynamic=True)
    for rows in (2, 5, 40):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(compiled(x), functional.linear(x, weight).relu())


def test_gradient_of_the_input():
    """The transposed weight of the backward is read by the kernels made of torch operators."""
    weight = AffineQuantizedTensor.from_float(torch.randn(64, 96), SPECS["int8 row"])
    x = torch.randn(5, 96, requires_grad=True)
    functional.linear(x, weight).sum().backward()
    assert compute_error(weight.dequantize().sum(0).expand(5, 96), x.grad) > 100


def test_operator_is_well_formed():
    codes, scale = torch.randint(-127, 128, (12, 32), dtype=torch.int8), torch.rand(12, 1)
    arguments = (torch.randn(3, 32), codes, 12, scale, None, False, "int8", -127.0, 127.0, "INT", None)
    torch.library.opcheck(torch.ops.qtorch.cpu_weight_only_mm.default, arguments)
