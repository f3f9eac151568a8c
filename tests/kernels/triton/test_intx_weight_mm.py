"""Weight-only products of packed codes: every width, variant, layout of groups and odd size against the reference."""

import pytest
import torch

from qtorch import PerGroup, PerRow, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.intx_weight_mm import intx_weight_mm
from qtorch.kernels.cuda.weight_only import weight_arguments
from qtorch.kernels.linear import reference
from qtorch.primitives import ZeroPointDomain, compute_error

from .quantized_weights import ASYMMETRIC, LEAST, refusals, weight_of

VARIANTS = {
    "mm": LaunchConfig(16, 16, 32, path="mm"),
    "mm, scaled codes": LaunchConfig(128, 16, 32, path="mm"),
    "mm, split": LaunchConfig(16, 32, 64, split_k=3, path="mm"),
    "mv": LaunchConfig(1, 16, 64, path="mv"),
    "dense": LaunchConfig(path="dense"),
}


def run(x, weight, bias=None):
    return intx_weight_mm(x, *weight_arguments(weight), bias)


def check(x, weight, bias, variant, least):
    with forced(VARIANTS[variant]), record_kernels() as ran:
        y = run(x, weight, bias)
    assert ran == [f"triton.intx_weight_mm.{VARIANTS[variant].path}"]
    assert y.dtype == x.dtype
    assert compute_error(reference.linear(x, weight, bias), y) > least


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [*(f"int{bits}" for bits in range(1, 9)), "uint4", "uint8"])
def test_every_width(name, variant, device):
    """A tile in one group, and groups that tiles do not divide."""
    x = torch.randn(1, 256, device=device)
    for granularity in (PerGroup(32), PerRow(), PerGroup(8)):
        weight = weight_of(QuantSpec(name, granularity, ASYMMETRIC), (20, 256), device)
        check(x, weight, None, variant, LEAST[torch.float32])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_domains(dtype, variant, device):
    rows = 1 if variant == "mv" else 5
    x, bias = torch.randn(rows, 512, device=device).to(dtype), torch.randn(44, device=device).to(dtype)
    none = ZeroPointDomain.NONE
    for spec in (
        QuantSpec("uint4", PerGroup(64), ASYMMETRIC),
        QuantSpec("uint4", PerGroup(64), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False),
        QuantSpec("uint4", PerGroup(64), ASYMMETRIC, ZeroPointDomain.OFFSET, preserve_zero=False),
        QuantSpec("int5", PerGroup(32), ASYMMETRIC, ZeroPointDomain.OFFSET),
        QuantSpec("uint4", PerGroup(64), ASYMMETRIC, ZeroPointDomain.FRACTIONAL),
        QuantSpec("int8", PerGroup(8), ASYMMETRIC, ZeroPointDomain.FRACTIONAL),
        QuantSpec("int4", PerGroup(128)),
        QuantSpec("int8", PerGroup(32), zero_point_domain=none),
        QuantSpec("uint8", PerRow(), ASYMMETRIC),
    ):
        check(x, weight_of(spec, (44, 512), device, dtype=dtype), bias, variant, LEAST[dtype])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "n, k, group", [(1, 1, 1), (3, 5, 5), (17, 101, -1), (33, 136, 17), (20, 264, 33), (7, 50, 10)]
)
def test_odd_sizes(n, k, group, variant, device):
    for name, rows in (("uint4", 1), ("int3", 19), ("int8", 17)):
        rows = 1 if variant == "mv" else rows
        spec = QuantSpec(name, PerGroup(group), ASYMMETRIC)
        bias = torch.randn(n, device=device)
        check(torch.randn(rows, k, device=device), weight_of(spec, (n, k), device), bias, variant, LEAST[torch.float32])


@pytest.mark.parametrize("variant", VARIANTS)
def test_strides(variant, device):
    """Rows of a larger matrix, columns of one, and a weight cut from another."""
    spec = QuantSpec("uint4", PerGroup(32), ASYMMETRIC)
    weight = weight_of(spec, (40, 256), device)
    wide = torch.randn(6, 600, device=device)
    rows = 1 if variant == "mv" else 3
    for x in (wide[::2, 40:296][:rows], wide[:, ::2][:rows, :256], wide.t()[:256, :rows].t()):
        check(x, weight, None, variant, LEAST[torch.float32])
        check(x, weight[5:31:2], None, variant, LEAST[torch.float32])
    plain = weight_of(QuantSpec("int8", PerRow()), (256, 48), device)
    check(wide[:rows, :256], plain.t(), None, variant, LEAST[torch.float32])


def test_many_rows_where_only_one_is_taken(device):
    """A configuration for one row, met by two."""
    weight = weight_of(QuantSpec("int4", PerGroup(32)), (20, 64), device)
    x = torch.randn(2, 64, device=device)
    with forced(VARIANTS["mv"]):
        assert compute_error(reference.linear(x, weight, None), run(x, weight)) > 95


def test_parts_are_added_in_order(device):
    """The same bits each time, however the contracted axis is shared."""
    weight = weight_of(QuantSpec("int4", PerGroup(32)), (20, 512), device)
    x = torch.randn(3, 512, device=device)
    with forced(VARIANTS["mm, split"]):
        first = run(x, weight)
        assert all(torch.equal(run(x, weight), first) for _ in range(3))


def test_empty(device):
    weight = weight_of(QuantSpec("int4", PerGroup(32)), (20, 64), device)
    assert run(torch.empty(0, 64, device=device), weight).shape == (0, 20)
    bias = torch.randn(3, device=device)
    codes, scale = torch.empty(3, 0, dtype=torch.int8, device=device), torch.ones(3, 1, device=device)
    x = torch.empty(2, 0, device=device)
    assert torch.equal(intx_weight_mm(x, codes, scale, None, "int8", 0.0, "NONE", bias), bias.expand(2, 3))
    assert torch.equal(intx_weight_mm(x, codes, scale, None, "int8", 0.0, "NONE"), torch.zeros(2, 3, device=device))


def test_errors(device):
    x = torch.randn(2, 64, device=device)
    codes, scale = torch.ones(6, 32, dtype=torch.uint8, device=device), torch.ones(6, 2, device=device)
    good = {"x": x, "qdata": codes, "scale": scale, "zero_point": None, "dtype": "uint4", "middle": 8.0}
    refusals(
        intx_weight_mm,
        {**good, "domain": "INT", "bias": None},
        ("x", x.long(), r"x must be a matrix of float32 or .* got shape \(2, 64\) of torch.int64"),
        ("x", torch.cat((x, x), 1), r"qdata must have shape \(6, 64\), got \(6, 32\)"),
        ("qdata", codes.view(torch.int8), r"qdata must be a matrix of uint8, got shape \(6, 32\) of torch.int8"),
        ("scale", torch.ones(6, 3, device=device), r"groups dividing K, got \(6, 3\) for N, K = \(6, 64\)"),
        ("scale", torch.ones(5, 2, device=device), r"shape \(N, groups\) or \(1, groups\), .* got \(5, 2\)"),
        ("zero_point", scale[:, :1], r"zero_point must have shape \(6, 2\), got \(6, 1\)"),
        ("domain", "REAL", "a domain of .* got 'REAL'"),
        ("bias", scale[0], r"bias must have shape \(6,\), got \(2,\)"),
        ("scale", scale.to("meta"), "all tensors must be on one device, got .* scale on meta"),
        ("x", torch._neg_view(x), r"x of shape \(2, 64\) is a lazy negative"),
        ("scale", torch._to_functional_tensor(scale), r"scale of shape \(6, 2\) has no memory"),
    )
