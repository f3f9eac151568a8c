"""Products with packed codes, weight-only and with int8 activations: every width, variant, group and odd size."""

from typing import NamedTuple

import pytest
import torch

import qtorch
from qtorch import PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.kernels import record_kernels
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.cuda.triton.intx_weight_mm import intx_weight_mm
from qtorch.kernels.cuda.weight_only import cuda_weight_linear, weight_arguments
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.quantize import quantize_input
from tests.fast_part import matrix_but
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, LEAST, TOKEN, weight_of
from tests.refusals import refusals


class Variant(NamedTuple):
    config: LaunchConfig
    activation: QuantSpec | None = None


VARIANTS = {
    "mm": Variant(LaunchConfig(16, 16, 32, path="mm")),
    "mm, scaled codes": Variant(LaunchConfig(128, 16, 32, path="mm")),
    "mm, split": Variant(LaunchConfig(16, 32, 64, split_k=3, path="mm")),
    "rows": Variant(LaunchConfig(8, 16, 64, path="rows")),
    "dense": Variant(LaunchConfig(path="dense")),
    "int8": Variant(LaunchConfig(16, 32, 64), TOKEN),
    "int8, other tiles": Variant(LaunchConfig(32, 16, 32), TOKEN),
    "int8 asymmetric": Variant(LaunchConfig(16, 32, 64), ASYMMETRIC_TOKEN),
    "int8 tensor": Variant(LaunchConfig(16, 32, 64), QuantSpec("int8", PerTensor())),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
WIDTHS = [*(f"int{bits}" for bits in range(1, 9)), "uint4", "uint8"]
SIZES = [(1, 1, 1), (3, 5, 5), (17, 101, -1), (33, 136, 17), (20, 264, 33), (7, 50, 10), (20, 1024, 512)]
REAL, FRACTIONAL = (ZeroPointDomain.FLOAT, ZeroPointDomain.OFFSET), ZeroPointDomain.FRACTIONAL


def weight(spec, n, k, variant, device, dtype=torch.float32):
    return weight_of(spec, (n, k), device, VARIANTS[variant].activation, dtype)


def run(x, weight, bias=None):
    if weight.scheme.activation is None:
        return intx_weight_mm(x, *weight_arguments(weight), bias)
    of_weight = weight.qdata, weight.scale, weight.zero_point, weight.scheme.weight.dtype.name
    return int8_grouped_mm(*quantize_input(x, weight), *of_weight, bias, x.dtype)


def check(x, weight, variant, bias=None):
    """Weight-only products are near those of the reference, sums of integers have its bits."""
    config, activation = VARIANTS[variant]
    with forced(config), record_kernels() as ran:
        y = run(x, weight, bias)
    assert ran[-1:] == [f"triton.intx_weight_mm.{config.path}" if activation is None else "triton.int8_grouped_mm"]
    wanted = reference.linear(x, weight, bias)
    assert y.dtype == x.dtype
    assert torch.equal(y, wanted) if activation else compute_error(wanted, y) > LEAST[x.dtype]


@every_variant
@pytest.mark.parametrize("name", matrix_but(("int3", "uint8"), WIDTHS))
def test_every_width(name, variant, device):
    """A tile in one group, and groups that tiles do not divide."""
    x = torch.randn(1 if VARIANTS[variant].activation is None else 3, 256, device=device)
    for granularity in (PerGroup(32), PerRow(), PerGroup(8)):
        check(x, weight(QuantSpec(name, granularity, ASYMMETRIC), 20, 256, variant, device), variant)


@every_variant
@pytest.mark.parametrize("dtype", matrix_but((torch.float16,), LEAST))
def test_dtypes_and_domains(dtype, variant, device):
    rows = 1 if variant == "rows" else 5 if VARIANTS[variant].activation is None else 19
    x, bias = torch.randn(rows, 256, device=device).to(dtype), torch.randn(20, device=device).to(dtype)
    specs = [
        QuantSpec("uint4", PerGroup(64), ASYMMETRIC),
        QuantSpec("int4", PerGroup(128)),
        QuantSpec("int8", PerGroup(32), zero_point_domain=ZeroPointDomain.NONE),
        QuantSpec("uint8", PerRow(), ASYMMETRIC),
    ]
    if VARIANTS[variant].activation is None:
        specs += [QuantSpec("uint4", PerGroup(64), ASYMMETRIC, domain, preserve_zero=False) for domain in REAL]
        specs.append(QuantSpec("int5", PerGroup(32), ASYMMETRIC, ZeroPointDomain.OFFSET))
        specs += [QuantSpec(kind, PerGroup(8), ASYMMETRIC, FRACTIONAL) for kind in ("uint4", "int8")]
    for spec in specs:
        check(x, weight(spec, 20, 256, variant, device, dtype), variant, bias)


NUMBERS = {
    "table": qtorch.nf4_weight_only(32, double_quantize=False),
    "two levels of scales": qtorch.nvfp4_weight_only(),
    "powers of two": qtorch.mxfp4_weight_only(),
    "6 bits": qtorch.fpx_weight_only(3, 2),
    "3 bits": qtorch.fpx_weight_only(2, 0),
    "8 bits": qtorch.float8_weight_only(),
    "8 bits, groups": qtorch.mxfp8_weight_only(),
}


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.activation is None])
@pytest.mark.parametrize("dtype", matrix_but((torch.float16,), LEAST))
def test_numbers_of_a_table(dtype, variant, device):
    """Tables and small floats; also of a size whose groups straddle segments."""
    config = VARIANTS[variant].config
    for name, recipe in NUMBERS.items():
        for n, k in ((20, 256), (33, 160)):
            x, bias = torch.randn(1 if variant == "rows" else 19, k, device=device).to(dtype), torch.randn(n).to(dtype)
            of_numbers, bias = recipe.apply(torch.randn(n, k).to(dtype)).to(device), bias.to(device)
            with forced(config), record_kernels() as ran:
                y = cuda_weight_linear(x, of_numbers, bias)
            assert ran[-1:] == [f"triton.intx_weight_mm.{config.path}"]
            assert y.dtype == dtype
            assert compute_error(reference.linear(x, of_numbers, bias), y) > LEAST[dtype], name
    codes, one = torch.zeros(4, 20, dtype=torch.uint8, device=device), torch.ones(4, 1, device=device)
    with pytest.raises(ValueError, match=r"the table must have shape \(16,\)"):
        intx_weight_mm(x[:, :40], codes, one, one[:, 0], "uint4", 0.0, "TABLE")


