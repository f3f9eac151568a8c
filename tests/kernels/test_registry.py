"""Look-up of kernels, operators and their implementations for devices, and the record of what ran."""

import ast
import inspect
import itertools
import warnings
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PackedLayout, PlainLayout, QuantSpec, TensorCoreTiledLayout
from qtorch.kernels import FallbackError, custom_ops, deregister, int_matmul, lookup, record_kernels, register, registry
from qtorch.kernels.cpu.code_values import TABLE
from qtorch.kernels.custom_ops import _opaque, by_device, implement, implementations, note, opaque, portable
from qtorch.primitives import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, ZeroPointDomain, qdtype
from qtorch.primitives.layouts.packed import pack_codes
from qtorch.primitives.layouts.semi_sparse import pack_2_4
from qtorch.primitives.qdtype import QDTYPES
from tests.kernels.cpu.builds import run
from tests.kernels.cpu.operator_cases import dispatched
from tests.refusals import refuses


@pytest.fixture
def weight():
    return AffineQuantizedTensor.from_float(torch.randn(8, 16), QuantSpec("int8", quant_min=-127))


@pytest.fixture
def kernel():
    """Register a kernel of `linear` for the test."""
    names = []

    def add(name, **needs):
        @register("linear", name=name, **needs)
        def function(x, weight, bias):
            return torch.full((*x.shape[:-1], 8), float(len(name)))

        names.append(name)

    yield add
    for name in names:
        deregister("linear", name)


def test_priorities_candidates_and_ties(weight, kernel):
    kernel("low", priority=50)
    kernel("higher", priority=60)
    with record_kernels() as ran:
        y = functional.linear(torch.randn(2, 16), weight)
    assert ran == ["linear:higher"]
    assert (y == 6).all()
    asked = []
    kernel("counting", priority=50, supports=lambda problem: asked.append(problem) or "no")
    for _ in range(3):
        functional.linear(torch.randn(2, 16), weight)
    assert len(asked) == 1
    functional.linear(torch.randn(2, 16).bfloat16(), weight.bfloat16())
    assert len(asked) == 2, "another dtype is another problem"
    kernel("mine", priority=50)
    refuses("linear has a kernel named mine already", lambda: kernel("mine"))
    refuses("linear has no kernel named nobody", lambda: deregister("linear", "nobody"))
    kernel("one", priority=70)
    kernel("two", priority=70)
    with pytest.raises(RuntimeError, match=r"one and two both take linear on weight int8 .* with priority 70"):
        functional.linear(torch.randn(2, 16), weight)
    with pytest.raises(NotImplementedError, match="no kernel registered for the operation 'fft'"):
        lookup("fft", weight.scheme, torch.float32, "cpu")


def test_a_kernel_that_rejects_is_passed_over(weight, kernel, torch_kernels):
    mine = {
        "picky": {"priority": 90, "supports": lambda problem: "is picky"},
        "elsewhere": {"priority": 80, "device": "cuda"},
        "other layout": {"priority": 70, "layout": "tiled"},
        "other layouts": {"priority": 65, "layout": ("tiled", "packed")},
        "other weight": {"priority": 60, "weight": ("int4", "int2")},
        "dynamic": {"priority": 50, "activation": ("int8",)},
        "two layouts": {"priority": 5, "layout": ("plain", "packed")},
    }
    for name, needs in mine.items():
        kernel(name, **needs)
    problem = registry.Problem("linear", weight.scheme, torch.float32, "cpu")
    assert registry.choose(problem).name == "weight_only_mm"
    shown = {*mine, "int8_weight_mm", "weight_only_mm"}
    reasons = [f"{k.name}: {reason}" for k, reason in registry.candidates(problem) if k.name in shown]
    assert registry.candidates(problem)[-1][0].name == "reference"
    assert_expected_inline(
        "\n".join(reasons),
        """\
picky: is picky
elsewhere: runs on cuda, the input is on cpu
other layout: reads the tiled layout, the weight has plain
other layouts: reads the packed or tiled layout, the weight has plain
other weight: takes int2 or int4 weights, this one is int8
dynamic: needs quantized activations, the scheme is weight-only
int8_weight_mm: takes bf16 or fp16 activations, got float32
weight_only_mm: None
two layouts: None""",
    )


