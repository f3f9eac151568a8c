"""The compiled products with experts: the bits of one compiled linear layer for each, in every build and variant."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PerRow, PerTensor, QuantSpec, compute_error
from qtorch.dtypes.experts import grouped_linear, one_by_one
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library, experts, variants
from qtorch.kernels.linear import reference
from qtorch.kernels.registry import Problem, candidates
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, INDICES, TOKEN, of_experts, weight_of

SPECS = {
    "int8 row": QuantSpec("int8", quant_min=-127),
    "int8 tensor": QuantSpec("int8", PerTensor()),
    "uint8 row": QuantSpec("uint8", PerRow(), ASYMMETRIC),
    "int4 group 32": QuantSpec("int4", PerGroup(32)),
    "uint4 group 64": QuantSpec("uint4", PerGroup(64), ASYMMETRIC),
    "int3 row": QuantSpec("int3", PerRow()),
}
# The last is of whole vectors of packed codes; the first is odd in N and in the bytes of a packed run.
SHAPES = [(37, 192), (22, 1024)]
ACTIVATIONS = {None: None, "symmetric": TOKEN, "asymmetric": ASYMMETRIC_TOKEN}


def stack(spec, n, k, activation=None, count=5, dtype=torch.float32):
    return weight_of(spec, (count, n, k), "cpu", activation, dtype)


@functools.cache
def cases(name, activation):
    """(weight, [(x, index, results of the reference for int8 activations)]), made once for all builds and variants."""
    made = []
    for n, k in SHAPES:
        weight, inputs = stack(SPECS[name], n, k, ACTIVATIONS[activation]), []
        for index in map(torch.tensor, INDICES.values()):
            x = torch.randn(len(index), k) + 0.3
            wanted = None if activation is None else of_experts(x, weight, index)
            inputs.append((x, index, wanted))
        made.append((weight, inputs))
    return made


def name_of(weight):
    return "cpu_experts_mm" if weight.scheme.activation is None else "cpu_experts_int8_mm"


def check(x, weight, index, build):
    """That the compiled call runs, and gives what compiled linear layers give."""
    with record_kernels() as ran:
        y = grouped_linear(x, weight, index)
    name = name_of(weight)
    assert ran == [f"grouped_linear:{name}", name, f"{name}.{build}"]
    assert (y.dtype, y.shape) == (x.dtype, (index.numel(), weight.shape[1]))
    assert torch.equal(y, one_by_one(x, weight, index))
    return y


@pytest.mark.parametrize("name", SPECS)
def test_weight_only(build, name):
    for variant in variants.VARIANTS:
        with variants.force(variant):
            for weight, inputs in cases(name, None):
                for x, index, _ in inputs:
                    check(x, weight, index, build)


@pytest.mark.parametrize("activation", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("name", [name for name in SPECS if "tensor" not in name])
def test_int8_activations(build, name, activation):
    """Also the bits of the reference."""
    for variant in ("dot", "tile", "channels"):
        with variants.force(variant):
            for weight, inputs in cases(name, activation):
                for x, index, wanted in inputs:
                    assert torch.equal(check(x, weight, index, build), wanted)


def test_many_rows_and_views(build):
    """More rows of an expert than are multiplied at a time, and each variant of the table."""
    for activation in (None, ASYMMETRIC_TOKEN):
        weight = stack(SPECS["int4 group 32"], 40, 96, activation, count=2)
        x, index = torch.randn(1300, 96), torch.randint(2, (1300, 1))
        index[:1100] = 1
        assert torch.equal(grouped_linear(x, weight, index), one_by_one(x, weight, index))
    weight = stack(SPECS["int4 group 32"], 20, 64)
    for rows, share in ((0, 2), (3, 0)):
        index = torch.zeros(rows, share, dtype=torch.int64)
        assert grouped_linear(torch.randn(rows, 64), weight, index).shape == (0, 20)
    # Rows that are far apart, columns that are, one row for all; some experts; the stored transpose, twice.
    weight, wide = stack(SPECS["int8 row"], 37, 96), torch.randn(9, 200)
    index = torch.randint(5, (9, 2))
    with variants.force("dot"):
        for x in (wide[:, 5:101], wide[:, :192:2], torch.randn(96, 9).t(), wide[:1, :96].expand(9, 96)):
            check(x, weight, index, build)
            check(x, weight, index.t().contiguous().t(), build)
        check(wide[:, :96], weight[1:4], index - 1, build)
        check(wide[:, :96], weight.transpose(1, 2).transpose(1, 2), index, build)
        y = grouped_linear(wide[:, :96], weight[:, 3:20], index)
        assert torch.equal(y, grouped_linear(wide[:, :96], weight, index)[:, 3:20]), "rows that are no stack"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision(build, activation, dtype):
    weight = stack(SPECS["int4 group 32"], 70, 256, ACTIVATIONS[activation], dtype=dtype)
    with variants.force("dot"):
        for index in map(torch.tensor, INDICES.values()):
            check(torch.randn(len(index), 256).to(dtype), weight, index, build)


@NEEDS_LIBRARY
def test_special_values_and_static_activations():
    """Infinities and NaN stay in the rows of their token; rows of no expert are zero whatever the token holds."""
    index = torch.tensor([[0, 1], [0, 1], [9, 1]])
    for activation in ACTIVATIONS.values():
        weight, x = stack(SPECS["int8 row"], 37, 96, activation), torch.ones(3, 96)
        x[1, 5], x[2, 7] = float("inf"), float("nan")
        y = grouped_linear(x, weight, index)
        assert y[:2].isfinite().all()
        assert not y[2:4].isfinite().any()
        assert not y[4].any()
        assert y[5].isnan().all()
    spec = LinearSpec(SPECS["int8 row"], QuantSpec("int8", PerTensor()), static=True)
    weight = AffineQuantizedTensor.from_float(torch.randn(5, 40, 96), spec, act_scale=torch.full((1, 1), 0.02))
    index = torch.tensor(INDICES["some"])
    with variants.force("dot"):
        check(torch.randn(len(index), 96), weight, index, compiled_library.library().instruction_set)


@NEEDS_LIBRARY
def test_what_the_kernels_leave_to_others():
    """Scales that depend on the rows of all experts, blocks that span experts, codes packed along N."""
    per_tensor = stack(SPECS["int8 row"], 40, 96, QuantSpec("int8", PerTensor()))
    transposed = stack(QuantSpec("int4", PerRow()), 96, 40).transpose(1, 2)
    for weight, reason in ((per_tensor, "rows are quantized by themselves"), (transposed, "this weight is transposed")):
        reasons = {k.name: why for k, why in candidates(Problem("grouped_linear", weight.scheme, torch.float32, "cpu"))}
        assert reason in reasons[name_of(weight)]
        index = torch.tensor(INDICES["some"])
        x = torch.randn(len(index), weight.shape[2])
        with record_kernels() as ran:
            y = grouped_linear(x, weight, index).unflatten(0, index.shape)
        assert ran[0] == "grouped_linear:experts_as_linear_layers"
        token, place = torch.where(index == 3)
        assert compute_error(reference.linear(x[token], weight[3], None), y[token, place]) > 100


@NEEDS_LIBRARY
def test_compiled_with_dynamic_shapes():
    """One graph for every number of tokens."""
    offsets = torch.tensor([1, 1, 2, 5, 7], dtype=torch.int32)
    for activation in ACTIVATIONS.values():
        weight = stack(SPECS["int4 group 32"], 64, 128, activation)
        graphs = CompileCounter()
        by_group = torch.compile(torch.nn.functional.grouped_mm, fullgraph=True, dynamic=True, backend=graphs)
        for rows in (7, 9, 40):
            x = torch.randn(rows, 128)
            y = by_group(x, weight.transpose(1, 2), offs=offsets)
            assert torch.equal(y, torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets))
            assert not y[7:].any()
        assert graphs.frame_count == 1


@NEEDS_LIBRARY
def test_tensors_that_do_not_fit_are_refused():
    """What a file or a caller might hand over; nothing reads beyond a tensor."""
    x, index = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int64)
    codes, scale = torch.zeros(4, 8, 32, dtype=torch.int8), torch.ones(4, 8, 1)
    good = {"x": x, "experts": index, "codes": codes, "scale": scale}
    numerics = (None, False, "int8", -127.0, 127.0, "INT")
    assert not experts.cpu_experts_mm(*good.values(), *numerics).any()
    for name, wrong, message in (
        ("x", x[:2], "rows"), ("x", x[:, :31], "codes of a weight of shape"), ("experts", index.int(), "int64"),
        ("experts", index.flatten(), "rows"), ("experts", index.to("meta"), "on the CPU"),
        ("codes", codes[0], "three axes"), ("codes", codes.to(torch.uint8), "codes of a weight of shape"),
        ("codes", codes[:, :7].contiguous(), "scale of a weight of shape"),
        ("scale", scale[:3], "scale of a weight of shape"), ("scale", scale[:, :, 0], "three axes"),
        ("scale", torch.ones(4, 8, 5), "scale of a weight of shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            experts.cpu_experts_mm(*{**good, name: wrong}.values(), *numerics)
    for memory in (codes, scale):
        memory.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="given back"):
            experts.cpu_experts_mm(x, index, codes, scale, *numerics)
