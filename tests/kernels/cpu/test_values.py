"""Compiled weight-only layers whose codes are no integers, against exact arithmetic: every type, build and variant."""

import itertools

import pytest
import torch
from torch.nn import functional

from qtorch import CodebookSpec, LinearSpec, MappingType, PackedLayout, PlainLayout, QuantSpec
from qtorch.checkpoint.formats.gguf.block_types import TYPES
from qtorch.dtypes import AffineQuantizedTensor, LUTQuantizedTensor, codebook_tensor, linear, quantized_type
from qtorch.dtypes.experts import grouped_linear
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library, variants, weight_only
from qtorch.kernels.cpu.code_values import FLOATS, CodeValues, QuantizedScales
from qtorch.kernels.cpu.weight_only import cpu_double_quantized_mm
from qtorch.primitives import NF4_TABLE, PerGroup, PerRow, ZeroPointDomain, nvfp4_spec, qdtype
from qtorch.primitives.layouts.packed import can_pack_bits
from tests import fast_part, rounding
from tests.kernels.cpu.builds import NEEDS_LIBRARY

TABLES = {
    "NF4": CodebookSpec("uint4", PerGroup(64), NF4_TABLE),
    "one table of 3 bits": CodebookSpec("uint3", PerGroup(32), tuple(x / 4 - 1 for x in range(8))),
    "tables of 4 bits": CodebookSpec("uint4"),
    "tables of 2 bits": CodebookSpec("uint2"),
    "tables of 5 bits": CodebookSpec("uint5"),
    "tables of 8 bits": CodebookSpec("uint8"),
    "tables of 4 bits of groups": CodebookSpec("uint4", PerGroup(64)),
    "tables of 2 bits of groups": CodebookSpec("uint2", PerGroup(96)),
    "tables of 5 bits of groups": CodebookSpec("uint5", PerGroup(32)),
}
INT8 = QuantSpec("int8", PerGroup(256), quant_min=-127)
DOUBLE = {
    "NF4, twice quantized": codebook_tensor.nf4_spec(64, 256),
    "3 bits, twice quantized": CodebookSpec(
        "uint3", PerGroup(32), TABLES["one table of 3 bits"].table, scale_spec=INT8
    ),
    "NVFP4": nvfp4_spec(),
    "int4, twice quantized": QuantSpec("int4", PerGroup(64), zero_point_domain=ZeroPointDomain.NONE, scale_spec=INT8),
    "uint3 with zeros, twice quantized": QuantSpec("uint3", PerGroup(32), MappingType.ASYMMETRIC, scale_spec=INT8),
}
BLOCKS = {kind.name: kind for kind in TYPES.values() if getattr(kind.spec, "scale_spec", None) is not None}
"""Of GGUF: scales of both signs, and quantized zero points."""
SHAPES = [(7, 16), (37, 192), (6, 1024), (5, 544)]
"""(N, K): whole vectors of a packed run in 1024 alone, less than one in the others; 16 and 544 have half a vector."""


def of_blocks(name: str, n: int, k: int) -> torch.Tensor:
    """A weight (n, k) of random blocks without infinite numbers."""
    kind, count = BLOCKS[name], n * k // BLOCKS[name].size
    data = torch.randint(256, (2 * count, kind.nbytes), dtype=torch.uint8)
    numbers = kind.tensor(data.reshape(-1), (2 * count, kind.size)).dequantize()
    return kind.tensor(data[(numbers.abs() < 1e6).all(1)][:count].reshape(-1), (n, k))


def weights(name: str) -> list[torch.Tensor]:
    if name in TABLES or name in DOUBLE:
        spec = (TABLES | DOUBLE)[name]
        size = getattr(spec.granularity, "group_size", 1)
        return [quantized_type(spec).from_float(torch.randn(n, k), spec) for n, k in SHAPES if k % size == 0]
    if name in BLOCKS:
        return [of_blocks(name, 40, 1024)]
    layouts = [PlainLayout(), PackedLayout()] if can_pack_bits(qdtype(name)) else [PlainLayout()]
    specs = [QuantSpec(name, g, zero_point_domain=ZeroPointDomain.NONE) for g in (PerRow(), PerGroup(32))]
    return [
        AffineQuantizedTensor.from_float(torch.randn(n, k), LinearSpec(spec, layout=layout))
        for spec, layout, (n, k) in itertools.product(specs, layouts, SHAPES)
        if k % 32 == 0 or spec.granularity == PerRow()
    ]


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_of_codes(name: str) -> None:
    """The table has the numbers of all codes, and so have the codes that are computed."""
    kind, found = qdtype(name), CodeValues.of_type(name)
    codes = torch.arange(2**kind.bits, dtype=torch.uint8).view(kind.storage)
    torch.testing.assert_close(found.table[0, : found.length], kind.decode(codes), rtol=0, atol=0, equal_nan=True)
    # Numbers of fp16 with the largest exponent are infinite, or none.
    has_exponent = kind.bits > 4 and not any(form in name for form in ("fnuz", "midrise", "e5m0"))
    assert (found.exponent > 0) == has_exponent
    assert not has_exponent or found.exponent + found.mantissa + 1 == kind.bits