def blocked(size: int) -> AffineQuantizedTensor:
    """A weight that only the reference takes: blocks over output channels, with quantized activations."""
    spec = LinearSpec(QuantSpec("int8", PerBlock((size, 8))), QuantSpec("int8"))
    return AffineQuantizedTensor.from_float(torch.randn(8, 16), spec)


def test_fallbacks_and_the_implementation_of_the_device():
    weight, x = blocked(4), torch.randn(2, 16)
    with warnings.catch_warnings(record=True) as caught, record_kernels() as ran:
        warnings.simplefilter("always")
        for _ in range(3):
            functional.linear(x, weight)
    assert [name for name in ran if name.startswith("linear")] == ["linear:reference"] * 3
    ours = [str(w.message) for w in caught if "qtorch" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].startswith(
        "qtorch: linear on a cpu float32 input with weight int8 PerBlock(sizes=(4, 8)) symmetric, dynamic activation "
        "int8 PerRow() symmetric, layout PlainLayout() runs the reference implementation, correct but slow: "
    )
    reason = "int8_scaled_mm takes a scale of its own for each output channel, the weight has PerBlock(sizes=(4, 8))"
    assert reason in ours[0].partition("slow: ")[2].split("; ")
    weight, x = blocked(2), torch.randn(2, 16)
    with qtorch.config.patch(strict=True), pytest.raises(FallbackError, match="runs the reference implementation"):
        functional.linear(x, weight)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        functional.linear(x, weight)
    x = torch.arange(3.0)
    for result in routes(_test_scale, x, 2):
        assert torch.equal(result, x * 2 + 1)
    for result in routes(_test_shift, x, 2.0):
        assert torch.equal(result, x - 2)
    with record_kernels() as ran:
        _test_scale(x, 2)
        torch.ops.qtorch._test_scale(x, 2)
    assert ran == ["_test_scale", "_test_scale.cpu"] * 2
    x = torch.arange(3.0, device="meta")
    with record_kernels() as ran:
        assert _test_scale(x, 2).is_meta
    assert ran == ["_test_scale"]
    assert portable(_test_shift)(torch.ones(1), 2.0).item() == 3
    assert {"_test_scale@cpu", "_test_shift@cpu", "int8_product@cpu"} <= set(implementations())
    assert len(implementations()) == len(set(implementations()))
    refuses("no operation is named nothing", lambda: implement("nothing", "cpu")(_scale_on_cpu))
    refuses("_test_scale has an implementation for cpu already", lambda: implement("_test_scale", "cpu")(_scale_on_cpu))
    implement("_test_scale", "cpu", where=False)(_scale_on_cpu)
    refuses("an operation is named _test_scale already", lambda: opaque(torch.empty_like)(portable(_test_scale)))


KERNELS = Path(qtorch.__file__).parent / "kernels"


def test_records_nest_and_know_opaque_operators():
    with record_kernels() as outer:
        note("a")
        with record_kernels() as inner:
            note("b")
        note("c")
    note("d")
    assert outer == ["a", "b", "c"]
    assert inner == ["b"]
    with record_kernels() as outer:
        with record_kernels():
            pass
        note("a")
    assert outer == ["a"]
    a = torch.randint(-9, 9, (3, 4), dtype=torch.int8)
    compiled = torch.compile(lambda a, b: int_matmul(a, b) + 1, fullgraph=True, backend="aot_eager")
    with record_kernels() as ran:
        result = compiled(a, a.t())
    assert "int_matmul" in ran
    assert torch.equal(result, int_matmul(a, a.t()) + 1)


# Operations of this file, each with an implementation for a device that stands for another one.


@opaque(lambda x, times: torch.empty_like(x))
def _test_scale(x: Tensor, times: int) -> Tensor:
    return x * times


@implement("_test_scale", "cpu")
def _scale_on_cpu(x: Tensor, times: int) -> Tensor:
    note("_test_scale.cpu")
    return portable(_test_scale)(x, times) + 1


