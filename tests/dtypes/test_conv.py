"""Convolutions with a quantized weight: torch's of the dequantized weight, or exact sums of the windows' codes."""

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, PerRow, QuantSpec, compute_error, nf4_weight_only, quantize_
from qtorch import ZeroPointDomain as Z
from qtorch.dtypes import ConvWeight
from qtorch.kernels import conv, record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.linear import reference
from tests import every_recipe
from tests.dtypes.specs import OTHER_LAYOUTS, SPECS, WEIGHT_ONLY
from tests.dtypes.specs import quantized as quantized_matrix
from tests.refusals import message_of
from tests.rounding import assert_same_sums

BUILT = compiled_library.library() is not None
COMPILED = (
    "int8 row", "int8 tensor", "uint4 group", "uint4 group, real zero", "uint4 group, packed",
    "uint4 group, int8 scales", "int3 group, packed",
)  # fmt: skip
WEIGHT_ONLY_CONV = "cpu_weight_only_conv" if BUILT else "dequantized_conv"
INTEGERS = [name for name in SPECS if name not in WEIGHT_ONLY]
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FUNCTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
OPTIONS = [
    {}, {"stride": 2, "padding": 1}, {"padding": "same"}, {"padding": "same", "dilation": 3},
    {"padding": "valid", "dilation": 2}, {"groups": 2}, {"groups": 4, "stride": 2, "padding": 2, "dilation": 2},
]  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def quantized(name: str, *shape: int) -> ConvWeight:
    """Normal numbers in the scheme `SPECS[name]`."""
    return ConvWeight.of(quantized_matrix(name, shape[0], torch.Size(shape[1:]).numel()), shape)


def operands(name: str, ndim: int, groups: int = 1) -> tuple[Tensor, ConvWeight, Tensor]:
    """For kernels of odd and even sizes, whose matrices have rows of 64 elements, or a multiple."""
    kernel = {1: (4,), 2: (4, 2), 3: (2, 4, 2)}[ndim]
    return (
        torch.randn(2, 32 * groups, *(9, 8, 7)[:ndim]),
        quantized(name, 8 * groups, 32, *kernel),
        torch.randn(8 * groups),
    )


def magnitude(ndim: int, x: Tensor, weight: ConvWeight, bias: Tensor, **options) -> Tensor:
    """What the sums of a convolution are made of, in fp64."""
    return FUNCTIONS[ndim](x.double().abs(), weight.dequantize().double().abs(), bias.double().abs(), **options)