KERNELS = {
    **dict.fromkeys(FLOATS, "cpu_weight_only_mm"),
    **dict.fromkeys(TABLES, "cpu_lut_mm"),
    **dict.fromkeys((*DOUBLE, *BLOCKS), "cpu_double_quantized_mm"),
}
FAST = (FLOATS[0], "float4_e2m1", "NF4", "tables of 5 bits", "NF4, twice quantized", "NVFP4", "Q3_K", "Q4_K")


@pytest.mark.parametrize("variant", ["dot", "fixed", "tile", "amx", "float"])
@pytest.mark.parametrize("name", fast_part.matrix_but(FAST, KERNELS))
def test_against_exact_arithmetic(build: str, name: str, variant: str) -> None:
    kernel = KERNELS[name]
    with variants.force(variant), record_kernels() as ran:
        for weight in weights(name):
            exact = weight.dequantize()
            for rows in (1, 2, 8, 17, 40):
                x, bias = torch.randn(rows, weight.shape[1]), torch.randn(weight.shape[0])
                y = functional.linear(x, weight, bias)
                assert ran[-1] == f"{kernel}.{build}.{variant}"
                rounding.assert_same_product(y, functional.linear(x, exact, bias), x, exact, bias)


@pytest.mark.parametrize("variant", ["dot", "fixed", "tile", "amx"])
@pytest.mark.parametrize("name", fast_part.matrix_but(FAST, KERNELS))
def test_bf16_against_exact_arithmetic(build: str, name: str, variant: str) -> None:
    """Matrix tiles multiply the weight as `dequantize` gives it, rounded to bf16; no other kernel rounds it."""
    with variants.force(variant), record_kernels() as ran:
        for weight, rows in itertools.product(weights(name), (3, 17, 40)):
            x = torch.randn(rows, weight.shape[1]).bfloat16()
            y = linear.multiply(x, weight)
            assert ran[-1] == f"{KERNELS[name]}.{build}.{variant}"
            exact = weight.dequantize().to(torch.bfloat16 if build == variant == "amx" else torch.float32).double()
            product, size = x.double() @ exact.t(), rounding.magnitude(x, exact)
            sums = rounding.gamma(weight.shape[1] + rounding.EXTRA) * size
            assert ((y - product).abs() <= sums + (product.abs() + sums) * 2**-8).all()


@pytest.mark.parametrize("name", [*FLOATS, *TABLES, "NVFP4"])
def test_matrix_tiles_multiply_slices_of_fp32(build: str, name: str) -> None:
    """Their sums have other bits than those of other tiles. Numbers beyond bf16 are sliced for many rows alone."""
    weight = weights(name)[-1]
    are_bf16 = name in ("NVFP4", "one table of 3 bits", *FLOATS)
    for rows, sliced in ((16, are_bf16), (40, True)):
        x, outputs = torch.randn(rows, weight.shape[1]), []
        for variant in ("tile", "amx"):
            with variants.force(variant):
                outputs.append(functional.linear(x, weight))
        assert torch.equal(*outputs) == (build != "amx" or not sliced)


@pytest.mark.parametrize("integers", [range(1, 32, 2), range(16)], ids=str)
def test_sums_of_the_largest_products(build: str, integers: range) -> None:
    """Sixteen products of integers beyond 15 would not fit into 32 bits."""
    spec = CodebookSpec("uint4", PerGroup(256), tuple(map(float, integers)))
    weight = LUTQuantizedTensor.from_float(torch.full((8, 4096), float(integers[-1])), spec)
    weight.qdata.fill_(255)
    exact, x = weight.dequantize(), torch.full((1, 4096), 3.0)
    assert (exact == integers[-1]).all()
    with variants.force("fixed"), record_kernels() as ran:
        y = functional.linear(x, weight)
    assert ran[-1] == f"cpu_lut_mm.{build}.fixed"
    rounding.assert_same_product(y, functional.linear(x, exact), x, exact)


