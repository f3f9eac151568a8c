"""Operands and weights quantized by C++, and products of int8 with a scale for each block."""

import itertools

import pytest
import torch
from torch import Tensor

from qtorch import AffineQuantizedTensor, MappingType, PerAxis, PerBlock, ZeroPointDomain
from qtorch.kernels import quantize_int8_rowwise, record_kernels
from qtorch.kernels.cpu import compiled_library, operands, variants
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.block_mm import int8_block_mm
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm, int8_product, int8_rows_product
from qtorch.kernels.ops.quantize import quantize_dynamic, quantize_rows, quantize_weight
from qtorch.kernels.ops.weight_only_mm import dequantize_codes
from qtorch.primitives import AbsMaxRule, Noise, PerGroup, PerRow, PerTensor, QuantSpec, Rounding, mx_spec, qdtype
from qtorch.primitives.scale_rules import AbsMeanRule
from qtorch.training.engine.numerics import float8, int8, integer
from tests.kernels.cpu.builds import NEEDS_LIBRARY

SPECS = {
    "int8 rows": int8(),
    "int8 stochastic": int8(rounding=Rounding.STOCHASTIC),
    "int8 tensor": int8(PerTensor()),
    "int8 tiles": int8(PerBlock((32, 32))),
    "int8 stochastic tiles": int8(PerBlock((32, 32)), Rounding.STOCHASTIC),
    "int8 groups": QuantSpec(qdtype("int8"), PerGroup(16), scale_dtype=torch.float32, eps=1e-3),
    "int8 without the edge": integer(8, preserve_max_val=False),
    "int4 rows": integer(4),
    "e4m3 rows": float8(),
    "e4m3 tensor": float8(granularity=PerTensor()),
    "e4m3 tiles": float8(granularity=PerBlock((16, 32))),
    "e5m2 rows": float8(torch.float8_e5m2),
    "mxfp8": mx_spec("float8_e4m3fn"),
    "mx e5m2": mx_spec("float8_e5m2"),
}
SHAPES = [(64, 96), (32, 544)]
ODD_SHAPES = [(1, 1), (1, 37), (5, 3), (33, 16), (70, 131)]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def shapes_of(spec: QuantSpec) -> list[tuple[int, int]]:
    return SHAPES if max(spec.granularity.pattern(2)) > 1 else SHAPES + ODD_SHAPES


def orders(x: Tensor) -> list[Tensor]:
    """The same matrix: rows contiguous, columns contiguous, rows with a gap, and neither."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1] + 3, dtype=x.dtype)
    padded, spread = wide[:, : x.shape[1]].copy_(x), wide.clone()[:, 1 : 2 * x.shape[1] + 1 : 2].copy_(x)
    return [x, x.t().contiguous().t(), padded, spread]


def values(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, ties among them, with zeros of both signs and a row of zeros."""
    x = torch.randn(rows, columns, dtype=torch.float64) * torch.randint(-12, 12, (rows, 1)).double().exp2()
    x[:, ::3] = x[:, ::3].mul(4).round().div(8)
    x[:, 1::5] = -0.0
    x[rows // 2] *= 0
    return x.to(dtype)


def equal(ours: Tensor, reference: Tensor) -> bool:
    if ours.dtype != reference.dtype or ours.shape != reference.shape:
        return False
    lost = ours.float().isnan()
    same = ours.view(torch.int8) == reference.view(torch.int8) if ours.element_size() == 1 else ours == reference
    return bool(torch.equal(lost, reference.float().isnan()) and (same | lost).all())


def check(x: Tensor, spec: QuantSpec, build: str) -> None:
    """Both functions give what torch's operators do; codes count where they have a scale."""
    for function in (quantize_dynamic, quantize_rows):
        with record_kernels() as ran:
            torch.manual_seed(1)
            codes, scale, zero_point = function(x, spec)
        assert ran == [f"quantize_matrix.{build}"]
        assert zero_point is None
        assert codes.is_contiguous()
        torch.manual_seed(1)
        expected, expected_scale, _ = portable(function)(x, spec)
        case = (x.shape, x.stride(), x.dtype, function.__name__)
        assert equal(scale, expected_scale), case
        if spec.dtype.has_nan:
            assert equal(codes, expected), case
            continue
        blocks = [n // s for n, s in zip(x.shape, scale.shape, strict=True)]
        known = scale.isfinite().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        assert torch.equal(codes * known, expected * known), case
        # What is lost is not an infinity after all: no code of it is anything but zero.
        assert not codes[~x.isfinite() & ~known].any() or scale.isnan().any(), case


@pytest.mark.parametrize("name", SPECS)
def test_quantize_also_what_is_not_finite(build: str, name: str) -> None:
    spec = SPECS[name]
    for shape, dtype in itertools.product(shapes_of(spec), (torch.float32, torch.bfloat16, torch.float16)):
        x = values(*shape, dtype)
        for order in orders(x)[: None if dtype is torch.float32 else 2]:
            check(order, spec, build)
    x = values(64, 96)
    for i, value in enumerate(NOT_FINITE):
        x[7 * i, 40 * i] = value
    for order in orders(x)[:2]:
        check(order, SPECS[name], build)


@pytest.mark.parametrize("name", [name for name in SPECS if "stochastic" not in name])
def test_extremes(build: str, name: str) -> None:
    """The largest and the smallest numbers, whose scales are at their limits."""
    x = torch.zeros(96, 96)
    x[:32] = torch.randn(32, 96) * 3e38
    x[32:64] = torch.randn(32, 96) * 1e-38
    x[64] = 3.4e38
    x[65:80, ::2] = 1e-45
    check(x.nan_to_num(), SPECS[name], build)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.usefixtures("build")
def test_every_rounding_to_float8(kind: str) -> None:
    """Each number, the middle to the next one, and the fp32 numbers beside these."""
    numbers = torch.arange(127, dtype=torch.uint8).view(qdtype(kind).storage).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (-1e9, 1e9))])
    x = torch.cat([near, -near]).unsqueeze(0)
    spec = float8(qdtype(kind).storage)
    codes, scale, _ = quantize_dynamic(x, spec)
    assert scale.item() == 1
    assert torch.equal(codes.view(torch.uint8), x.to(codes.dtype).view(torch.uint8))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