def of_reference(
    x: Tensor, weight: ConvWeight, bias: Tensor, stride: int = 1, padding: int | str = 0, dilation: int = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Window by window, and `reference.linear`."""
    n, channels, *kernel = weight.shape
    reach = [dilation * (k - 1) for k in kernel]
    before = [0 if padding == "valid" else r // 2 if padding == "same" else padding for r in reach]
    after = [r - r // 2 if padding == "same" else b for r, b in zip(reach, before)]
    x = functional.pad(x, list(itertools.chain(*zip(reversed(before), reversed(after)))))
    counts = [(size - r - 1) // stride + 1 for size, r in zip(x.shape[2:], reach)]
    rows = []
    for image, position in itertools.product(x, itertools.product(*map(range, counts))):
        start = [p * stride for p in position]
        window = image[(slice(None), *(slice(s, s + r + 1, dilation) for s, r in zip(start, reach)))]
        rows.append(torch.stack([part.movedim(0, -1).flatten() for part in window.split(channels)]))
    parts = []
    for group, of_group in enumerate(torch.stack(rows, 1)):
        size = n // groups
        parts.append(reference.linear(of_group, weight[group * size : (group + 1) * size].matrix, None))
    return (torch.cat(parts, 1) + bias).reshape(len(x), *counts, n).movedim(-1, 1)


@every_option
@pytest.mark.parametrize("ndim", CONVS)
@pytest.mark.parametrize("name", ["int8 row, int8 token", "int4 group, int8 token, packed", "int8 row, static int8"])
def test_sums_of_codes_are_exact(name: str, ndim: int, options: dict) -> None:
    x, weight, bias = operands(name, ndim, options.get("groups", 1))
    with record_kernels() as ran, torch.no_grad():
        y = FUNCTIONS[ndim](x, weight, bias, **options)
    looked_up = [kernel for kernel in ran if ":" in kernel]
    if "static" in name and ndim < 3 and BUILT:
        assert looked_up == ["conv:cpu_conv"]
    else:
        assert len(looked_up) == options.get("groups", 1)
        assert all(kernel.startswith("linear:") and "int8" in kernel for kernel in looked_up)
    assert torch.equal(y, of_reference(x, weight, bias, **options))
    assert 20 < compute_error(FUNCTIONS[ndim](x, weight.dequantize(), bias, **options), y) < 60


@pytest.mark.parametrize("name", INTEGERS)
def test_every_scheme_with_quantized_activations(name: str) -> None:
    x, weight, bias = operands(name, 2)
    with record_kernels() as ran:
        y = functional.conv2d(x, weight, bias, padding=1)
    if name == "int8 row, static int8" and BUILT:
        assert ran[0] == "conv:cpu_conv"
    else:
        assert ran[0].startswith("linear:")
    # A layout that is not named in `specs` need not have a kernel for these.
    assert ran[0] != "linear:reference" or name in OTHER_LAYOUTS
    assert torch.equal(y, of_reference(x, weight, bias, padding=1))


@every_option
@pytest.mark.parametrize("ndim", CONVS)
def test_weight_only(ndim: int, options: dict) -> None:
    x, weight, bias = operands("uint4 group, packed", ndim, options.get("groups", 1))
    with record_kernels() as ran:
        y = FUNCTIONS[ndim](x, weight, bias, **options)
    assert ran[0] == f"conv:{WEIGHT_ONLY_CONV}"
    wanted = FUNCTIONS[ndim](x, weight.dequantize(), bias, **options)
    assert_same_sums(y, wanted, weight.shape[1:].numel(), magnitude(ndim, x, weight, bias, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "nf4"])
def test_every_weight_only_scheme(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 32, 9, 8, dtype=dtype)
    matrix = nf4_weight_only().apply(torch.randn(8, 128)) if name == "nf4" else None
    weight = quantized(name, 8, 32, 2, 2) if matrix is None else ConvWeight.of(matrix, (8, 32, 2, 2))
    with record_kernels() as ran:
        y = functional.conv2d(x, weight.to(dtype))
    kernel = "portable_conv" if name.endswith("portable") else "dequantized_conv"
    assert ran[0] == f"conv:{WEIGHT_ONLY_CONV if name in COMPILED else kernel}"
    assert y.dtype == dtype
    wanted = functional.conv2d(x, weight.dequantize(dtype))
    if BUILT and dtype is torch.float32 and name in ("int8 row", "int8 tensor"):  # without torch, in another order
        assert_same_sums(y, wanted, 128, magnitude(2, x, weight, torch.zeros(8)))
    else:
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("name", ["int8 row", "int8 row, int8 token"])
def test_gradients_go_straight_through(name: str) -> None:
    x, weight, bias = operands(name, 2, groups=2)
    results = []
    for w in (weight, weight.dequantize()):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = functional.conv2d(leaves[0], w, leaves[1], (2, 1), (0, 2), (1, 2), groups=2)
        results.append(torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).reshape(y.shape)))
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert not functional.conv2d(x, nn.Parameter(weight), groups=2).requires_grad


@pytest.mark.parametrize("name", ["int8 row", "int8 row, int8 token"])
@pytest.mark.parametrize(("ndim", "options"), [
    (2, {"padding": 2, "padding_mode": "circular"}),
    pytest.param(1, {"groups": 4}, marks=pytest.mark.slow),
    pytest.param(2, {"groups": 4}, marks=pytest.mark.slow),
    pytest.param(3, {"padding": "same"}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_layer_in_one_graph_for_every_batch(ndim: int, options: dict, name: str) -> None:
    layer = CONVS[ndim](32 * options.get("groups", 1), 8, 2, **options)
    layer.weight = nn.Parameter(quantized(name, *layer.weight.shape), requires_grad=False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 9):
        x = torch.randn(batch, layer.in_channels, *(5, 4, 3)[:ndim])
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["int8 row", "int8 row, int8 token"])
def test_gradients_in_one_graph(name: str, backend: str) -> None:
    layer = nn.Conv2d(32, 8, (4, 2))
    layer.weight = nn.Parameter(quantized(name, 8, 32, 4, 2), requires_grad=False)
    results = []
    for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        x = torch.linspace(-2, 3, 2 * 32 * 36).reshape(2, 32, 6, 6).requires_grad_()
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, layer.bias])])
    for got, wanted in zip(*results):
        assert compute_error(wanted, got) > 100


@pytest.mark.parametrize("limit", [4 * 64 * 40, 4 * 64 * 3, 1])
def test_windows_are_gathered_a_piece_at_a_time(limit: int, monkeypatch) -> None:
    """Several images, part of an image, and no less than a row of it."""
    x, weight = torch.randn(5, 16, 4, 5), quantized("int8 row, int8 token", 8, 16, 2, 2)
    wanted, sizes = functional.conv2d(x, weight), []
    monkeypatch.setattr(conv, "WINDOW_BYTES", limit)
    multiply = reference.linear
    window = conv.Window((2, 2), (1, 1), (0, 0), (1, 1), 1)

    def count(rows: Tensor, group: int) -> Tensor:
        sizes.append(len(rows))
        return multiply(rows, weight.matrix, None)

    with torch.no_grad():
        assert torch.equal(conv.multiply_windows(x, window, count), wanted)
        assert torch.equal(functional.conv2d(x, weight), wanted)
    assert sizes == {4 * 64 * 40: [36, 24], 4 * 64 * 3: [4] * 15, 1: [4] * 15}[limit]


@pytest.mark.parametrize("name", ["int8 row", "int8 row, int8 token"])
def test_other_inputs(name: str) -> None:
    x, weight, bias = operands(name, 2)
    y = functional.conv2d(x, weight, bias)
    assert y.is_contiguous()
    terms, size = weight.shape[1:].numel(), magnitude(2, x, weight, bias)
    assert_same_sums(functional.conv2d(x[0], weight, bias), y[0], terms, size[0])
    assert functional.conv2d(x[:0], weight, bias).shape == (0, *y.shape[1:])
    last = functional.conv2d(x.contiguous(memory_format=torch.channels_last), weight, bias)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert_same_sums(last, y, terms, size)
    with torch.autocast("cpu", torch.bfloat16):
        low = functional.conv2d(x, weight, bias)
    assert low.dtype == torch.bfloat16
    assert 35 < compute_error(y, low) < 70
    with torch.inference_mode():
        assert torch.equal(functional.conv2d(x, weight, bias), y)


def test_scales_of_output_channels_and_groups_along_channels() -> None:
    """A channel, or an image, a thousand times as large leaves the accuracy of the others as it is."""
    x, w = torch.randn(2, 32, 6, 6), torch.randn(8, 32, 2, 2)
    w[3] *= 1000
    x[1] *= 1000
    y = functional.conv2d(x, ConvWeight.from_float(w, SPECS["int8 row, int8 token"]))
    assert compute_error(functional.conv2d(x, w)[0, 4], y[0, 4]) > 30
    w = torch.randn(8, 32, 2, 2)
    w[:, :, 0, 1] *= 1000
    weight = ConvWeight.from_float(w, SPECS["int4 group, int8 token, packed"])
    assert weight.matrix.scheme.shape == (8, 128)
    assert compute_error(w[:, :, 1, 0], weight.dequantize()[:, :, 1, 0]) > 15


# --- the weight as a tensor ---
@pytest.fixture(params=["int8 row", "uint4 group, packed", "int8 row, static int8", "int8 row, 2:4"])
def weight(request) -> ConvWeight:
    return quantized(request.param, 8, 16, 2, 2)


def test_it_shows_the_shape_of_the_weight_and_can_be_cut(weight: ConvWeight) -> None:
    assert weight.shape == (8, 16, 2, 2)
    assert weight.dequantize().shape == weight.shape
    assert torch.equal(weight.dequantize(), conv.from_matrix(weight.matrix.dequantize(), weight.shape))
    assert weight.nbytes == weight.matrix.nbytes
    assert type(weight.matrix) is AffineQuantizedTensor
    dense = weight.dequantize()
    for part, wanted in [
        (weight[2:6], dense[2:6]),
        (weight.narrow(0, 4, 4), dense[4:]),
        (weight.split(4)[1], dense[4:]),
        (weight.chunk(2)[0], dense[:4]),
        (weight.index_select(0, torch.tensor([7, 0])), dense[[7, 0]]),
    ]:
        assert type(part) is ConvWeight
        assert torch.equal(part.dequantize(), wanted)


def test_what_does_not_fit_says_so() -> None:
    x, weight, _ = operands("int8 row, int8 token", 2)
    operations = [
        lambda: functional.conv2d(x[:, :8], weight), lambda: functional.conv2d(x, weight, groups=3),
        lambda: functional.conv2d(x, weight, stride=2, padding="same"),
        lambda: functional.conv2d(x, weight, padding="reflect"), lambda: functional.conv2d(x, weight, stride=(1, 2, 3)),
        lambda: functional.conv2d(x, weight, dilation=9), lambda: functional.conv1d(x, weight),
        lambda: functional.conv2d(x.long(), weight), lambda: functional.conv2d(x, weight.matrix),
        lambda: functional.conv2d(x, weight.to("meta")), lambda: ConvWeight.of(weight.matrix, (8, 3, 3, 3)),
        lambda: weight.transpose(0, 1), lambda: weight[:, :2], lambda: functional.linear(x, weight),
    ]  # fmt: skip
    assert_expected_inline(
        "\n".join(map(message_of, operations)),
        """\
ValueError: conv2d: 8 input channels do not fit a weight of shape (8, 32, 4, 2) in 1 groups
ValueError: conv2d: 32 input channels do not fit a weight of shape (8, 32, 4, 2) in 3 groups
ValueError: padding='same' takes a stride of 1
ValueError: padding is 'same', 'valid' or sizes, got 'reflect'
ValueError: stride, padding and dilation take 1 or 2 sizes, got [1, 2, 3]
ValueError: the kernel (4, 2), dilated by (9, 9), exceeds the padded input
ValueError: conv1d takes an input of 2 or 3 axes and a weight of 3, got shapes (2, 32, 9, 8) and (8, 32, 4, 2)
TypeError: conv2d takes a floating-point input, got torch.int64: input.to(torch.float32)
TypeError: conv2d takes floats and a ConvWeight, or one in training, got Tensor and AffineQuantizedTensor
ValueError: conv2d: the input is on cpu, the weight on meta
ValueError: a matrix of shape (8, 256) does not fit a weight of shape (8, 3, 3, 3), which takes (8, 27)
NotImplementedError: aten.transpose.int is not implemented for the weight of a convolution, which can be sliced along its first axis only; call .dequantize() first if you want a float tensor
NotImplementedError: aten.slice.Tensor is not implemented for the weight of a convolution, which can be sliced along its first axis only; call .dequantize() first if you want a float tensor
ValueError: linear: an input of shape (2, 32, 9, 8) does not fit a weight of shape (8, 32, 4, 2)""",  # noqa: E501
    )
    assert repr(weight).startswith("ConvWeight(shape=(8, 32, 4, 2), held as AffineQuantizedTensor(weight int8")


@pytest.mark.parametrize("name", SPECS)
def test_compilers_are_told_the_strides_of_the_result(name: str) -> None:
    """Inductor stops where they are others. A kernel or an image of one lies in either order of channels."""
    for kernel, padding, size in ((1, 0, 8), (1, 1, 1), (4, 1, 5)):
        weight, wide = quantized(name, 16, 64, kernel, kernel), torch.randn(2, 128, size, size)
        last = wide.contiguous(memory_format=torch.channels_last)
        for x in (wide[:, :64], wide[:, :64].contiguous(), last[:, :64], last[:, :64].contiguous()):
            y = functional.conv2d(x, weight, padding=padding)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                told = functional.conv2d(mode.from_tensor(x), weight, padding=padding)
            strides = ([step for step, n in zip(t.stride(), t.shape) if n > 1] for t in (y, told))
            assert len(set(map(tuple, strides))) == 1


@pytest.mark.parametrize("name", every_recipe.NAMES)
def test_every_recipe_compiles(name: str) -> None:
    layer, x = nn.Conv2d(64, 64, 1).requires_grad_(False), torch.randn(2, 64, 5, 5)
    assert quantize_(layer, every_recipe.make(name, 32), targets="all").quantized
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn"])
def test_codes_without_zero_points_and_kernels_of_one(dtype: str) -> None:
    spec = LinearSpec(QuantSpec(dtype, PerRow(), zero_point_domain=Z.NONE))
    for ndim, size, options in itertools.product((1, 2), (1, 2), ({}, {"stride": 2, "padding": 1, "dilation": 2})):
        weight, x = ConvWeight.from_float(torch.rand(31, 32, *[1] * ndim), spec), torch.randn(5, 32, *[size] * ndim)
        wanted = FUNCTIONS[ndim](x, weight.dequantize(), **options)
        torch.testing.assert_close(FUNCTIONS[ndim](x, weight, **options), wanted)
