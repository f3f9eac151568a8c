"""Products with experts in Triton: every expert's rows against the reference, whatever the index."""

import pytest
import torch

from qtorch import PerGroup, PerRow, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.experts import cuda_experts_int8_mm, cuda_experts_mm
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.experts_mm import experts_int8_mm, experts_weight_mm
from qtorch.kernels.cuda.weight_only import weight_arguments
from qtorch.kernels.ops.quantize import quantize_input
from qtorch.kernels.registry import Problem, candidates, choose, kernels
from qtorch.primitives import NF4_TABLE, CodebookSpec, ZeroPointDomain, compute_error, nvfp4_spec
from tests.fast_part import matrix_but
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, INDICES, LEAST, TOKEN, of_experts, weight_of
from tests.refusals import refusals

CONFIG = LaunchConfig(16, 32, 32)
KERNELS = {kernel.name: kernel for kernel in kernels("grouped_linear") if kernel.device == "cuda"}

every_index = pytest.mark.parametrize("name", matrix_but(("some", "sorted"), INDICES))


SPECS = {
    "int8": QuantSpec("int8", PerRow()), "uint4": QuantSpec("uint4", PerGroup(32), ASYMMETRIC),
    "short groups": QuantSpec("int4", PerGroup(8)), "NF4": CodebookSpec("uint4", PerGroup(32), NF4_TABLE),
    "tables": CodebookSpec("uint3", PerGroup(32)), "NVFP4": nvfp4_spec(),
    "float8": QuantSpec("float8_e4m3fn", zero_point_domain=ZeroPointDomain.NONE),
}  # fmt: skip


@every_index
@pytest.mark.parametrize("kind", SPECS)
def test_weight_only(kind, name, device):
    weight, experts = weight_of(SPECS[kind], (5, 20, 64), device), torch.tensor(INDICES[name], device=device)
    x = torch.randn(len(experts), 64, device=device)
    kernel = KERNELS["cuda_experts_mm" if kind in list(SPECS)[:3] else "cuda_number_experts_mm"]
    assert kernel.rejects(Problem("grouped_linear", weight.scheme, x.dtype, "cuda")) is None
    with forced(CONFIG), record_kernels() as ran:
        y = kernel(x, weight, experts)
    assert ran == [f"grouped_linear:{kernel.name}", "cuda_experts_mm", "triton.experts_weight_mm"]
    wanted = of_experts(x, weight, experts)
    zero = (experts.reshape(-1) < 0) | (experts.reshape(-1) > 4)
    assert not y[zero].any()
    assert zero.all() or compute_error(wanted, y) > LEAST[torch.float32]


@every_index
@pytest.mark.parametrize("activation", [TOKEN, ASYMMETRIC_TOKEN])
@pytest.mark.parametrize(
    "spec", [QuantSpec("int8", PerRow()), QuantSpec("uint8", PerRow(), ASYMMETRIC), QuantSpec("int4", PerGroup(32))]
)
def test_int8_activations_are_exact(spec, activation, name, device):
    weight, experts = weight_of(spec, (5, 20, 64), device, activation), torch.tensor(INDICES[name], device=device)
    x = torch.randn(len(experts), 64, device=device)
    xq, xs, xz = quantize_input(x, weight)
    of_weight = (weight.qdata, weight.scale, weight.zero_point, spec.dtype.name)
    with forced(CONFIG), record_kernels() as ran:
        y = cuda_experts_int8_mm(xq, experts, xs, xz, *of_weight, x.dtype)
    assert ran == ["cuda_experts_int8_mm", "triton.experts_int8_mm"]
    assert torch.equal(y, of_experts(x, weight, experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", matrix_but((3, 8), (2, 3, 5, 8)))
def test_dtypes_widths_and_strides(bits, dtype, device):
    """K is odd for packed codes, x is a slice, and tiles hold more rows than any expert has."""
    spec = QuantSpec(f"uint{bits}", PerRow(), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    weight = weight_of(spec, (3, 10, 44), device, dtype=dtype)
    x = torch.randn(9, 100, device=device).to(dtype)[:, 3:91:2]
    experts = torch.randint(3, (9, 2), device=device)
    with forced(LaunchConfig(64, 32, 64)):
        y = cuda_experts_mm(x, experts, *weight_arguments(weight))
    assert y.dtype == dtype
    assert compute_error(of_experts(x, weight, experts), y) > LEAST[dtype]


def test_many_experts_and_the_choice(device):
    """More experts than rows, and a number that is no power of two."""
    weight = weight_of(QuantSpec("int8", PerRow()), (37, 4, 32), device)
    x, experts = torch.randn(5, 32, device=device), torch.randint(37, (5, 4), device=device)
    y = cuda_experts_mm(x, experts, *weight_arguments(weight))
    assert compute_error(of_experts(x, weight, experts), y) > LEAST[torch.float32]
    if torch.cuda.is_available():
        pytest.skip("the choice for a machine without a GPU")
    for activation, name in ((None, "cuda_experts_mm"), (TOKEN, "cuda_experts_int8_mm")):
        scheme = weight_of(QuantSpec("int4", PerGroup(32)), (2, 8, 64), "cpu", activation).scheme
        problem = Problem("grouped_linear", scheme, torch.bfloat16, "cuda")
        reasons = {kernel.name: reason for kernel, reason in candidates(problem)}
        assert reasons[name] is None or "CUDA" in reasons[name] or "GPU" in reasons[name]
        assert choose(problem).name in (name, "experts_as_linear_layers")


@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_to_multiply(rows, device):
    codes, scale = torch.zeros(3, 4, 0, dtype=torch.int8, device=device), torch.ones(3, 4, 1, device=device)
    x, experts = torch.zeros(rows, 0, device=device), torch.zeros(rows, 2, dtype=torch.int64, device=device)
    assert torch.equal(
        experts_weight_mm(x, experts, codes, scale, None, "int8", 0.0, "NONE"), torch.zeros(2 * rows, 4, device=device)
    )


def test_arguments_are_checked(device):
    x, experts = torch.zeros(2, 32, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    codes, scale = torch.zeros(3, 4, 32, dtype=torch.int8, device=device), torch.ones(3, 4, 1, device=device)
    good = {"x": x, "experts": experts, "qdata": codes, "scale": scale, "zero_point": None}
    refusals(
        experts_weight_mm, {**good, "dtype": "int8", "middle": 0.0, "domain": "NONE"},
        ("x", x[0], "x must be a matrix"), ("experts", experts[:1], r"experts must be integers of shape \(T, R\)"),
        ("experts", experts.float(), "experts must be integers"), ("qdata", codes[0], "must have three axes"),
        ("qdata", codes[:, :, :31], "qdata must have shape"), ("scale", scale[:2], "scale must have shape"),
    )  # fmt: skip
    xs = torch.ones(2, 1, device=device)
    with pytest.raises(ValueError, match=r"scale must have shape \(N, groups\)"):
        experts_int8_mm(x.to(torch.int8), experts, xs, None, codes, scale[:2], None, "int8", torch.float32)
