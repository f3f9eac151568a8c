"""The compiled gather gives the numbers of `dequantize`, bit for bit: every build that this machine runs."""

import itertools

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerBlock, PerGroup, PerRow, PlainLayout
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.cpu.embedding import cpu_embedding
from qtorch.primitives import QuantSpec, ZeroPointDomain
from tests import fast_part, rounding
from tests.kernels.cpu import builds, operator_cases, test_linear
from tests.kernels.quantized_weights import ASYMMETRIC

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table(spec: QuantSpec, shape: tuple[int, int] = (30, 64), layout: object = PlainLayout()) -> AffineQuantizedTensor:
    return AffineQuantizedTensor.from_float(torch.randn(shape), LinearSpec(spec, layout=layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", fast_part.matrix_but(test_linear.STAND_FOR_THE_OTHERS, test_linear.SPECS))
def test_bits_of_the_dequantized_table(build, name, dtype):
    for weight in test_linear.weights(test_linear.SPECS[name], dtype):
        ids = torch.randint(0, weight.shape[0], (41,))
        with record_kernels() as ran:
            rows = functional.embedding(ids, weight)
        assert ran == ["embedding:cpu_embedding", "cpu_embedding", f"cpu_embedding.{build}"]
        assert rounding.same_bits(rows, weight.dequantize()[ids]), (weight, dtype)


def test_long_rows_and_views_of_a_table(build):
    for k, layout in itertools.product((2047, 2048, 2049, 5000), (PlainLayout(), PackedLayout())):
        weight = table(QuantSpec("uint4", PerRow(), ASYMMETRIC), (3, k), layout)
        assert rounding.same_bits(functional.embedding(torch.tensor([2, 0, 1]), weight), weight.dequantize()[[2, 0, 1]])
    # Some rows, or some columns, which are read where they are.
    weight = table(QuantSpec("int8"))
    for part in (weight[3:20], weight[5:6], weight[:, 7:40]):
        with record_kernels() as ran:
            rows = functional.embedding(torch.tensor([0, part.shape[0] - 1]), part)
        assert ran[-1] == f"cpu_embedding.{build}"
        assert rounding.same_bits(rows, part.dequantize()[[0, -1]])


@pytest.mark.parametrize("domain", list(ZeroPointDomain), ids=str)
@pytest.mark.parametrize("scale", DTYPES, ids=str)
def test_types_of_scales_and_zero_points(build, scale, domain):
    mapping = MappingType.SYMMETRIC if domain is ZeroPointDomain.NONE else ASYMMETRIC
    weight = table(QuantSpec("int8", PerGroup(32), mapping, scale_dtype=scale, zero_point_domain=domain))
    with record_kernels() as ran:
        rows = functional.embedding(torch.arange(30), weight)
    assert ran[-1] == f"cpu_embedding.{build}"
    assert rounding.same_bits(rows, weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_any_shape(build, dtype):
    weight = table(QuantSpec("int8"))
    expected = weight.dequantize()
    wide = torch.randint(0, 30, (6, 10), dtype=dtype)
    with record_kernels() as ran:
        for ids in (wide, wide[2, 3], wide.t(), wide[:, ::3], wide[:1].expand(5, 10), wide[:0], wide.view(2, 3, 2, 5)):
            rows = functional.embedding(ids, weight)
            assert rows.shape == (*ids.shape, 64)
            assert rounding.same_bits(rows, expected[ids.long()])
    assert ran.count(f"cpu_embedding.{build}") == 7


@pytest.mark.parametrize("position", [0, 3, 99])
@pytest.mark.parametrize("wrong", [-1, 30, 2**31 - 1, 2**40, -(2**40)])
def test_ids_out_of_range(build, wrong, position):
    weight = table(QuantSpec("int8"))
    ids = torch.zeros(100, dtype=torch.int64)
    ids[position] = wrong
    match = f"index out of range: {wrong}, the table has 30 rows"
    with record_kernels() as ran, pytest.raises(IndexError, match=match):
        functional.embedding(ids, weight)
    assert ran[-1] == f"cpu_embedding.{build}"
    with pytest.raises(IndexError):
        functional.embedding(ids, weight.dequantize())


@builds.NEEDS_LIBRARY
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8 tensor", "uint4 group 32, real zero"])
def test_torch_operators_give_the_same(name):
    """What the operator does where it cannot call the library, as in a graph that was compiled where there is one."""
    weight = table(test_linear.SPECS[name], layout=PlainLayout() if name == "int8 tensor" else PackedLayout())
    compiled = torch.compile(lambda ids: functional.embedding(ids, weight), fullgraph=True)
    ids = torch.randint(0, 30, (4, 7))
    assert rounding.same_bits(compiled(ids), weight.dequantize()[ids])
    with compiled_library.use(None), record_kernels() as ran:
        rows = operator_cases.dispatch(cpu_embedding, *arguments(ids.reshape(-1), weight))
    assert ran == ["cpu_embedding", "cpu_embedding.torch"]
    assert rounding.same_bits(rows, weight.dequantize()[ids.reshape(-1)])


def arguments(ids: torch.Tensor, weight: AffineQuantizedTensor) -> tuple[object, ...]:
    scheme = weight.scheme
    spec = scheme.weight
    numerics = (spec.dtype.name, *map(float, spec.code_range), spec.zero_point_domain.name, scheme.dtype)
    packed = scheme.layout.packed_axis is not None
    return ids, weight.qdata, *scheme.shape, weight.scale, weight.zero_point, packed, *numerics


def test_what_is_left_to_torch_operators():
    blocks = table(QuantSpec("int8", PerBlock((5, 8))), (30, 32))
    double = AffineQuantizedTensor.from_float(torch.randn(30, 32).double(), QuantSpec("int8"))
    with record_kernels() as ran:
        for weight in (blocks, double):
            functional.embedding(torch.arange(3), weight)
    assert ran == ["embedding:gather_rows"] * 2
    weight = table(QuantSpec("int8"))
    with compiled_library.use(None), record_kernels() as ran:
        functional.embedding(torch.arange(3), weight)
    assert ran == ["embedding:gather_rows"]


@builds.NEEDS_LIBRARY
def test_compiled_with_dynamic_shapes():
    """One graph for every number of ids."""
    weight = table(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), layout=PackedLayout())
    layer = torch.nn.Embedding.from_pretrained(weight)
    compiled = torch.compile(lambda ids: layer(ids) * 2, fullgraph=True, dynamic=True)
    expected = weight.dequantize() * 2
    with record_kernels() as ran:
        for shape in ((3, 4), (5, 4), (40, 7)):
            ids = torch.randint(0, 30, shape)
            assert rounding.same_bits(compiled(ids), expected[ids])
    assert ran.count("cpu_embedding") == 3
