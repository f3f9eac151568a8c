"""Look-up tables: NF4, k-means, and tables of powers."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from qtorch import CodebookSpec, MappingType, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, compute_error
from qtorch.primitives import dequantize_codebook, from_json, kmeans_codebook, power_table, quantize_codebook, to_json
from qtorch.primitives.codebooks import NF4_TABLE, PowerSpec, power_spec
from qtorch.primitives.double_quant import dequantize_scale, quantize_scale
from qtorch.primitives.granularity import BlockView
from tests.refusals import refuses

NF4 = torch.tensor(NF4_TABLE)
INT8_SCALES = QuantSpec("int8", PerGroup(256), quant_min=-127)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS = [(1, -1), (1, 8), (-1, -1), (4, 8), (2, 1), (-1, 1)]


def student_t(*shape: int) -> torch.Tensor:
    return torch.distributions.StudentT(4.0).sample(shape)


def applied(spec: CodebookSpec, x: torch.Tensor) -> torch.Tensor:
    scale = spec.choose_scale(x)
    table = spec.choose_table(x, scale)
    return spec.dequantize(spec.quantize(x, scale, table), scale, table)


def squared_error(x: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Of each row to the nearest entries of its table, in fp64."""
    error = (x.double().unsqueeze(-1) - table.double().unsqueeze(-2)).square().amin(-1)
    return (error if weights is None else error * weights).sum(-1)


