"""Operators in C++: compiled graphs call them without Python, with the same bits; what they refuse, and pass on."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import build, compiled_library, operators, ways
from qtorch.kernels.cpu.embedding import cpu_embedding
from qtorch.kernels.cpu.int8 import cpu_int8_mm
from qtorch.kernels.cpu.weight_only import cpu_weight_only_mm
from tests.kernels.cpu.builds import NEEDS_LIBRARY

NEEDS_OPERATORS = pytest.mark.skipif(
    compiled_library.library() is None or not operators.attached(), reason="the operators are not built"
)

OPS, BF16 = torch.ops.qtorch, torch.bfloat16
DYNAMIC = [-127.0, 127.0, 0.0, 0.0, torch.finfo(torch.float32).tiny, 1e30]
GIVEN = [-128.0, 127.0, 0.0, 1.0, 0.0, 0.0]
NUMBERS = torch.Generator().manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=NUMBERS).to(dtype)


def weight(n=48, k=64, groups=2, zero_point=False):
    """(codes, scale, zero point) of an int8 weight."""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=NUMBERS)
    zero = torch.randint(-9, 9, (n, groups), dtype=torch.int32, generator=NUMBERS) if zero_point else None
    return codes, randn(n, groups).abs() + 0.1, zero


def weight_only(x, codes, scale, zero_point, bias=None, n=48, domain="INT", dtype="int8", packed=False):
    return x, codes, n, scale, zero_point, packed, dtype, -128.0, 127.0, domain, bias


def int8(x, codes, scale, zero_point, xs=None, xz=None, quantizer=DYNAMIC, bias=None, dtype=torch.float32):
    return x, xs, xz, quantizer, codes, 48, scale, zero_point, False, "int8", dtype, bias


def embedding(ids, codes, scale, zero_point, dtype=torch.float32):
    return ids, codes, [48, 64], scale, zero_point, False, "int8", -128.0, 127.0, "INT", dtype


def rows(m, value=0.05):
    return torch.full((m, 1), value)


CALLS = {
    "weight-only": (cpu_weight_only_mm, weight_only(randn(3, 64), *weight())),
    "weight-only, zero points, bias": (
        cpu_weight_only_mm,
        weight_only(randn(9, 64), *weight(zero_point=True), bias=randn(48)),
    ),
    "weight-only, real zero points": (
        cpu_weight_only_mm,
        weight_only(randn(2, 64), *weight()[:2], randn(48, 2), domain="FLOAT"),
    ),
    "weight-only, bf16, no rows": (cpu_weight_only_mm, weight_only(randn(0, 64, dtype=torch.bfloat16), *weight())),
    "weight-only, fp16, strided rows": (
        cpu_weight_only_mm,
        weight_only(randn(5, 128, dtype=torch.float16)[:, 64:], *weight()),
    ),
    "weight-only, transposed": (cpu_weight_only_mm, weight_only(randn(64, 5).t(), *weight())),
    "weight-only, one scale": (cpu_weight_only_mm, weight_only(randn(5, 64), weight()[0], rows(1), None)),
    "weight-only, NaN": (cpu_weight_only_mm, weight_only(randn(5, 64) * torch.nan, *weight())),
    "dynamic": (cpu_int8_mm, int8(randn(3, 64), *weight())),
    "dynamic, bf16, bias": (
        cpu_int8_mm,
        int8(
            randn(20, 64, dtype=torch.bfloat16), *weight(), dtype=torch.bfloat16, bias=randn(48, dtype=torch.bfloat16)
        ),
    ),
    "dynamic, asymmetric": (
        cpu_int8_mm,
        int8(randn(3, 64), *weight(zero_point=True), quantizer=[-128.0, 127.0, 1.0, *DYNAMIC[3:]]),
    ),
    "static": (cpu_int8_mm, int8(randn(3, 64), *weight(), xs=rows(1), quantizer=GIVEN)),
    "static, zero point": (
        cpu_int8_mm,
        int8(randn(3, 64), *weight(), xs=rows(1), xz=rows(1, 3).int(), quantizer=GIVEN),
    ),
    "codes": (cpu_int8_mm, int8(weight(7)[0], *weight(groups=1), xs=rows(7), quantizer=[])),
    "codes, zero points": (
        cpu_int8_mm,
        int8(weight(7)[0], *weight(), xs=rows(7), xz=rows(7, 2).int(), quantizer=[]),
    ),
    "embedding": (cpu_embedding, embedding(torch.tensor([0, 47, 5]), *weight())),
    "embedding, int32, bf16": (
        cpu_embedding,
        embedding(torch.tensor([1, 1], dtype=torch.int32), *weight(zero_point=True), dtype=torch.bfloat16),
    ),
}


def ran_here(function, *args):
    """The result of a call, and how many operators ran in C++."""
    before = operators.calls()
    return function(*args), operators.calls() - before


@NEEDS_OPERATORS
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("way", ["dot", "tile", "fixed", None])
def test_the_same_bits_and_the_same_kernel(case, way):
    operation, args = CALLS[case]
    if way == "fixed" and operation is cpu_int8_mm:
        pytest.skip("x is in codes")
    overload = getattr(OPS, operation.__name__).default
    with ways.force(way) if way else torch.no_grad():
        with record_kernels() as wanted:
            y, here = ran_here(operation, *args)
        assert here == 0
        with record_kernels() as ran:
            other, here = ran_here(overload, *args)
    assert here == 1
    assert ran == wanted
    assert len(ran) == 2
    assert y.stride() == other.stride()
    assert torch.equal(y.view(torch.int8), other.view(torch.int8)), "also where NaN"


@NEEDS_OPERATORS
@pytest.mark.parametrize("case", ["weight-only, zero points, bias", "dynamic", "static", "embedding"])
def test_registrations_are_consistent(case):
    operation, args = CALLS[case]
    torch.library.opcheck(getattr(OPS, operation.__name__).default, args)


RECIPES = [
    qtorch.int8_weight_only(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(),
]


@NEEDS_OPERATORS
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_compiled_graphs_run_without_python(recipe):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).requires_grad_(False)
    qtorch.quantize_(model, recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (1, 5, 40):
        x = randn(count, 64)
        compiled(x)
        y, here = ran_here(compiled, x)
        assert here == 2
        assert torch.equal(y, model(x))


@NEEDS_OPERATORS
def test_the_library_and_the_way_are_those_of_python():
    _, args = CALLS["dynamic"]
    for name in filter(compiled_library.runs_here, build.instruction_sets()):
        if isinstance(compiled_library.find(name), str):
            continue
        with compiled_library.use(name), record_kernels() as ran:
            OPS.cpu_int8_mm(*args)
            with ways.force("tile"):
                OPS.cpu_int8_mm(*args)
        assert ran[1].startswith(f"cpu_int8_mm.{name}.")
        assert ran[3] == f"cpu_int8_mm.{name}.tile"


def passed_on(operation, args):
    """Names of what ran for a call that C++ does not support."""
    with record_kernels() as ran:
        y, here = ran_here(getattr(OPS, operation.__name__).default, *args)
    assert here == 0
    with record_kernels() as wanted:
        assert torch.equal(y, operation(*args))
    assert ran == wanted
    return ran


@NEEDS_OPERATORS
def test_python_runs_what_it_alone_supports():
    weights_only, args = CALLS["weight-only"]
    with compiled_library.use(None):
        assert passed_on(weights_only, args)[:2] == ["cpu_weight_only_mm", "cpu_weight_only_mm.torch"]
        assert "cpu_embedding.torch" in passed_on(*CALLS["embedding"])
    for way in ("torch", "float"):
        with ways.force(way):
            assert passed_on(weights_only, args)[1].endswith(f".{way}")
    codes, scale, _ = weight()
    strided = weight_only(randn(3, 64), codes.t().contiguous().t(), scale, None)
    assert passed_on(weights_only, strided)[:2] == ["cpu_weight_only_mm", "cpu_weight_only_mm.torch"]
    exact = weight_only(randn(3, 64), codes, scale.double(), None)
    assert passed_on(weights_only, exact)[:2] == ["cpu_weight_only_mm", "cpu_weight_only_mm.torch"]


@NEEDS_OPERATORS
def test_copies_are_those_of_python():
    operation, args = CALLS["weight-only"]
    with ways.force("float"), qtorch.config.patch(float_copy_bytes=1 << 20):
        assert passed_on(operation, args) == ["cpu_weight_only_mm", "cpu_weight_only_mm.float_copy"]


@NEEDS_OPERATORS
def test_python_runs_under_autocast_and_threads_stay_equal():
    operation, args = CALLS["weight-only"]
    y = operation(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(OPS.cpu_weight_only_mm(*args), y)
        with ways.force("float"):
            assert OPS.cpu_weight_only_mm(*args).dtype == torch.float32
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(OPS.cpu_weight_only_mm(*args), operation(*args))
    finally:
        torch.set_num_threads(before)


def resized(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


X, (CODES, SCALE, _) = randn(3, 64), weight()
WRONG = {
    "x has another width": (weight_only(randn(3, 32), CODES, SCALE, None), "the codes of a weight"),
    "x is a vector": (weight_only(randn(64), CODES, SCALE, None), "x is a matrix"),
    "codes are short": (weight_only(X, CODES[:40], SCALE, None), "the codes of a weight"),
    "codes have another dtype": (weight_only(X, CODES.view(torch.uint8), SCALE, None), "the codes of a weight"),
    "n is negative": (weight_only(X, CODES, SCALE, None, n=-1), "the codes of a weight"),
    "codes are said to be packed": (
        weight_only(X, CODES.view(torch.uint8), SCALE, None, dtype="uint4", packed=True),
        "the codes of a weight",
    ),
    "scales are few": (weight_only(X, CODES, SCALE[:9], None), "the scale of a weight"),
    "groups do not divide": (weight_only(X, CODES, torch.ones(48, 3), None), "the scale of a weight"),
    "zero points are few": (weight_only(X, CODES, SCALE, torch.ones(48, 1)), "a zero point has the shape"),
    "the bias is short": (weight_only(X, CODES, SCALE, None, bias=randn(9)), "takes a contiguous bias"),
    "the bias is strided": (weight_only(X, CODES, SCALE, None, bias=randn(96)[::2]), "takes a contiguous bias"),
    "the bias is wider": (weight_only(X, CODES, SCALE, None, bias=randn(48).double()), "takes a contiguous bias"),
    "memory is gone": (weight_only(X, resized(CODES.clone()), SCALE, None), "memory (that )?was given back"),
    "memory of x is gone": (weight_only(resized(X.clone()), CODES, SCALE, None), "memory that was given back"),
    "codes without scales": (int8(CODES[:3], CODES, SCALE, None, quantizer=[]), "needs xs"),
    "no quantizer": (int8(X, CODES, SCALE, None, quantizer=[]), "quantizer has 6 numbers"),
    "no scales are given": (int8(X, CODES, SCALE, None, quantizer=GIVEN), "takes xs"),
    "codes of nine bits": (int8(X, CODES, SCALE, None, quantizer=[-256.0, 255.0, *DYNAMIC[2:]]), "between -128"),
    "bounds are NaN": (int8(X, CODES, SCALE, None, quantizer=[float("nan")] * 6), "between -128"),
    "small groups": (int8(X, CODES, torch.ones(48, 8), None), "groups of a multiple of 32"),
    "zero points without scales": (int8(X, CODES, SCALE, None, xz=rows(3).int()), "xz needs xs"),
    "ids are a matrix": (embedding(torch.zeros(2, 2, dtype=torch.int64), CODES, SCALE, None), "ids is a vector"),
}
OPERATION = {11: "cpu_weight_only_mm", 12: "cpu_int8_mm"}


@NEEDS_OPERATORS
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    args, message = WRONG[case]
    name = "cpu_embedding" if args[2] == [48, 64] else OPERATION[len(args)]
    before = operators.calls()
    with pytest.raises(ValueError, match=message):
        getattr(OPS, name)(*args)
    assert operators.calls() == before


@NEEDS_OPERATORS
@pytest.mark.parametrize("wrong", [48, -1, 2**40])
def test_ids_out_of_range_are_refused(wrong):
    with pytest.raises(IndexError, match=f"index out of range: {wrong}, the table has 48 rows"):
        OPS.cpu_embedding(*embedding(torch.tensor([0, wrong]), CODES, SCALE, None))


@NEEDS_LIBRARY
def test_schemas_agree_and_the_path_is_given():
    path = qtorch.kernels.cpu_operators_library()
    assert path.name == "libqtorch_operators.so"
    library = operators._open(path)
    schemas = {schema.partition("(")[0]: f"qtorch::{schema}" for schema in operators._schemas(library)}
    assert schemas == {
        operation.__name__: str(getattr(OPS, operation.__name__).default._schema)
        for operation in (cpu_weight_only_mm, cpu_int8_mm, cpu_embedding)
    }


def test_the_table_is_read_as_python_reads_it():
    """Every key and number of rows; the library in C++ has its own reader."""
    if not operators.attached():
        pytest.skip("the operators are not built")
    found = compiled_library.library()
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for groups in (1, 2):
            key = ways.key_of(kind, False, groups > 1, 48 * 64)
            for count in (1, 2, 3, 8, 9, 70, 600):
                way = ways.choose(found.instruction_set, key, count)
                with record_kernels() as ran:
                    OPS.cpu_weight_only_mm(*weight_only(randn(count, 64, dtype=kind), *weight(groups=groups)))
                assert ran == ["cpu_weight_only_mm", f"cpu_weight_only_mm.{found.instruction_set}.{way}"]


WITHOUT = """
import torch, qtorch
from torch import nn
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import operators

model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
qtorch.quantize_(model, qtorch.int4_weight_only(group_size=32))
x = torch.randn(3, 64)
compiled = torch.compile(model, backend="aot_eager")
with record_kernels() as ran:
    y = compiled(x)
assert torch.equal(y, model(x))
assert len(ran) >= 2 and ran[0] == "cpu_weight_only_mm", ran
assert not operators.attached() and operators.calls() == 0
"""


@pytest.mark.slow
@NEEDS_LIBRARY
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_python_runs_without_the_library(how, tmp_path):
    found = compiled_library.library()
    (tmp_path / found.path.name).write_bytes(found.path.read_bytes())
    environment = {**os.environ, "QTORCH_CPU_LIBRARIES": str(tmp_path)}
    if how == "damaged":
        build.library_path(build.OPERATORS, tmp_path).write_bytes(b"no library")
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