def specs_of_short_groups() -> dict[str, QuantSpec]:
    found = {"NVFP4": nvfp4_spec()}
    for size in (4, 8, 20, 32):
        found[f"uint4 {size}"] = QuantSpec("uint4", PerGroup(size), MappingType.ASYMMETRIC)
        found[f"float4 {size}"] = QuantSpec("float4_e2m1", PerGroup(size), zero_point_domain=ZeroPointDomain.NONE)
    return found


@pytest.mark.parametrize("k", [32, 160, 480, 2880])
@pytest.mark.parametrize("name", specs_of_short_groups())
def test_groups_that_begin_within_vectors(build: str, name: str, k: int) -> None:
    """Runs of K / 8 codes that are no whole vectors, with groups that begin and end anywhere in them."""
    spec = LinearSpec(specs_of_short_groups()[name], layout=PackedLayout())
    if k % spec.weight.granularity.group_size:
        return
    for n, rows in itertools.product((4, 5, 37), (1, 2)):
        weight = quantized_type(spec.weight).from_float(torch.randn(n, k) + 0.2, spec)
        exact, x, bias = weight.dequantize(), torch.randn(rows, k), torch.randn(n)
        with variants.force("fixed"), record_kernels() as ran:
            y = functional.linear(x, weight, bias)
        assert ran[-1].endswith(f".{build}.fixed")
        rounding.assert_same_product(y, functional.linear(x, exact, bias), x, exact, bias)