@by_device
def _test_shift(x: Tensor, by: float) -> Tensor:
    return x + by


@implement("_test_shift", "cpu")
def _shift_on_cpu(x: Tensor, by: float) -> Tensor:
    return x - by


def routes(function, *args):
    """The result of an operation called directly, by way of the dispatcher, and compiled."""
    yield function(*args)
    if function is _test_scale:
        yield torch.ops.qtorch._test_scale(*args)
    torch._dynamo.reset()
    yield torch.compile(lambda *args: function(*args) * 1, fullgraph=True, backend="aot_eager")(*args)


TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Optional[Tensor]",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "int",  # its number
    "Sequence[int]": "List[int]",
    "Sequence[Tensor]": "List[Tensor]",
    "list[float]": "List[float]",
    "list[int]": "List[int]",
    "list[Tensor]": "List[Tensor]",
}


def _text(annotation: object) -> str:
    """Also where a file does not postpone its annotations."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("torch.Tensor", "Tensor").replace("collections.abc.", "")


@pytest.mark.parametrize("name", sorted(_opaque))
def test_the_schema_of_an_operator_is_its_signature(name):
    """And so is that of each of its implementations."""
    schema, static = getattr(torch.ops.qtorch, name).default._schema, (custom_ops.Name, custom_ops.Size)
    for function in (_opaque[name], *custom_ops._implementations[name].values()):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters] == [a.name for a in schema.arguments]
        assert ["int" if p.annotation in static else TYPES[_text(p.annotation)] for p in parameters] == [
            str(a.type).replace("SymInt", "int") for a in schema.arguments
        ]
    assert len(schema.returns) == str(inspect.signature(function).return_annotation).count("Tensor")


def int8(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int8)


def packed(rows: int, kind: str, axis: int = -1) -> Tensor:
    return pack_codes(torch.ones(rows, 32, dtype=qdtype(kind).storage), qdtype(kind), axis)


def tiled() -> tuple[Tensor, Tensor]:
    spec = QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    weight = AffineQuantizedTensor.from_float(torch.randn(72, 160), LinearSpec(spec, layout=TensorCoreTiledLayout()))
    return weight.qdata, weight.scale_and_zero


X, XS, INT8 = torch.randn(3, 32), torch.rand(3, 1), ("int8", -127.0, 127.0)
QUANTIZER = [-127.0, 127.0, 0.0, 0.0, 1e-30, 1e30]
IDS, INDEX = torch.tensor([3, 1, 4]), torch.tensor([[0, 1], [3, 2], [1, 1]])
ARGUMENTS = [
    ("int_matmul", int8(3, 5), int8(5, 2)),
    ("weight_only_mm", X, int8(8, 32).view(torch.uint8), torch.rand(8, 1), None, "uint4", 0.0, 15.0, "INT"),
    ("int8_weight_mm", X.bfloat16(), int8(8, 32), torch.rand(8, 1)),
    ("int8_grouped_mm", int8(3, 32), XS, None, int8(8, 32), torch.rand(8, 2), None, torch.float32),
    ("packed_weight_mm", X, packed(12, "uint4"), 12, -1, torch.rand(12, 1), None, "uint4", 0.0, 15.0, "NONE"),
    ("packed_weight_mm", X, packed(12, "uint4", 0), 12, -2, torch.rand(12, 1), None, "uint4", 0.0, 15.0, "NONE"),
    ("packed_int8_mm", int8(3, 32), XS, None, packed(8, "int3"), torch.rand(8, 2), None, "int3", torch.float32),
    ("semi_sparse_int8_mm", int8(3, 32), XS, None, pack_2_4(int8(12, 32).tril().triu()), torch.rand(12, 1), X.dtype),
    ("semi_sparse_weight_mm", X, pack_2_4(int8(12, 32).tril().triu()), 12, -1, torch.rand(12, 1), "int8"),
    ("semi_sparse_weight_mm", X, pack_2_4(int8(12, 32).tril().triu(), 0), 12, -2, torch.rand(12, 1), "int8"),
    ("int4_tiled_mm", torch.randn(5, 160).bfloat16(), *tiled(), 72, 32),
    ("cpu_weight_only_mm", X, int8(12, 32), 12, torch.rand(12, 1), None, False, *INT8, "INT", None),
    ("cpu_int8_mm", X, None, None, *QUANTIZER, int8(12, 32), 12, torch.rand(12, 1), None, False, "int8", X.dtype, None),
    ("cpu_embedding", IDS, int8(30, 32), 30, 32, torch.rand(30, 1), None, False, *INT8, "INT", torch.float32),
    ("cpu_low_rank_mm", torch.randn(3, 12), X, torch.randn(4, 32).half(), torch.randn(12, 4).half()),
    ("cpu_experts_mm", X, INDEX, int8(4, 12, 32), torch.rand(4, 12, 1), None, False, *INT8, "INT"),
    (
        *("cpu_experts_int8_mm", X, INDEX, None, None, *QUANTIZER),
        *(int8(4, 12, 32), torch.rand(4, 12, 1), None, False, "int8", torch.float32),
    ),
]


@pytest.mark.parametrize("name, arguments", [(name, arguments) for name, *arguments in ARGUMENTS])
def test_operators_are_well_formed(name, arguments):
    torch.library.opcheck(*dispatched(name, arguments))


def test_names_have_numbers(monkeypatch):
    """The same ones as in C++ and in every process, which run programs that this one has exported."""
    names = (*QDTYPES, *ZeroPointDomain.__members__, TABLE, "")
    numbers = [custom_ops.number_of(name) for name in names]
    assert len({*numbers}) == len(names)
    assert custom_ops.number_of("foobar") == 0xBF9CF968  # as FNV's own tests have it
    program = f"import qtorch; print(*map(qtorch.kernels.custom_ops.name_of, {numbers}), sep=',')"
    assert run(program).stdout.strip().split(",") == [*names]
    refuses("no number format has the number 5", lambda: custom_ops.name_of(5))
    monkeypatch.setitem(custom_ops._names, numbers[0], "other")
    refuses("'int1' and 'other' have the same number", lambda: custom_ops.number_of("int1"))


@pytest.mark.parametrize("folder", ["ops", "linear"])
def test_portable_code_knows_no_device_of_its_own(folder):
    """It imports neither triton nor the files of a device, and asks for neither: those register themselves."""
    wrong = []
    for path in sorted((KERNELS / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute | ast.Name):
                names = [node.attr if isinstance(node, ast.Attribute) else node.id]
            wrong += [f"{path.name}:{node.lineno} {name}" for name in names if is_foreign(name)]
    assert not wrong


def is_foreign(name):
    parts = name.lstrip(".").split(".")
    return bool({"triton", "cuda_lacks", "runs_triton"} & set(parts)) or (
        name.startswith(".") and parts[0] in ("cuda", "cpu")
    )


def test_kernels_do_not_compare_layouts_by_name():
    """`register` says which layouts a kernel reads, and the registry looks."""
    wrong = [
        str(path.relative_to(KERNELS))
        for path in sorted(KERNELS.rglob("*.py"))
        if path.name != "registry.py" and "layout.name" in path.read_text()
    ]
    assert not wrong


LAYOUTS = [("int8", PlainLayout()), ("int4", PlainLayout()), ("int4", PackedLayout()), ("float8_e4m3fn", PlainLayout())]


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerAxis(1), PerGroup(1)], ids=str)
def test_one_kernel_takes_a_row_or_a_column(granularity):
    """One scale is that of a row, of a column and of the tensor; the choice is not open, and its product is right."""
    for (kind, layout), shape in itertools.product(LAYOUTS, [(67, 1), (1, 67), (1, 1), (2, 1)]):
        spec = LinearSpec(QuantSpec(kind, granularity), layout=layout)
        weight = AffineQuantizedTensor.from_float(torch.randn(shape), spec)
        for matrix in (weight, weight.t()):
            x = torch.randn(3, matrix.shape[1])
            wanted = functional.linear(x, matrix.dequantize())
            torch.testing.assert_close(functional.linear(x, matrix), wanted, rtol=1e-5, atol=1e-5)
