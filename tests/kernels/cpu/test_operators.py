"""Operators in C++: compiled graphs call them without Python, with the same bits; what they refuse, and pass on."""

import os
import signal

import pytest
import torch
from torch._inductor.utils import run_and_get_cpp_code

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import build, compiled_library, int8_linear, operators, variants
from qtorch.kernels.cpu.embedding import cpu_embedding
from qtorch.kernels.cpu.low_rank import cpu_low_rank_mm
from qtorch.kernels.cpu.weight_only import cpu_weight_only_mm
from qtorch.kernels.ops.kv_attention import float_attention
from tests.kernels.cpu.builds import NEEDS_LIBRARY, run
from tests.kernels.cpu.operator_cases import CALLS, CODES, SCALE, WRONG, dispatch, embedding, randn, weight, weight_only

NEEDS_OPERATORS = pytest.mark.skipif(
    compiled_library.library() is None or not operators.attached(), reason="the operators are not built"
)


def ran_here(function, *args):
    """The result of a call, and how many operators ran in C++."""
    before = operators.calls()
    return function(*args), operators.calls() - before


@NEEDS_OPERATORS
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("variant", ["dot", "tile", "fixed", None])
def test_the_same_bits_and_the_same_kernel(case, variant):
    operation, args = CALLS[case]
    if variant == "fixed" and operation is int8_linear.cpu_int8_mm:
        pytest.skip("x is in codes")
    with variants.force(variant) if variant else torch.no_grad():
        with record_kernels() as wanted:
            y, here = ran_here(operation, *args)
        assert here == 0
        with record_kernels() as ran:
            other, here = ran_here(dispatch, operation, *args)
    # Python looks why a result is not finite.
    assert here == (1 if "NaN" not in case else 0)
    assert ran == wanted
    assert len(ran) == 2
    assert y.stride() == other.stride()
    assert torch.equal(y.view(torch.int8), other.view(torch.int8)), "also where NaN"


RECIPES = [
    qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32), qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(),
]  # fmt: skip


@NEEDS_OPERATORS
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_compiled_graphs_run_without_python(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).requires_grad_(False)
    qtorch.quantize_(model, recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with variants.force("tile"):
        for count in (1, 5, 40):
            x = randn(count, 64)
            compiled(x)
            y, here = ran_here(compiled, x)
            assert here == 2
            assert torch.equal(y, model(x))


@NEEDS_OPERATORS
def test_the_library_and_the_variant_are_those_of_python(build):
    _, args = CALLS["dynamic"]
    with record_kernels() as ran:
        dispatch(int8_linear.cpu_int8_mm, *args)
        with variants.force("tile"):
            dispatch(int8_linear.cpu_int8_mm, *args)
    assert ran[1].startswith(f"cpu_int8_mm.{build}.")
    assert ran[3] == f"cpu_int8_mm.{build}.tile"


def passed_on(operation, args):
    """Names of what ran for a call that C++ does not support."""
    with record_kernels() as ran:
        y, here = ran_here(dispatch, operation, *args)
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
    for variant in ("torch", "float"):
        with variants.force(variant):
            assert passed_on(weights_only, args)[1].endswith(f".{variant}")
    codes, scale, _ = weight()
    strided = weight_only(randn(3, 64), codes.t().contiguous().t(), scale, None)
    assert passed_on(weights_only, strided)[:2] == ["cpu_weight_only_mm", "cpu_weight_only_mm.torch"]
    exact = weight_only(randn(3, 64), codes, scale.double(), None)
    assert passed_on(weights_only, exact)[:2] == ["cpu_weight_only_mm", "cpu_weight_only_mm.torch"]

    with variants.force("float"), qtorch.config.patch(float_copy_bytes=1 << 20):
        assert passed_on(weights_only, args) == ["cpu_weight_only_mm", "cpu_weight_only_mm.float_copy"]


@NEEDS_OPERATORS
def test_python_runs_under_autocast_and_threads_stay_equal(set_threads):
    operation, args = CALLS["weight-only"]
    y = operation(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dispatch(cpu_weight_only_mm, *args), y)
        with variants.force("float"):
            assert dispatch(cpu_weight_only_mm, *args).dtype == torch.float32
    for count in (1, 2, 3):
        set_threads(count)
        assert torch.equal(dispatch(cpu_weight_only_mm, *args), operation(*args))


@NEEDS_OPERATORS
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_one_thread(set_threads):
    """It would wait forever for the threads of its parent's pool."""
    args = weight_only(randn(64, 64), *weight())
    set_threads(2)
    with variants.force("tile"):  # torch's own products do not run in such a child
        y = dispatch(cpu_weight_only_mm, *args)
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if torch.equal(dispatch(cpu_weight_only_mm, *args), y) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@NEEDS_OPERATORS
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    operation, args, message = WRONG[case]
    before = operators.calls()
    with pytest.raises(ValueError, match=message):
        dispatch(operation, *args)
    assert operators.calls() == before


@NEEDS_OPERATORS
@pytest.mark.parametrize("wrong", [48, -1, 2**40])
def test_ids_out_of_range_are_refused(wrong):
    with pytest.raises(IndexError, match=f"index out of range: {wrong}, the table has 48 rows"):
        dispatch(cpu_embedding, *embedding(torch.tensor([0, wrong]), CODES, SCALE, None))


@NEEDS_LIBRARY
def test_schemas_agree_and_the_path_is_given():
    path = qtorch.kernels.cpu_operators_library()
    assert path.name == "libqtorch_operators.so"
    library = operators._open(path)
    schemas = {schema.partition("(")[0]: f"qtorch::{schema}" for schema in operators._schemas(library)}
    assert schemas == {
        operation.__name__: str(getattr(torch.ops.qtorch, operation.__name__).default._schema)
        for operation in (cpu_weight_only_mm, int8_linear.cpu_int8_mm, cpu_embedding, cpu_low_rank_mm, float_attention)
    }


@NEEDS_OPERATORS
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_cpp_wrapper_calls_them_by_the_c_abi(recipe):
    """Calls with texts or lists, which it boxes, take three times as long to compile."""
    layer = torch.nn.Linear(64, 32).requires_grad_(False)
    qtorch.quantize_(layer, recipe)
    x = randn(1, 64)
    y, code = run_and_get_cpp_code(torch.compile(layer, options={"cpp_wrapper": True}), x)
    assert torch.equal(y, layer(x))
    assert 'aoti_torch_call_dispatcher("qtorch::cpu_' in code
    assert "IValue(" not in code


def test_the_table_is_read_as_python_reads_it():
    """Every key and number of rows; the library in C++ has its own reader."""
    if not operators.attached():
        pytest.skip("the operators are not built")
    found = compiled_library.library()
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for groups in (1, 2):
            key = variants.key_of(kind, False, groups > 1, 48 * 64)
            for count in (1, 2, 3, 8, 9, 70, 600):
                variant = variants.choose(found.instruction_set, key, count)
                with record_kernels() as ran:
                    dispatch(cpu_weight_only_mm, *weight_only(randn(count, 64, dtype=kind), *weight(groups=groups)))
                assert ran == ["cpu_weight_only_mm", f"cpu_weight_only_mm.{found.instruction_set}.{variant}"]


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
    if how == "damaged":
        build.library_path(build.OPERATORS, tmp_path).write_bytes(b"no library")
    done = run(WITHOUT, QTORCH_CPU_LIBRARIES=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
