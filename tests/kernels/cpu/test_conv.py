"""Compiled convolutions: exact in int32, the bits of the product of windows, in every build that this machine runs."""

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import observed
from qtorch.dtypes import AffineQuantizedTensor, ConvWeight
from qtorch.kernels.conv import Window, from_matrix, image_conv, multiply_windows, prepare_conv, to_matrix
from qtorch.kernels.linear import reference
from tests.fast_part import matrix_but
from tests.kernels.cpu.builds import NEEDS_LIBRARY

ASYMMETRIC = qtorch.MappingType.ASYMMETRIC
WEIGHT = qtorch.QuantSpec("int8", qtorch.PerRow(), quant_min=-127)
SYMMETRIC_STATIC = qtorch.QuantSpec("int8", qtorch.PerTensor(), quant_min=-127)
STATIC = {
    "symmetric": (SYMMETRIC_STATIC, None),
    "asymmetric": (qtorch.QuantSpec("int8", qtorch.PerTensor(), ASYMMETRIC, quant_min=-100, quant_max=99), -37),
}
DYNAMIC = {
    "symmetric": qtorch.QuantSpec("int8", qtorch.PerAxis(0), quant_min=-127),
    "asymmetric": qtorch.QuantSpec("int8", qtorch.PerAxis(0), ASYMMETRIC),
}
# (channels, features, kernel, options, shape of the input): odd sizes, one pixel, channels that are no multiples of 4
# or 16, strides, dilation, groups, depthwise, many windows.
CASES = [
    (3, 16, 7, {"stride": 2, "padding": 3}, (2, 3, 23, 19)), (16, 24, 3, {"padding": 1}, (1, 16, 9, 11)),
    (64, 64, 3, {"padding": 1}, (2, 64, 10, 10)), (64, 130, 1, {}, (1, 64, 8, 9)),
    (10, 20, (2, 5), {"stride": (2, 1), "dilation": (2, 3), "groups": 2}, (2, 10, 17, 20)),
    (16, 8, 3, {"groups": 4, "padding": (0, 2)}, (1, 16, 6, 5)),
    (70, 70, 3, {"groups": 70, "padding": 1}, (2, 70, 9, 8)),
    (33, 33, 5, {"groups": 33, "padding": 2, "stride": 2}, (1, 33, 9, 8)), (12, 24, 3, {"groups": 12}, (1, 12, 5, 5)),
    (8, 8, 3, {"padding": "same"}, (1, 8, 6, 7)), (8, 8, (2, 4), {"padding": "same"}, (1, 8, 6, 7)),
    (1, 1, 1, {}, (1, 1, 1, 1)), (1, 5, 3, {}, (3, 1, 3, 3)),
    (128, 96, 3, {"stride": 2, "padding": 1}, (1, 128, 7, 7)), (40, 40, 1, {"stride": 2}, (1, 40, 9, 9)),
]  # fmt: skip


def prepared(conv: nn.Module, x: Tensor) -> tuple[Tensor, Window]:
    about = (conv.stride, conv.padding, conv.dilation, conv.groups, "conv")
    return prepare_conv(x.dim() - 2, x, conv.weight.scheme.shape, *about)


def reference_conv(x: Tensor, conv: nn.Module) -> Tensor:
    """By the reference of linear layers, window by window."""
    weight, (padded, window) = conv.weight, prepared(conv, x)
    size = weight.scheme.shape[0] // window.groups
    parts = [weight[g * size : (g + 1) * size].matrix for g in range(window.groups)]
    with torch.no_grad():
        y = multiply_windows(padded, window, lambda rows, group: reference.linear(rows, parts[group], None))
    return y if conv.bias is None else y + conv.bias.detach().reshape(-1, *(1,) * (y.dim() - 2))


def with_static(conv: nn.Module, name: str, scale: float = 0.03) -> nn.Module:
    """The convolution with a static activation."""
    spec, zero = STATIC[name]
    matrix = AffineQuantizedTensor.from_float(
        to_matrix(conv.weight.detach()), qtorch.LinearSpec(WEIGHT, spec, static=True), torch.full((1, 1), scale),
        None if zero is None else torch.full((1, 1), zero, dtype=torch.int8),
    )  # fmt: skip
    conv.weight = nn.Parameter(ConvWeight.of(matrix, conv.weight.shape), False)
    return conv


