"""The CUDA kernels of `linear`, on every scheme and layout they accept, against the reference; and where they run."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, BlockSparseLayout, PackedLayout, PerBlock, PerGroup, PerRow, PerTensor
from qtorch.dtypes import LUTQuantizedTensor
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.linear import reference
from qtorch.kernels.linear.block_sparse import block_sparse_int8_scaled_mm, block_sparse_weight_only_mm
from qtorch.kernels.registry import Problem, kernels
from qtorch.primitives import (
    CodebookSpec,
    LinearSpec,
    MappingType,
    QuantSpec,
    ZeroPointDomain,
    compute_error,
    prune_blocks,
)
from tests import every_recipe
from tests.fast_part import matrix_but
from tests.kernels.cpu.operator_cases import dispatched
from tests.kernels.every_scheme import in_every_layout, weights_of_every_scheme
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, LEAST, TOKEN

# Operators of torch, which no interpreter runs: they have tests of their own.
NEED_A_GPU = ("float8_scaled_mm", "semi_sparse_float8_scaled_mm")
# Take few shapes, and have tests of their own.
OF_BLOCKS = ("cuda_block_sparse_int8_mm", "cuda_block_sparse_weight_mm")
KERNELS = {k.name: k for k in kernels("linear") if k.device == "cuda" and k.name not in (*NEED_A_GPU, *OF_BLOCKS)}
OF_QTORCH = ("cuda_int8_mm", "cuda_weight_mm")
LEAST_TAKEN = {"cuda_int8_mm": 10, "cuda_weight_mm": 10, "cuda_number_mm": 20}
TABLES = [every_recipe.make(name, group_size=32).linear_spec() for name in ("nf4_weight_only", "gguf_iq4_nl")]
TABLES.append(LinearSpec(CodebookSpec("uint3", PerGroup(48), table=(-3.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0))))
TABLES += [LinearSpec(CodebookSpec("uint3", PerGroup(48))), LinearSpec(CodebookSpec("uint4", PerGroup(32)))]
TABLES.append(LinearSpec(CodebookSpec("uint2", PerRow())))

FLOAT8 = QuantSpec("float8_e4m3fn", PerGroup(64), zero_point_domain=ZeroPointDomain.NONE, scale_dtype=torch.float32)
EXTRA_SCHEMES = {"float8 tiles": LinearSpec(replace(FLOAT8, granularity=PerBlock((10, 64))), FLOAT8)} | {
    f"{name} {granularity} {activation is not None}": LinearSpec(QuantSpec(name, granularity, mapping), activation)
    for name, granularity, mapping, activation in (
        ("int2", PerGroup(32), MappingType.SYMMETRIC, None), ("uint5", PerGroup(64), ASYMMETRIC, None),
        ("int6", PerRow(), MappingType.SYMMETRIC, None), ("uint4", PerRow(), ASYMMETRIC, None),
        ("int8", PerTensor(), MappingType.SYMMETRIC, None), ("int8", PerGroup(32), MappingType.SYMMETRIC, TOKEN),
        ("int3", PerGroup(32), ASYMMETRIC, ASYMMETRIC_TOKEN),
        ("int6", PerRow(), MappingType.SYMMETRIC, ASYMMETRIC_TOKEN),
    )
}  # fmt: skip


@pytest.mark.parametrize("dtype", matrix_but((torch.float16,), LEAST))
@pytest.mark.parametrize("name", KERNELS)
def test_against_the_reference(name, dtype, device):
    kernel, taken = KERNELS[name], 0
    x, bias = torch.randn(2, 3, 192, device=device).to(dtype), torch.randn(20, device=device).to(dtype)
    extra = [named for scheme, spec in EXTRA_SCHEMES.items() for named in in_every_layout(scheme, spec, dtype, 20)]
    extra += [(str(spec), LUTQuantizedTensor.from_float(torch.randn(20, 192).to(dtype), spec)) for spec in TABLES]
    for scheme, weight in weights_of_every_scheme(dtype, 20) + extra:
        if kernel.rejects(Problem("linear", weight.scheme, dtype, "cuda")) is not None:
            continue
        taken += 1
        weight = weight.to(device)
        with forced(LaunchConfig(16, 32, 64)), record_kernels() as ran:
            y = kernel(x, weight, bias)
        assert ran[0] == f"linear:{name}"
        expected = reference.linear(x, weight, bias)
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        activation = weight.scheme.activation
        if activation is not None and activation.dtype.is_small_integer:
            assert torch.equal(y, expected), scheme
        else:
            assert compute_error(expected, y) > LEAST[dtype], scheme
        if name in LEAST_TAKEN:
            assert ran[-1].startswith("triton.")
    assert taken >= LEAST_TAKEN.get(name, 1)


@pytest.mark.parametrize("name", OF_QTORCH)
def test_a_bias_of_another_dtype_decides_the_result_and_strides_are_read(name, device):
    spec = LinearSpec(QuantSpec("int8", quant_min=-127), TOKEN if name == "cuda_int8_mm" else None)
    weight = AffineQuantizedTensor.from_float(torch.randn(8, 32).bfloat16(), spec).to(device)
    x, bias = torch.randn(2, 32, device=device).bfloat16(), torch.randn(8, device=device)
    with forced(LaunchConfig(16, 32, 32)):
        y = KERNELS[name](x, weight, bias)
    assert y.dtype == torch.float32
    assert compute_error(reference.linear(x.float(), weight, bias), y) > 30
    for strided in (bias.bfloat16().repeat_interleave(3)[1::3], bias[:1].bfloat16().expand(8)):
        assert torch.equal(KERNELS[name](x, weight, strided), KERNELS[name](x, weight, strided.contiguous()))


def test_choices_and_what_does_not_fit(device):
    x = torch.randn(2, 64, device=device)
    cases = {
        "one_product": (LinearSpec(QuantSpec("int8"), TOKEN), LinearSpec(QuantSpec("int8"), ASYMMETRIC_TOKEN)),
        "grouped": (
            LinearSpec(QuantSpec("int8", PerGroup(32)), TOKEN),
            LinearSpec(QuantSpec("uint8", PerRow(), ASYMMETRIC), TOKEN),
            LinearSpec(QuantSpec("int4"), TOKEN, layout=PackedLayout()),
        ),
    }
    for path, specs in cases.items():
        for spec in specs:
            weight = AffineQuantizedTensor.from_float(torch.randn(8, 64), spec).to(device)
            with forced(LaunchConfig(16, 32, 32)), record_kernels() as ran:
                KERNELS["cuda_int8_mm"](x, weight, None)
            assert f"cuda_int8_mm.{path}" in ran
    spec = LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.5))
    weight = AffineQuantizedTensor.from_float(prune_blocks(torch.randn(64, 64), 16, 0.5), spec)
    problem = Problem("linear", weight.scheme, torch.float32, "cuda")
    assert "blocks of 32, 64 or 128" in BLOCK_KERNELS["cuda_block_sparse_weight_mm"].rejects(problem)


def test_operators_are_well_formed_and_compiled(device):
    codes, scale = torch.ones(8, 32, dtype=torch.int8, device=device), torch.rand(8, 2, device=device)
    x = torch.randn(3, 32, device=device)
    xs = torch.rand(3, 1, device=device)
    for op, arguments in {
        "cuda_weight_mm": (x, codes, scale, None, "int8", 0.0, "NONE", None),
        "cuda_int8_mm": (codes[:3], xs, None, codes, scale, None, "int8", None, torch.float32),
        "cuda_quantize_rowwise": (x, torch.int8),
        "cuda_quantize_asymmetric": (x,),
        "cuda_quantize_tilewise": (x, 1, 16, torch.float8_e4m3fn),
        "tile_scaled_mm": (codes, codes, scale, scale, torch.float32),
    }.items():
        torch.library.opcheck(*dispatched(op, arguments))
    # One graph, with the operators in it as they are.
    spec = LinearSpec(QuantSpec("int4", PerGroup(32)), TOKEN)
    of_codes = AffineQuantizedTensor.from_float(torch.randn(8, 64), spec)
    of_table = every_recipe.make("nf4_weight_only", group_size=32).apply(torch.randn(8, 64))
    of_floats = every_recipe.make("mxfp4_weight_only").apply(torch.randn(8, 64))
    for name, launched, weight in (
        ("cuda_int8_mm", "triton.int8_grouped_mm", of_codes.to(device)),
        ("cuda_number_mm", "triton.intx_weight_mm", of_table.to(device)),
        ("cuda_number_mm", "triton.intx_weight_mm", of_floats.to(device)),
    ):
        run = lambda x, name=name, weight=weight: KERNELS[name].function(x, weight, None)  # noqa: E731
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True), forced(LaunchConfig(16, 32, 32)):
            for rows in (5, 3, 20):
                x = torch.randn(rows, 64, device=device)
                with record_kernels() as ran:
                    y = compiled(x)
                assert launched in ran
                assert torch.equal(y, run(x))


REAL_ZERO = QuantSpec("uint4", PerGroup(64), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)

ON_THE_GPU = {
    "int8 weight-only": (LinearSpec(QuantSpec("int8", quant_min=-127)), "triton.intx_weight_mm"),
    "int4 weight-only": (
        LinearSpec(QuantSpec("uint4", PerGroup(64), ASYMMETRIC), layout=PackedLayout()),
        "triton.intx_weight_mm",
    ),
    "int4 real zero": (LinearSpec(REAL_ZERO, layout=PackedLayout()), "triton.intx_weight_mm"),
    "int8 dynamic": (LinearSpec(QuantSpec("int8", quant_min=-127), TOKEN), "triton.int8_scaled_mm"),
    "int8 dynamic, int4": (
        LinearSpec(QuantSpec("int4", PerGroup(32)), ASYMMETRIC_TOKEN, layout=PackedLayout()),
        "triton.int8_grouped_mm",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_THE_GPU)
@pytest.mark.parametrize("rows", [1, 16, 17, 200, 1500])
def test_through_the_registry(name, rows):
    """With the shipped launch configurations, in eager mode, compiled, and in a CUDA graph."""
    spec, kernel = ON_THE_GPU[name]
    weight = torch.randn(520, 1024, device="cuda", dtype=torch.bfloat16)
    quantized = AffineQuantizedTensor.from_float(weight, spec)
    x, bias = torch.randn(rows, 1024, device="cuda").bfloat16(), torch.randn(520, device="cuda").bfloat16()
    with record_kernels() as ran:
        y = functional.linear(x, quantized, bias)
    assert any(name.startswith(kernel) for name in ran), ran
    expected = reference.linear(x, quantized, bias)
    if spec.activation is None:
        assert compute_error(expected, y) > 38
    else:
        assert torch.equal(y, expected)
    assert 12 < compute_error(functional.linear(x.float(), weight.float(), bias.float()), y) < 50

    layer = lambda x: functional.linear(x, quantized, bias)  # noqa: E731
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), y)

    static = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(static)
    static.copy_(2 * x)
    graph.replay()
    assert torch.equal(result, layer(2 * x))


ACTIVATIONS = {"symmetric": TOKEN, "asymmetric": ASYMMETRIC_TOKEN, "none": None}
WEIGHTS = [QuantSpec("int8"), QuantSpec("int8", PerGroup(32)), QuantSpec("int4", PerGroup(64)), QuantSpec("int3")]
BLOCK_KERNELS = {kernel.name: kernel for kernel in kernels("linear") if kernel.name.startswith("cuda_block_sparse")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("spec", matrix_but(WEIGHTS[1:3], WEIGHTS), ids=str)
def test_against_torch(spec, activation, device):
    layout = BlockSparseLayout(64, 0.6)
    linear = LinearSpec(spec, ACTIVATIONS[activation], layout=layout)
    for rows, dtype in ((1, torch.float32), (20, torch.bfloat16)):
        values = prune_blocks(torch.randn(128, 320), 64, 0.6).to(dtype)
        weight = AffineQuantizedTensor.from_float(values, linear).to(device)
        x, bias = torch.randn(rows, 320, device=device).to(dtype), torch.randn(128, device=device).to(dtype)
        kernel = BLOCK_KERNELS["cuda_block_sparse_weight_mm" if activation == "none" else "cuda_block_sparse_int8_mm"]
        assert kernel.rejects(Problem("linear", weight.scheme, dtype, "cuda")) is None
        with forced(LaunchConfig(16)), record_kernels() as ran:
            y = kernel(x, weight, bias)
        assert ran[-1] == "triton.block_sparse_mm"
        if activation == "none":
            expected = block_sparse_weight_only_mm(x, weight, bias)
            assert compute_error(expected, y) > (100 if dtype == torch.float32 else 38)
            x[0, 7] = torch.nan
            with forced(LaunchConfig(16)):
                assert kernel(x, weight, bias)[0].isnan().all()
        else:
            assert torch.equal(y, block_sparse_int8_scaled_mm(x, weight, bias))