def test_dequantize(build: str, kind: str) -> None:
    dtype = qdtype(kind)
    codes = torch.arange(256, dtype=torch.int32).to(torch.int8).repeat(64, 3)
    codes = (codes % 8 - 4 if kind == "int4" else codes).view(dtype.storage)
    powers = torch.tensor([0.0, 1.0, 200.0, 255.0]).to(torch.uint8).repeat(16, 6).view(torch.float8_e8m0fnu)
    scales = [None, torch.rand(64, 1), torch.rand(1, 1), torch.rand(4, 16), powers.view(64, 6)[:, :6]]
    scales.append(torch.rand(2, 24).t()[:1].expand(64, 2))
    low, high = integer(dtype.bits).code_range if not dtype.has_nan else float8(dtype.storage).code_range
    for scale, transposed in itertools.product(scales, (False, True)):
        a, s = codes, scale
        if transposed:
            a, s = a.t(), None if s is None else s.t()
        arguments = (a, s, None, dtype, low, high, ZeroPointDomain.NONE)
        with record_kernels() as ran:
            ours = dequantize_codes(*arguments, torch.float32)
        assert ran == [f"dequantize_matrix.{build}"]
        assert equal(ours, portable(dequantize_codes)(*arguments, torch.float32)), (a.shape, s is None or s.shape)


@NEEDS_LIBRARY
@pytest.mark.parametrize("spec", [
    int8(PerAxis(1)),
    int8(PerBlock((32, 8))),
    integer(8, preserve_zero=False),
    integer(12),
    QuantSpec(qdtype("int8"), scale_rule=AbsMeanRule()),
    int8().with_granularity(PerGroup(32)),
    integer(8, rounding=Rounding.STOCHASTIC, noise=Noise(bits=8)),
], ids=str)  # fmt: skip
def test_other_specs_run_in_torch(spec: QuantSpec) -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with record_kernels() as ran:
        quantize_dynamic(x, spec)
    assert ran == []