@every_variant
@pytest.mark.parametrize("size", matrix_but(((3, 5, 5), (33, 136, 17)), SIZES), ids=str)
def test_odd_sizes(size, variant, device):
    """Groups of fewer than 32 codes, that straddle segments, and of more than are unrolled."""
    n, k, group = size
    for name, rows in (("uint4", 1), ("int3", 19), ("int8", 17)):
        x, bias = torch.randn(1 if variant == "rows" else rows, k, device=device), torch.randn(n, device=device)
        check(x, weight(QuantSpec(name, PerGroup(group), ASYMMETRIC), n, k, variant, device), variant, bias)


@pytest.mark.parametrize("variant", matrix_but(("mm", "int8 asymmetric"), VARIANTS))
def test_strides(variant, device):
    """Rows of a larger matrix, columns of one, and a weight cut from another."""
    whole = weight(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), 40, 128, variant, device)
    wide, rows = torch.randn(6, 300, device=device), 1 if variant == "rows" else 3
    for x in (wide[::2, 40:168][:rows], wide[:, ::2][:rows, :128], wide.t()[:128, :rows].t()):
        check(x, whole, variant)
        check(x, whole[5:31:2], variant)
    if VARIANTS[variant].activation is None:
        check(wide[:rows, :128], weight(QuantSpec("int8", PerRow()), 128, 48, variant, device).t(), variant)


def test_one_row_parts_and_the_largest_sums(device):
    """A configuration for one row, met by two."""
    of_groups, x = weight(QuantSpec("int4", PerGroup(32)), 20, 64, "rows", device), torch.randn(2, 64, device=device)
    with forced(VARIANTS["rows"].config):
        assert compute_error(reference.linear(x, of_groups, None), run(x, of_groups)) > 95
    # The same bits each time, however the contracted axis is shared.
    of_groups, x = weight(QuantSpec("int4", PerGroup(32)), 20, 512, "mm", device), torch.randn(3, 512, device=device)
    with forced(VARIANTS["mm, split"].config):
        first = run(x, of_groups)
        assert all(torch.equal(run(x, of_groups), first) for _ in range(3))
    # All codes at their bounds: sums that fp32 could not hold.
    k = 4096
    xq, one = torch.full((2, k), -128, dtype=torch.int8, device=device), torch.ones(2, 1, device=device)
    codes = torch.full((3, k), 255, dtype=torch.uint8, device=device)
    codes[0, 0] = 254
    with forced(VARIANTS["int8"].config, block_k=128):
        y = int8_grouped_mm(xq, one, None, codes, one[:1].expand(3, 1), None, "uint8", None, torch.float32)
    sums = torch.full((2, 3), -128 * 255 * k, device=device, dtype=torch.int32)
    sums[:, 0] += 128
    assert torch.equal(y, sums.float())