def test_nf4_and_kmeans() -> None:
    """QLoRA, appendix E: 8 quantiles below zero, 7 above, an exact zero; all divided by the largest."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    below = torch.special.ndtri(torch.linspace(1 - offset, 0.5, 8, dtype=torch.float64))
    above = torch.special.ndtri(torch.linspace(0.5, offset, 9, dtype=torch.float64))
    quantiles = torch.cat([below, above[1:]])
    assert quantiles[7] == 0
    torch.testing.assert_close(NF4.double(), quantiles / quantiles[-1], atol=2e-7, rtol=0)
    assert len(NF4_TABLE) == 16
    spec = power_spec("uint8", 4, True)
    text = json.dumps(to_json(spec))
    assert len(text) < 300, "the table is not written"
    assert from_json(json.loads(text)) == spec
    assert from_json(json.loads(text)).table is spec.table
    assert spec != power_spec("uint8", 4, False)
    refuses("power 2 or 4", lambda: power_spec("uint8", 3, True))
    refuses("computes its table", lambda: PowerSpec("uint4", table=tuple(range(16)), power=2))
    x = torch.tensor([[-2.0, -0.5, 0.5, 1.5, 9.0]])
    codes = quantize_codebook(x, (1, -1), torch.ones(1, 1), torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    assert codes.tolist() == [[0, 0, 1, 2, 3]]
    x, weights = torch.randn(8, 256), torch.rand(8, 256).pow(8)
    plain, weighted = kmeans_codebook(x, 3), kmeans_codebook(x, 3, weights)
    assert bool((squared_error(x, weighted, weights) < squared_error(x, plain, weights)).all())
    assert bool((squared_error(x, weighted) > squared_error(x, plain)).all())
    # What has no weight has no say.
    x[:, 128:] *= 100
    weights[:, 128:] = 0
    assert float(kmeans_codebook(x, 3, weights).abs().max()) <= float(x[:, :128].abs().max())
    x = torch.randn(3, 5, 77).bfloat16()
    table = kmeans_codebook(x, 4)
    assert (table.shape, table.dtype) == ((3, 5, 16), torch.float32)
    assert torch.equal(table, kmeans_codebook(x, 4))
    assert torch.equal(table, table.sort().values)
    # Rows do not know of each other, nor of the order of their elements.
    assert torch.equal(table[1, 2], kmeans_codebook(x[1, 2].flip(0), 4))
    assert kmeans_codebook(torch.empty(2, 0), 3).shape == (2, 8)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_nearest(dtype: torch.dtype, block: tuple[int, int], own: bool) -> None:
    x = torch.randn(8, 16, dtype=dtype)
    shape = BlockView(x.shape, block).scale_shape
    scale = torch.rand(shape) + 0.5
    table = torch.randn(*shape, 8).sort().values if own else NF4
    rows, columns = (n if b == -1 else b for n, b in zip(x.shape, block))
    of_element = [t.repeat_interleave(rows, 0).repeat_interleave(columns, 1) for t in (scale, table) if t.dim() > 1]
    wide_scale, wide_table = of_element if own else (of_element[0], NF4.expand(8, 16, 16))
    # argmin takes the first of equal distances: the lower entry.
    wanted = ((x / wide_scale).unsqueeze(-1) - wide_table).abs().argmin(-1)
    codes = quantize_codebook(x, block, scale, table)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.long(), wanted)
    y = dequantize_codebook(codes, block, scale, table, dtype)
    assert y.dtype == dtype
    assert torch.equal(y, (wide_table.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) * wide_scale).to(dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 3, 8), (8,), (1, 1)])
@pytest.mark.parametrize(
    "spec", [CodebookSpec("uint4", PerRow(), NF4_TABLE, scale_spec=INT8_SCALES), CodebookSpec("uint2")]
)
def test_any_rank_and_empty(spec: CodebookSpec, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert applied(spec, x).shape == shape


@pytest.mark.parametrize("granularity", [PerRow(), PerGroup(64)], ids=repr)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("make", [torch.randn, student_t])
def test_kmeans_beats_uniform(make: object, bits: int, granularity: object) -> None:
    x = make(64, 512)
    ours = compute_error(x, applied(CodebookSpec(f"uint{bits}", granularity), x))
    uniform = max(compute_error(x, QuantSpec(f"uint{bits}", granularity, m).fake_quantize(x)) for m in MappingType)
    assert uniform + 1 < ours < 6.02 * bits + 3


@pytest.mark.parametrize(("bits", "least"), [(2, 9.30), (3, 14.62), (4, 20.22)])
def test_kmeans_finds_the_quantizer_of_lloyd_and_max(bits: int, least: float) -> None:
    """The best SQNR of a Gaussian (Max, 1960); a sample of finite size is fitted a little better than that."""
    x = torch.randn(4, 1 << 15)
    table = kmeans_codebook(x, bits, iterations=100)
    sqnr = 10 * math.log10(x.double().square().sum() / squared_error(x, table).sum())
    assert least - 0.1 < sqnr < least + 0.2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("make", [torch.randn, student_t])
def test_kmeans_never_gets_worse(make: object, weighted: bool) -> None:
    x = make(16, 128)
    weights = torch.rand(16, 128).pow(4) if weighted else None
    errors = [squared_error(x, kmeans_codebook(x, 3, weights, iterations=i), weights) for i in range(12)]
    for before, after in itertools.pairwise(errors):
        assert bool((after <= before * (1 + 1e-6)).all())
    assert bool((errors[-1] < 0.9 * errors[0]).any())


@pytest.mark.parametrize("values", [[0.5], [-1.0, 1.0], [-1.0, 0.0, 3.0]])
def test_kmeans_with_empty_clusters(values: list[float]) -> None:
    x = torch.tensor(values).repeat(2, 5)
    table = kmeans_codebook(x, 2)
    assert table.isfinite().all()
    assert torch.equal(table, table.sort().values)
    assert float(squared_error(x, table).sum()) == 0


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kmeans_finds_few_values_exactly(bits: int) -> None:
    values = torch.randn(50, 2**bits)
    x = values.gather(1, torch.randint(2**bits, (50, 200)))
    torch.testing.assert_close(kmeans_codebook(x, bits), values.sort().values)


def test_double_quantization_text_and_errors() -> None:
    x = torch.randn(256, 1024)
    plain = CodebookSpec("uint4", PerGroup(64), NF4_TABLE)
    double = replace(plain, scale_spec=INT8_SCALES)
    scale = dequantize_scale(quantize_scale(double.choose_scale(x), INT8_SCALES), INT8_SCALES)
    y = double.dequantize(double.quantize(x, scale, NF4), scale, NF4)
    assert 20.5 < compute_error(x, y) <= compute_error(x, applied(plain, x)) + 0.01 < 21
    # Scales that are quantized to almost nothing leave entries finite.
    x, own_tables = x * torch.randn(256, 1).mul(2).exp(), CodebookSpec("uint3", PerGroup(32), scale_spec=INT8_SCALES)
    scale, table = own_tables.choose_qparams(x)
    assert 17 < compute_error(x, own_tables.dequantize(own_tables.quantize(x, scale, table), scale, table)) < 20
    assert table.max() == torch.finfo(torch.float16).max
    spec = CodebookSpec(torch.uint4, PerGroup(64), NF4_TABLE, scale_spec=INT8_SCALES)
    assert from_json(to_json(spec)) == spec
    assert hash(from_json(to_json(spec))) == hash(spec)
    assert str(spec) == "uint4 NF4 PerGroup(group_size=64) scale int8 PerGroup(group_size=256)"
    assert str(CodebookSpec("uint2", PerTensor())) == "uint2 k-means PerTensor()"
    refuses("codes are uint1 to uint8, got int4", lambda: CodebookSpec("int4"))
    refuses("uint3 has 8 codes, got 16 values", lambda: CodebookSpec("uint3", table=NF4_TABLE))
    refuses(r"must ascend, got \(0.0, 0.0\)", lambda: CodebookSpec("uint1", table=(0, 0)))
    refuses("symmetric, and only once; got int8 PerRow", lambda: CodebookSpec("uint4", scale_spec=QuantSpec("int8")))
    refuses("1 to 8 bits, got 9", lambda: kmeans_codebook(torch.ones(2, 2), 9))
    rows = torch.randn(2, 64)
    assert torch.equal(kmeans_codebook(rows, 2, torch.zeros(2, 64)), kmeans_codebook(rows, 2)), "nothing is important"
    with pytest.raises(ValueError, match=r"importance has shape \(2,\), the input \(2, 2\)"):
        kmeans_codebook(torch.ones(2, 2), 2, torch.ones(2))
    with pytest.raises(ValueError, match=r"of shape \(2, 1, 'L'\), got \(3, 1, 4\)"):
        quantize_codebook(torch.ones(2, 2), (1, -1), torch.ones(2, 1), torch.ones(3, 1, 4))
    with pytest.raises(ValueError, match=r"the table of uint4 NF4 PerRow.* is fixed"):
        CodebookSpec("uint4", PerRow(), NF4_TABLE).choose_table(torch.ones(2, 2), torch.ones(2, 1), torch.ones(2, 2))
    refuses("4 % 3 along axis 1", lambda: CodebookSpec("uint4", PerBlock((1, 3))).choose_scale(torch.ones(2, 4)))


SPECS = [("uint8", 4, True), ("uint8", 4, False), ("uint4", 2, True), ("uint4", 2, False), ("uint5", 2, True)]


@pytest.mark.parametrize("dtype, power, signed", SPECS)
def test_powers_and_nearest_codes(dtype: str, power: int, signed: bool) -> None:
    bits = int(dtype[4:])
    table = torch.tensor(power_table(bits, power, signed), dtype=torch.float64)
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    codes = torch.arange(2**bits, dtype=torch.float64) - (2 ** (bits - 1) if signed else 0)
    exact = codes.sign() * (codes.abs() / highest) ** power
    assert ((table - exact).abs() <= 1e-6 * exact.abs()).all()
    assert 0.0 in table
    assert 1.0 in table
    assert (-1.0 in table) == signed
    assert (table.diff() > 0).all()
    # By comparison with every value, in fp64, also a little below and above the middle of any two.
    spec = power_spec(dtype, power, signed)
    x = torch.randn(40, 200) * 10 ** (torch.rand(40, 200) * 8 - 8)
    x = x if signed else x.abs()
    table = torch.tensor(spec.table)
    table = table[1:] if signed else table  # no code stands for less than -1
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat([torch.zeros(2, 300), torch.nn.functional.pad(x, (0, 100))])
    x[0, : len(middles)], x[1, : len(middles)] = middles * (1 - 1e-6), middles * (1 + 1e-6)
    x[:2, -1] = 1.0
    scale, values = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, values)
    place = (x / scale).double()
    distance = (place[..., None] - table.double()).abs()
    chosen = distance.gather(-1, codes.long()[..., None] - int(signed)).squeeze(-1)
    # Middles and places are rounded to fp32.
    assert (chosen - distance.amin(-1) <= 2.0**-21 * place.abs()).all()
    nearer, further = (codes[row, : len(middles)].int() for row in range(2))
    assert torch.equal(further - nearer, middles.sign().int())
    assert torch.equal(torch.minimum(nearer, further), torch.arange(len(middles), dtype=torch.int32) + int(signed))
    assert codes.unique().numel() > 10