@NEEDS_LIBRARY
def test_what_runs_in_torch() -> None:
    """A scale has a gradient, where one is recorded; a compiler sees operators that it can fuse."""
    x = torch.randn(4, 32, requires_grad=True)
    spec = QuantSpec(qdtype("int8"), PerRow())
    with record_kernels() as ran:
        assert quantize_rows(x, spec)[1].requires_grad
        torch.compile(lambda x: quantize_rows(x, spec)[0], backend="eager", fullgraph=True)(x.detach())
    assert ran == []
    # Products of fours of codes, or of floats that hold their sums.
    for size in (2048,) if compiled_library.library().instruction_set in operands.IN_FLOATS else (3, 2048):
        with record_kernels() as ran:
            int8_block_mm(codes(8, size), scale(8, 1), codes(8, size), scale(8, 1), torch.float32)
        assert ran[:2] == ["int8_block_mm", "int8_block_mm.torch"]
    spec = CHOSEN["groups"]
    check_of_quantize_weight(torch.randn(24, 24).t(), spec, "quantize_weight.torch")
    check_of_quantize_weight(torch.randn(0, 24), spec, "quantize_weight.torch")
    check_of_quantize_weight(torch.randn(4, 24, dtype=torch.float64), spec, "quantize_weight.torch")
    stochastic = QuantSpec("int8", PerRow(), rounding=Rounding.STOCHASTIC, eps=1e9)
    check_of_quantize_weight(torch.randn(4, 24), stochastic, "quantize_weight.torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_int8_have_the_bits_of_the_primitives(dtype: torch.dtype) -> None:
    """Also of the largest and the smallest numbers; codes reach both ends."""
    spec, extremes = QuantSpec("int8", quant_min=-127), torch.tensor([0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
    shapes = [torch.randn(shape) * torch.logspace(-6, 4, shape[0])[:, None] for shape in ((1, 1), (64, 128), (0, 16))]
    for x in (*shapes, torch.randn(3, 0), torch.stack([extremes, 0 * extremes, -extremes], 1)):
        x = x.to(dtype).nan_to_num(posinf=0, neginf=0)
        codes, scale = quantize_int8_rowwise(x)
        assert torch.equal(scale, spec.choose_qparams(x)[0])
        assert torch.equal(codes, spec.quantize(x, scale, None))
        used = scale[:, 0] > 1e-30
        assert (codes.abs().amax(1) == 127)[used].all() if x.numel() else not codes.numel()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def scale(*shape: int) -> Tensor:
    return torch.rand(shape) * torch.randint(-8, 8, shape).float().exp2()


def same(ours: Tensor, reference: Tensor) -> bool:
    return ours.dtype == reference.dtype and torch.equal(ours.nan_to_num(7), reference.nan_to_num(7))


# (M, N, groups of x, groups of w, size of the smaller ones, rows of x and of w that share a scale)
BLOCKS = [
    (64, 96, 3, 3, 32, 32, 32), (1, 1, 1, 2, 4, 1, 1), (7, 35, 4, 2, 12, 1, 5), (130, 33, 2, 6, 20, 10, 1),
    (64, 16, 2, 2, 1024, 64, 16),
]  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_both(build: str, case: tuple[int, ...]) -> None:
    m, n, x_groups, w_groups, size, x_rows, w_rows = case
    k = max(x_groups, w_groups) * size
    x, w = codes(m, k), codes(n, k)
    xs, ws = scale(m // x_rows, x_groups), scale(n // w_rows, w_groups)
    for dtype, number in zip(DTYPES, (0.0, float("nan"), float("inf")), strict=True):
        xs[-1, -1] = number or xs[-1, -1]
        expected = portable(int8_block_mm)(x, xs, w, ws, dtype)
        of_w = (w, w.t().contiguous().t(), torch.cat([w, w], 1)[:, :k])
        for a, b in itertools.product((x, x.t().contiguous().t()), of_w):
            with record_kernels() as ran:
                ours = int8_block_mm(a, xs.t().contiguous().t(), b, ws, dtype)
            assert ran == ["int8_block_mm", f"int8_block_mm.{build}"]
            assert same(ours, expected), (dtype, a.stride(), b.stride())


@pytest.mark.parametrize("shape", [(64, 96, 128), (1, 1, 1), (3, 1, 70), (1, 33, 5), (40, 130, 1500)])
def test_one_scale_a_row(build: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w = codes(m, k), codes(n, k)
    for dtype, xs, ws in itertools.product(DTYPES, (scale(m, 1), scale(1, 1)), (scale(n, 1), scale(1, 1).expand(n, 1))):
        xs[-1] = float("nan") if dtype is torch.bfloat16 else xs[-1]
        for a, b in itertools.product((x, x.t().contiguous().t()), (w, w.t().contiguous().t())):
            with record_kernels() as ran:
                ours = int8_product(a, xs, None, b, ws, None, -1, dtype)
            variant = variants.choose(build, variants.key_of("int8", False, False, n * k), m)
            in_block = k <= 1024 and build in operands.IN_FLOATS
            direct = k >= 32 and all(t.is_contiguous() for t in (a, b, ws)) and len(xs) == m and variant != "torch"
            sums = ["int_matmul", f"int8_block_mm.{build}"] if in_block else [f"scale_sums.{build}", "int_matmul"]
            direct = direct and not (in_block and m > 64)
            assert ran[:2] == (["int_matmul", f"int_matmul.{build}.{variant}"] if direct else sums)
            assert same(ours, int8_grouped_mm(x, xs, None, w, ws, None, dtype)), (dtype, xs.shape, ws.stride())


ASYMMETRIC, NO_CLIPPING = MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
# Those whose scales the compiled code chooses, too, for a weight in fp32; for groups in 16 bits, torch does.
CHOSEN = {
    "rows": QuantSpec("int8", PerRow(), quant_min=-127),
    "rows, asymmetric": QuantSpec("int8", PerRow(), ASYMMETRIC),
    "groups": QuantSpec("int8", PerGroup(24)),
    "int4 groups": QuantSpec("int4", PerGroup(24)),
    "uint4": QuantSpec("uint4", PerGroup(24), ASYMMETRIC),
    "uint7, rows": QuantSpec("uint7", PerRow(), ASYMMETRIC),
    "no zero point": QuantSpec("int3", PerGroup(8), zero_point_domain=ZeroPointDomain.NONE),
    "smallest scale": QuantSpec("int4", PerGroup(24), eps=0.02),
}
GIVEN = {
    "scales of 16 bits": QuantSpec("int4", PerGroup(24), scale_dtype=torch.bfloat16),
    "no clipping": QuantSpec("int4", PerGroup(24), NO_CLIPPING),
    "another rule": QuantSpec("uint4", PerRow(), ASYMMETRIC, scale_rule=AbsMaxRule(0.7)),
    "symmetric, unsigned": QuantSpec("uint4", PerGroup(24)),
}
NOT_COMPILED = {
    "uint8": QuantSpec("uint8", PerRow(), ASYMMETRIC),
    "tiles": QuantSpec("int8", PerBlock((4, 4))),
    "float8": QuantSpec("float8_e4m3fn", PerRow()),
    "real zero points": QuantSpec("uint4", PerGroup(24), ASYMMETRIC, ZeroPointDomain.FLOAT),
    "16 bits": QuantSpec("int16", PerRow()),
}


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_floats(build: str, bits: int) -> None:
    """Quantized and multiplied in one step, in any order of memory: the bits of the two steps in torch."""
    spec, noisy = integer(bits), integer(bits, rounding=Rounding.STOCHASTIC)
    for dtype, lost, (m, n, k) in itertools.product(DTYPES, (False, True), [(4, 64, 96), (33, 17, 1056), (64, 40, 3)]):
        x, w = torch.randn(k, m).t().to(dtype), torch.randn(n, k).to(dtype)
        x[0, 0] = torch.nan if lost else 0
        torch.manual_seed(1)
        with record_kernels() as ran:
            ours = int8_rows_product(x, noisy, w, spec, dtype)
        assert ran[:2] == [f"quantize_matrix.{build}"] * 2
        for context in (compiled_library.use(None), torch.autocast("cpu")):  # a backward may run in autocast
            torch.manual_seed(1)
            with context:
                assert same(ours, int8_rows_product(x, noisy, w, spec, dtype))


def weights(dtype):
    """Odd shapes, more axes, and rows that are all zero, tiny, huge, one-sided, or full of ties."""
    many = torch.randn(37, 72)
    many[0], many[1], many[2], many[3] = 0, many[1] * 1e-36, many[2] * 1e36, many[3].abs()
    many[4], many[5] = torch.arange(72) % 16 / 2 - 4, -many[5].abs()
    return [each.to(dtype) for each in (many, torch.randn(1, 24), torch.randn(3, 5, 48), torch.zeros(2, 24))]


def check_of_quantize_weight(weight, spec, wanted_note):
    with record_kernels() as ran:
        found = quantize_weight(weight, spec)
    assert ran == [wanted_note]
    for got, want in zip(found, portable(quantize_weight)(weight, spec), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (weight.shape, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CHOSEN, *GIVEN])
def test_bits(build, name, dtype):
    spec = {**CHOSEN, **GIVEN}[name]
    chosen = name in CHOSEN and spec.stored_scale_dtype(dtype) is torch.float32
    for weight in weights(dtype):
        check_of_quantize_weight(weight.nan_to_num(), spec, f"quantize_weight.{build}{'' if chosen else '.codes'}")


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_other_specs_run_on_torch(name):
    check_of_quantize_weight(torch.randn(8, 24), NOT_COMPILED[name], "quantize_weight.torch")


@NEEDS_LIBRARY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_holds_no_number_has_a_scale_of_nan(bad):
    weight = torch.randn(6, 48)
    weight[2, 30] = bad
    for name in ("groups", "rows", "uint4"):
        codes, scale, _ = quantize_weight(weight, CHOSEN[name])
        wanted = portable(quantize_weight)(weight, CHOSEN[name])
        assert scale.isnan().sum() == 1
        assert torch.equal(scale.isnan(), wanted[1].isnan())
        others = [0, 1, 3, 4, 5]
        assert torch.equal(codes[others], wanted[0][others])
        assert torch.equal(scale[others], wanted[1][others])


@NEEDS_LIBRARY
def test_from_float_uses_it_and_a_result_is_no_view():
    with record_kernels() as ran:
        AffineQuantizedTensor.from_float(torch.randn(8, 24), CHOSEN["groups"])
    library = compiled_library.library()
    assert library is not None
    assert ran == [f"quantize_weight.{library.instruction_set}"]
    # Sums are scaled in the memory of the result, which is then changed like any other.
    y = int8_product(codes(4, 8), scale(4, 1), None, codes(4, 8), scale(4, 1), None, -1, torch.float32)
    assert not y._is_view()