@pytest.mark.parametrize("activation", [None, TOKEN], ids=["weight-only", "int8"])
def test_empty(activation, device):
    weight = weight_of(QuantSpec("int4"), (20, 64), device, activation)
    assert run(torch.empty(0, 64, device=device), weight).shape == (0, 20)
    codes, scale = torch.empty(3, 0, dtype=torch.int8, device=device), torch.ones(3, 1, device=device)
    for bias in (None, torch.randn(3, device=device)):
        if activation is None:
            y = intx_weight_mm(torch.empty(2, 0, device=device), codes, scale, None, "int8", 0.0, "NONE", bias)
        else:
            y = int8_grouped_mm(codes[:2], scale[:2], None, codes, scale, None, "int8", bias, torch.float32)
        assert torch.equal(y, (torch.zeros(3, device=device) if bias is None else bias).expand(2, 3))


def test_errors_of_products(device):
    x = torch.randn(2, 64, device=device)
    codes, scale = torch.ones(6, 32, dtype=torch.uint8, device=device), torch.ones(6, 2, device=device)
    good = {"x": x, "qdata": codes, "scale": scale, "zero_point": None, "dtype": "uint4", "middle": 8.0}
    refusals(
        intx_weight_mm, {**good, "domain": "INT", "bias": None},
        ("x", x.long(), r"x must be a matrix of float32 or .* got shape \(2, 64\) of torch.int64"),
        ("x", torch.cat((x, x), 1), r"qdata must have shape \(6, 64\), got \(6, 32\)"),
        ("qdata", codes.view(torch.int8), r"qdata must be a matrix of uint8, got shape \(6, 32\) of torch.int8"),
        ("scale", torch.ones(6, 3, device=device), r"groups dividing K, got \(6, 3\) for N, K = \(6, 64\)"),
        ("scale", torch.ones(5, 2, device=device), r"shape \(N, groups\) or \(1, groups\), .* got \(5, 2\)"),
        ("zero_point", scale[:, :1], r"zero_point must have shape \(6, 2\), got \(6, 1\)"),
        ("domain", "REAL", "a domain of .* got 'REAL'"), ("bias", scale[0], r"bias must have shape \(6,\), got \(2,\)"),
        ("scale", scale.to("meta"), "all tensors must be on one device, got .* scale on meta"),
        ("x", torch._neg_view(x), r"x of shape \(2, 64\) is a lazy negative"),
        ("scale", torch._to_functional_tensor(scale), r"scale of shape \(6, 2\) has no memory"),
    )  # fmt: skip
    xq, xs = torch.ones(2, 64, dtype=torch.int8, device=device), torch.ones(2, 1, device=device)
    codes, ws = torch.ones(6, 32, dtype=torch.uint8, device=device), torch.ones(6, 2, device=device)
    of_weight = {"qdata": codes, "ws": ws, "wz": None, "weight_dtype": "int4"}
    refusals(
        int8_grouped_mm,
        {"xq": xq, "xs": xs, "xz": None, **of_weight, "bias": None, "dtype": torch.float32},
        ("xq", xq.float(), r"xq must be a matrix of int8, got shape \(2, 64\) of torch.float32"),
        ("xs", xs[:1].expand(3, 1), r"xs must have shape \(2, 1\) or \(1, 1\), got \(3, 1\)"),
        ("qdata", codes[:, :31], r"qdata must have shape \(6, 32\), got \(6, 31\)"),
        ("ws", ws[:5], r"must have shape \(N, groups\), groups dividing K, got \(5, 2\) for N, K = \(6, 64\)"),
        ("ws", ws[:, :1].expand(6, 3), r"groups dividing K, got \(6, 3\)"),
        ("wz", ws[:, :1], r"zero_point must have shape \(6, 2\), got \(6, 1\)"),
        ("ws", ws.to("meta"), "all tensors must be on one device, got .* ws on meta"),
    )