@pytest.mark.parametrize("name", fast_part.matrix_but(FAST, KERNELS))
def test_gradients_against_exact_arithmetic(build: str, name: str) -> None:
    for weight in weights(name):
        exact, (n, k) = weight.dequantize(), weight.shape
        x, grad = torch.randn(3, k, requires_grad=True), torch.randn(3, n)
        y = functional.linear(x, weight)
        with record_kernels() as ran:
            y.backward(grad)
        assert ran[-1] == f"cpu_transposed_mm.{build}"
        rounding.assert_same_product(x.grad, grad @ exact, grad, exact.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1", "NF4", "tables of 2 bits", "tables of 4 bits"])
@NEEDS_LIBRARY
def test_size_of_errors(name: str, dtype: torch.dtype) -> None:
    """The result is rounded once, after sums in fp32; F.linear takes a weight that is rounded to the dtype, too."""
    unit = torch.finfo(dtype).eps * (1 if dtype is torch.float32 else 0.5)
    for weight, rows in itertools.product(weights(name), (1, 8, 100)):
        x, weight = torch.randn(rows, weight.shape[1]).to(dtype), weight.to(dtype)
        exact, y = weight.to(torch.float32).dequantize().double(), functional.linear(x, weight)
        size = x.double().abs() @ exact.abs().t()
        error = ((y.double() - x.double() @ exact.t()).abs() / size).max()
        assert y.dtype is dtype
        assert 0 < float(error) < 4 * unit


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_codes_that_are_no_numbers_and_damaged_scales(dtype: str) -> None:
    """Infinities and NaN of a row stay in its column of the result; e4m3 has no infinity."""
    spec = QuantSpec(dtype, zero_point_domain=ZeroPointDomain.NONE)
    weight = AffineQuantizedTensor.from_float(torch.randn(6, 64), spec)
    codes = weight.qdata.view(torch.uint8)
    codes[1, 3], codes[4, 5] = (0x7C, 0xFE) if dtype == "float8_e5m2" else (0x7F, 0xFF)
    x = torch.rand(2, 64) + 1
    for variant in ("dot", "tile", "amx", "float"):
        with variants.force(variant):
            y = functional.linear(x, weight)
        assert bool((y[:, 1].isposinf() if dtype == "float8_e5m2" else y[:, 1].isnan()).all())
        assert bool(y[:, 4].isnan().all())
        assert bool(y[:, [0, 2, 3, 5]].isfinite().all())
    # Memory that is not there is not read.
    weight = weights("NVFP4")[-1]
    arguments = weight.qdata, weight.shape[0], weight.scale, None, None, False, "float4_e2m1", -6.0, 6.0, "NONE"
    for scales in (("float8_e4m3fn", 8), ("float8_e4m3fn", 0)):
        with pytest.raises(ValueError, match="scales in groups of"):
            cpu_double_quantized_mm(
                torch.randn(1, weight.shape[1]), *arguments, *scales, True, weight.scale_scale, None, None, None
            )


@NEEDS_LIBRARY
@pytest.mark.parametrize("name", ["tables of 4 bits", "NF4, twice quantized", "Q4_K"])
def test_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a slice have their own tables and scales."""
    monkeypatch.setattr(weight_only, "SLICE_BYTES", 1)
    if name in BLOCKS:
        weight = of_blocks(name, 512, 1024)
    else:
        spec = (TABLES | DOUBLE)[name]
        weight = quantized_type(spec).from_float(torch.randn(512, 256), spec)
    x, exact = torch.randn(3, weight.shape[1]), weight.dequantize()
    with variants.force("float"), record_kernels() as ran:
        y = functional.linear(x, weight)
    assert ran[-1].endswith(".float")
    rounding.assert_same_product(y, functional.linear(x, exact), x, exact)


@NEEDS_LIBRARY
@pytest.mark.parametrize("name", DOUBLE)
def test_scales_of_scales_that_change(name: str) -> None:
    """A layer that was called reads scales that were written to since, as another one would."""
    weight = weights(name)[-1]
    x = torch.randn(1, weight.shape[1])
    before = functional.linear(x, weight)
    weight.scale_scale.mul_(2)
    if weight.scale_mean is not None:
        weight.scale_mean.mul_(2)
    torch.testing.assert_close(functional.linear(x, weight), 2 * before)
    assert torch.equal(functional.linear(x, weight), functional.linear(x, weight.clone()))


@NEEDS_LIBRARY
@pytest.mark.parametrize("name", ["NF4, twice quantized", "NVFP4"])
def test_a_compiled_graph_reads_scales_as_codes(name: str) -> None:
    """Those of tables and of float8: their numbers would be new tensors on each call, whose struct is made anew."""
    weight = weights(name)[-1]
    x = torch.randn(3, weight.shape[1])
    compiled = torch.compile(lambda x: functional.linear(x, weight), fullgraph=True)
    compiled(x)
    with record_kernels() as ran:
        y = compiled(x)
    assert {name.partition(".")[0] for name in ran} == {"cpu_double_quantized_mm"}
    assert torch.equal(y, functional.linear(x, weight))


@pytest.mark.parametrize("name", [*DOUBLE, *BLOCKS])
def test_numbers_of_quantized_scales(name: str) -> None:
    """Where no compiled kernel takes the weight, scales are those of the tensor, bit for bit."""
    for weight in weights(name):
        scale, zero_point = QuantizedScales.of(weight).numbers(weight.scale, getattr(weight, "zero_point", None))
        assert torch.equal(scale, weight.dense_scale())
        assert zero_point is None or torch.equal(zero_point, weight.dense_zero_point())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1", *TABLES, *DOUBLE])
def test_experts(build: str, name: str) -> None:
    spec = (TABLES | DOUBLE).get(name) or QuantSpec(name, PerGroup(32), zero_point_domain=ZeroPointDomain.NONE)
    stack = quantized_type(spec).from_float(torch.randn(4, 24, 192), spec)
    experts, x = torch.tensor([[0, 3], [2, 2], [1, 0]]), torch.randn(3, 192)
    exact = stack.dequantize()[experts.reshape(-1)]
    rows = x.repeat_interleave(2, 0)
    expected = (exact @ rows.unsqueeze(2)).squeeze(2)
    one_by_one = f"cpu_{'lut' if isinstance(spec, CodebookSpec) else 'weight_only'}_mm.{build}.float"
    for variant in ("dot", "fixed", "float"):
        for _ in range(2):  # the second call knows the weight
            with variants.force(variant), record_kernels() as ran:
                y = grouped_linear(x, stack, experts)
            assert ran[-1] == (one_by_one if variant == "float" else f"cpu_experts_mm.{build}")
            assert bool(((y - expected).abs() <= 1e-5 * (exact.abs() @ rows.abs().unsqueeze(2)).squeeze(2)).all())


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", ["float4_e2m1", "float8_e4m3fn"])
def test_embeddings(dtype: str) -> None:
    spec = QuantSpec(dtype, PerGroup(32), zero_point_domain=ZeroPointDomain.NONE)
    table, ids = AffineQuantizedTensor.from_float(torch.randn(30, 64), spec), torch.tensor([[3, 29], [0, 3]])
    with record_kernels() as ran:
        found = functional.embedding(ids, table)
    assert ran[-1] == f"cpu_embedding.{compiled_library.library().instruction_set}"
    assert torch.equal(found, table.dequantize()[ids])