def with_dynamic(conv: nn.Module, spec: qtorch.QuantSpec) -> nn.Module:
    """The convolution with a scale for each image."""
    conv.weight = nn.Parameter(ConvWeight.from_float(conv.weight.detach(), qtorch.LinearSpec(WEIGHT, spec)), False)
    return conv


def images(shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (torch.randn(shape) * 1.5 + 0.3).to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def run(conv: nn.Module, x: Tensor, build: str) -> Tensor:
    """Its result, by a compiled kernel for the whole convolution."""
    with qtorch.kernels.record_kernels() as ran, torch.no_grad():
        y = conv(x)
    depthwise = conv.groups == conv.in_channels == conv.out_channels > 1
    assert ran == ["conv:cpu_conv", "cpu_conv", f"cpu_conv.{build}.{'depthwise' if depthwise else 'dense'}"]
    return y


def every_case(images_of: int | None = None) -> Iterator[tuple[nn.Module, Tensor]]:
    """A convolution of each case, with a bias or without, and images in either order of memory."""
    for index, (channels, features, kernel, options, shape) in enumerate(CASES):
        conv = nn.Conv2d(channels, features, kernel, bias=index % 2 == 0, **options)
        yield conv, images((images_of or shape[0], *shape[1:]), channels_last=index % 3 == 0)


@pytest.mark.parametrize("name", STATIC)
def test_static_has_the_bits_of_the_windows(build: str, name: str) -> None:
    for conv, x in every_case():
        conv, contiguous = with_static(conv, name), x.is_contiguous()
        y = run(conv, x, build)
        assert torch.equal(y, reference_conv(x, conv)), conv
        assert y.is_contiguous() or not contiguous
        other = torch.channels_last if contiguous else torch.contiguous_format
        assert torch.equal(y, run(conv, x.contiguous(memory_format=other), build))


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_scale_for_each_image_has_the_bits_of_torch_operators(build: str, name: str) -> None:
    for conv, x in every_case(3):
        conv = with_dynamic(conv, DYNAMIC[name])
        x[1] *= 7
        y = run(conv, x, build)
        padded, window = prepared(conv, x)
        with torch.no_grad():
            assert torch.equal(y, image_conv(padded, conv.weight, conv.bias, window)), conv
        # Each image is by itself.
        assert torch.equal(y[1:2], run(conv, x[1:2], build))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(build: str, dtype: torch.dtype) -> None:
    for channels_last, groups in itertools.product((False, True), (1, 20)):
        make = lambda bias, groups=groups: nn.Conv2d(20, 20, 3, padding=1, groups=groups, bias=bias).to(dtype)  # noqa: E731
        conv, x = with_static(make(True), "asymmetric"), images((2, 20, 7, 9), channels_last, dtype)
        assert torch.equal(run(conv, x, build), reference_conv(x, conv))
        conv = with_dynamic(make(False), DYNAMIC["asymmetric"])
        y = run(conv, x, build)
        with qtorch.kernels.cpu.compiled_library.use(None), torch.no_grad():
            assert torch.equal(y, conv(x))


def test_one_axis_and_weights_alone(build: str) -> None:
    for conv in (nn.Conv1d(6, 9, 5, stride=2, padding=2), nn.Conv1d(9, 9, 4, groups=9, dilation=3)):
        conv = with_static(conv, "asymmetric")
        x = torch.randn(2, conv.in_channels, 31)
        y = run(conv, x, build)
        assert torch.equal(y, reference_conv(x, conv))
        assert torch.equal(y[0], conv(x[0]))
    # Instructions that add pairs of products in 16 bits would saturate.
    for groups, sign in itertools.product((1, 64), (1.0, -1.0)):
        conv = nn.Conv2d(64, 64, 3, groups=groups, bias=False)
        nn.init.constant_(conv.weight, sign)
        conv = with_static(conv, "symmetric", 1.0)
        y = run(conv, torch.full((1, 64, 4, 4), 500.0), build) / conv.weight.scale.flatten()[0]
        assert (y.round() == sign * 127 * 127 * 9 * (64 // groups)).all()
    # As exact as fp32, in the order of the input.
    for conv, images in every_case():
        qtorch.quantize_(conv, {"weight": qtorch.int8_weight_only()})
        plain = copy.deepcopy(conv)
        plain.weight = nn.Parameter(conv.weight.dequantize())
        direct = conv.groups == 1 or conv.in_channels // conv.groups % 4 == 0
        variant = build if direct else "kept" if conv.in_channels == conv.groups else "torch"
        for order in (torch.contiguous_format, torch.channels_last):
            x = images.contiguous(memory_format=order)
            with torch.no_grad(), qtorch.kernels.record_kernels() as ran:
                y = conv(x)
            assert ran[-1] == f"cpu_weight_only_conv.{variant}"
            torch.testing.assert_close(y.double(), plain.double()(x.double()), rtol=1e-5, atol=3e-6)
            assert order is torch.channels_last or y.is_contiguous()


def test_strided_and_empty_inputs() -> None:
    conv = with_static(nn.Conv2d(6, 8, 3, padding=1), "asymmetric")
    whole = torch.randn(4, 12, 20, 22)
    views = whole[:, ::2], whole[::2, :6, 1:9, ::3], whole[:, :6].mT, whole[:1, :6].expand(3, -1, -1, -1)
    for x in views:
        assert torch.equal(conv(x), reference_conv(x, conv))
    conv = with_static(nn.Conv2d(6, 8, 3, padding=1), "asymmetric")
    assert conv(torch.randn(0, 6, 5, 5)).shape == (0, 8, 5, 5)
    conv = with_dynamic(nn.Conv2d(6, 8, 3, padding=2), DYNAMIC["asymmetric"])
    assert conv(torch.randn(0, 6, 5, 5)).shape == (0, 8, 7, 7)
    with torch.no_grad():  # windows of nothing but padding
        assert torch.equal(conv(torch.randn(2, 6, 0, 5)), conv.bias.reshape(1, -1, 1, 1).expand(2, 8, 2, 7))
    weight = torch.randn(5, 3, 2, 4)
    assert torch.equal(from_matrix(to_matrix(weight), weight.shape), weight)


@NEEDS_LIBRARY
def test_not_finite() -> None:
    """Under a static scale, windows with a NaN or an infinity are NaN, of their group; others are as without. With a
    scale for each image, the whole image is."""
    for groups in (1, 2, 8):
        conv = with_static(nn.Conv2d(8, 8, 3, padding=1, groups=groups), "asymmetric")
        clean = torch.randn(2, 8, 6, 6)
        x = clean.clone()
        x[0, 3, 2, 2], x[1, 7, 5, 0] = float("nan"), float("-inf")
        y, expected = conv(x), reference_conv(x, conv)
        assert torch.equal(y.isnan(), expected.isnan())
        assert 0 < int(y.isnan().sum()) < y.numel()
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())
        conv = with_dynamic(nn.Conv2d(8, 8, 3, padding=1, groups=groups), DYNAMIC["asymmetric"])
        x[1] = clean[1]
        y = conv(x)
        assert y[0].isnan().all()
        assert torch.equal(y[1], conv(clean)[1])


@NEEDS_LIBRARY
def test_gradients() -> None:
    """Straight through the quantization, as those of the dequantized weight."""
    conv = with_static(nn.Conv2d(6, 8, 3, padding=1, stride=2), "symmetric")
    plain = nn.Conv2d(6, 8, 3, padding=1, stride=2)
    plain.weight, plain.bias = nn.Parameter(conv.weight.dequantize()), nn.Parameter(conv.bias.detach().clone())
    x, z = (torch.randn(2, 6, 7, 7, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    grad = torch.randn(2, 8, 4, 4)
    conv(x).backward(grad)
    plain(z).backward(grad)
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(conv.bias.grad, plain.bias.grad)


@NEEDS_LIBRARY
def test_weights_that_change() -> None:
    """The packed weight is made anew after a write, and for a copy."""
    conv = with_static(nn.Conv2d(6, 8, 3), "symmetric")
    x = torch.randn(1, 6, 5, 5)
    before = conv(x)
    other = copy.deepcopy(conv)
    conv.weight.qdata.neg_()
    assert torch.equal(conv(x) - conv.bias.reshape(-1, 1, 1), reference_conv(x, conv) - conv.bias.reshape(-1, 1, 1))
    assert not torch.equal(conv(x), before)
    assert torch.equal(other(x), before)


@NEEDS_LIBRARY
@pytest.mark.parametrize("static", matrix_but((True,), (True, False)))
def test_compiled_in_one_graph(static: bool) -> None:
    convs = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
    first, last = (with_static(c, "asymmetric") if static else with_dynamic(c, DYNAMIC["symmetric"]) for c in convs)
    model = nn.Sequential(first, nn.ReLU(), last)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape, channels_last in itertools.product(((2, 6, 9, 9), (5, 6, 11, 8)), (False, True)):
        x = images(shape, channels_last)
        with torch.no_grad():
            y = compiled(x)
            assert torch.equal(y, model(x))
        assert y.is_contiguous() != channels_last


STATIC_RECIPE = qtorch.int8_static_activation_int8_weight(act_mapping_type=ASYMMETRIC)


@NEEDS_LIBRARY
@pytest.mark.parametrize("conv, size, recipe, kernel", [
    (nn.Conv3d(4, 4, 3), 4, qtorch.int8_static_activation_int8_weight(scale=0.03), "linear:cpu_int8_mm"),
    (nn.Conv2d(32, 8, 3), 5, qtorch.int8_dynamic_activation_int8_weight(), "linear:cpu_int8_mm"),
    (nn.Conv3d(4, 6, 3, padding=1), 5, qtorch.int8_dynamic_activation_int8_weight(act_granularity=qtorch.PerAxis(0)),
     "conv:image_conv"),
    (nn.Conv2d(8, 16, 3, padding=1), 12, STATIC_RECIPE, "conv:cpu_conv"),
])  # fmt: skip
def test_the_error_is_that_of_8_bits(conv: nn.Module, size: int, recipe: object, kernel: str) -> None:
    """Three axes, and a scale for each window, are products of windows; or images are, by torch operators."""
    model, x = nn.Sequential(copy.deepcopy(conv)), torch.randn(2, conv.in_channels, *[size] * len(conv.kernel_size))
    qtorch.quantize_(model, {"0": observed(recipe, [x]) if recipe is STATIC_RECIPE else recipe})
    with qtorch.kernels.record_kernels() as ran, torch.no_grad():
        y = model(x)
    assert kernel in ran
    assert any(name.startswith("cpu_conv") for name in ran) == (kernel == "conv:cpu_conv")
    assert 30 < qtorch.compute_error(conv(x).detach(), y) < 60


@NEEDS_LIBRARY
def test_weight_only_by_torch() -> None:
    """16-bit images, and formats of other packages: of the dequantized weight, made on each call or kept."""
    recipes = qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=18)
    orders = itertools.product((False, True), ((0, "torch"), (1 << 20, "float_copy")))
    for (groups, recipe), (channels_last, (limit, word)) in itertools.product(
        ((1, recipes[0]), (6, recipes[0]), (3, recipes[1])), orders
    ):
        conv = nn.Conv2d(6, 12, 3, padding=1, groups=groups).to(torch.bfloat16)
        qtorch.quantize_(conv, {"weight": recipe})
        plain = copy.deepcopy(conv)
        plain.weight = nn.Parameter(conv.weight.dequantize())
        x = images((2, 6, 8, 7), channels_last, torch.bfloat16)
        with qtorch.config.patch(float_copy_bytes=limit), qtorch.kernels.record_kernels() as ran, torch.no_grad():
            y = conv(x)
        assert ran[-1] == f"cpu_weight_only_conv.{'kept' if groups == 6 else word}"
        torch.testing.assert_close(y, plain(x), rtol=2e-2, atol=2e-2)
        assert y.is_contiguous() != channels_last
