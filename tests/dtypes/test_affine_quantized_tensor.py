"""AffineQuantizedTensor itself: making it, what it says of itself, and what it refuses to be made of."""

from dataclasses import replace
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline

from qtorch import AffineQuantizedTensor, LinearSpec, PerTensor, PlainLayout, QuantSpec, compute_error
from tests.dtypes.specs import ASYMMETRIC, DTYPES, INT8, SPECS, TOKEN, UINT4, quantized, same_numbers, values

# SQNR in dB that normal numbers keep: at least, at most.
SQNR = {
    "int8 row": (40, 47),
    "int8 tensor": (36, 46),
    "int8 block": (41, 49),
    "uint4 group": (18, 25),
    "uint4 group, real zero": (18, 25),
    "float8 row": (29, 35),
    "float4 group, float8 scales": (18, 24),
    "float4 group, float8 scales, packed": (18, 24),
    "uint4 group, packed": (18, 25),
    "int3 group, packed": (11, 18),
    "int4 group, int8 token, packed": (17, 24),
    "int8 row, int8 token": (40, 47),
    "int4 group, int8 token": (17, 24),
    "int8 row, 2:4": (40, 50),
    "int8 row, int8 token, 2:4": (40, 50),
    "float8 row, 2:4": (28, 36),
    "int8 row, static int8": (40, 47),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_from_float_gives_what_the_spec_says(name: str, dtype: torch.dtype) -> None:
    x = values(name, dtype=dtype)
    spec = SPECS[name]
    w = AffineQuantizedTensor.from_float(x, spec, torch.ones(1, 1) if spec.static else None)
    codes, scale, zero_point = w.plain()
    assert (w.shape, w.dtype, w.device.type) == ((32, 64), dtype, "cpu")
    assert codes.dtype == spec.weight.dtype.storage
    assert tuple(scale.shape) == spec.weight.scale_shape((32, 64))
    assert (zero_point is not None) == spec.weight.has_zero_point
    assert w.dequantize().dtype == dtype
    assert torch.equal(w.dequantize(), spec.weight.fake_quantize(x))
    low, high = SQNR[same_numbers(name)]
    assert low < compute_error(x, w.dequantize()) < high


@pytest.mark.parametrize("name", SPECS)
def test_from_plain_is_the_inverse_of_plain(name: str) -> None:
    w = quantized(name)
    again = AffineQuantizedTensor.from_plain(*w.plain(), w.scheme.spec, w.dtype, w.act_scale, w.act_zero_point)
    assert torch.equal(again, w)
    # Scales that are given stay as they are.
    spec = w.scheme.spec
    assert again.scheme.spec == replace(spec, weight=replace(spec.weight, scale_spec=None))
    assert again.scale_scale is None


@pytest.mark.parametrize("name", SPECS)
def test_from_canonical_is_the_inverse_of_canonical(name: str) -> None:
    w = quantized(name)
    again = AffineQuantizedTensor.from_canonical(*w.canonical(), w.scheme)
    assert again.scheme == w.scheme
    assert again.inner_tensors.keys() == w.inner_tensors.keys()
    for key, tensor in w.inner_tensors.items():
        assert torch.equal(again.inner_tensors[key].view(torch.uint8), tensor.view(torch.uint8))


def test_dequantize_to_another_dtype_rounds_once() -> None:
    w = quantized("int8 row", dtype=torch.bfloat16)
    exact = w.dequantize(torch.float32)
    assert torch.equal(exact.bfloat16(), w.dequantize())
    assert not torch.equal(exact, w.dequantize().float())


@pytest.mark.parametrize("name", SPECS)
def test_to_layout_keeps_the_numbers(name: str) -> None:
    w = quantized(name)
    assert torch.equal(w.to_layout(PlainLayout()), w)


def test_a_bare_quant_spec_is_weight_only_in_the_plain_layout() -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(4, 8), INT8)
    assert w.scheme.spec == LinearSpec(INT8, layout=PlainLayout())


def test_with_activation_shares_the_weight() -> None:
    w = quantized("int8 row")
    dynamic = w.with_activation(TOKEN)
    static = w.with_activation(QuantSpec("int8", PerTensor()), torch.ones(1, 1))
    assert (dynamic.scheme.activation, dynamic.scheme.spec.static) == (TOKEN, False)
    assert static.scheme.spec.static
    assert static.qdata is dynamic.qdata is w.qdata
    assert torch.equal(static.with_activation(None), w)
    asymmetric = QuantSpec("int8", PerTensor(), ASYMMETRIC)
    with pytest.raises(ValueError, match=r"act_zero_point is missing: .* static activation int8"):
        w.with_activation(asymmetric, torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"act_zero_point is given: .* dynamic activation int8"):
        w.with_activation(asymmetric, None, torch.zeros(1, 1, dtype=torch.int8))


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (64,), (2, 3, 64), (1, 64)])
@pytest.mark.parametrize("name", ["int8 row", "int8 tensor", "uint4 group"])
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    w = quantized(name, *shape)
    assert w.shape == shape
    assert w.dequantize().shape == shape


@pytest.mark.parametrize("name", SPECS)
def test_zeros_stay_exactly_zero(name: str) -> None:
    spec = SPECS[name]
    zeros = AffineQuantizedTensor.from_float(torch.zeros(32, 64), spec, torch.ones(1, 1) if spec.static else None)
    assert torch.equal(zeros.dequantize(), torch.zeros(32, 64))


@pytest.mark.parametrize("name", SPECS)
def test_nbytes_is_what_is_kept(name: str) -> None:
    w = quantized(name)
    codes, others = w.canonical()
    if "zero_point" in others:  # the portable layout stores them in int32
        others["zero_point"] = others["zero_point"].to(w.zero_point.dtype)
    kept = [codes if w.scheme.layout.name == "plain" else w.qdata, *others.values()]
    assert w.nbytes == sum(t.numel() * t.element_size() for t in kept)
    assert w.nbytes < torch.empty(32, 64).nbytes
    assert torch.nn.Parameter(w, requires_grad=False).nbytes == w.nbytes


def test_repr() -> None:
    names = ["int8 row", "uint4 group, real zero", "float8 row", "int8 row, static int8"]
    texts = [repr(quantized(name, dtype=torch.bfloat16)) for name in names]
    texts.append(repr(quantized("int8 tensor")))
    texts.append(f"{quantized('int8 block').to('meta')}")
    assert_expected_inline(
        "\n".join(texts).replace("(weight", "(\n    weight").replace(", layout", ",\n    layout"),
        """\
AffineQuantizedTensor(
    weight int8 PerRow() symmetric,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.bfloat16, device=cpu, 2,176 bytes)
AffineQuantizedTensor(
    weight uint4 PerGroup(group_size=32) asymmetric zero point float,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.bfloat16, device=cpu, 2,304 bytes)
AffineQuantizedTensor(
    weight float8_e4m3fn PerRow() symmetric zero point none,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.bfloat16, device=cpu, 2,176 bytes)
AffineQuantizedTensor(
    weight int8 PerRow() symmetric, static activation int8 PerTensor() symmetric,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.bfloat16, device=cpu, 2,180 bytes)
AffineQuantizedTensor(
    weight int8 PerTensor() symmetric,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.float32, device=cpu, 2,052 bytes)
AffineQuantizedTensor(
    weight int8 PerBlock(sizes=(8, 16)) symmetric,
    layout=PlainLayout(), shape=(32, 64), dtype=torch.float32, device=meta, 2,112 bytes)""",
    )


def test_from_float_refuses() -> None:
    texts = []
    for x, spec, act_scale in [
        (torch.randn(4, 48), UINT4, None),
        (torch.randn(4, 4).to(torch.int64), INT8, None),
        (torch.randn(32, 64), SPECS["int8 row, static int8"], None),
        (torch.randn(32, 64), SPECS["int8 row"], torch.ones(1, 1)),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            AffineQuantizedTensor.from_float(x, spec, act_scale)
        texts.append(f"{error.type.__name__}: {error.value}")
    assert_expected_inline(
        "\n".join(fill(text, 110) for text in texts),
        """\
IndivisibleError: block_size (1, 32) does not divide shape (4, 48): 48 % 32 along axis 1
TypeError: from_float takes a floating-point tensor, got torch.int64
ValueError: act_scale is missing: a tensor of shape (32, 64) with weight int8 PerRow() symmetric, static
activation int8 PerTensor() symmetric, PlainLayout() has one
ValueError: act_scale is given: a tensor of shape (32, 64) with weight int8 PerRow() symmetric, PlainLayout()
has no act_scale""",
    )


def test_from_plain_refuses() -> None:
    codes, scale, zero_point = quantized("uint4 group", 4, 64).plain()
    texts = []
    for plain in [
        (codes.to(torch.int8), scale, zero_point),
        (codes, scale[:, :1], zero_point),
        (codes, scale, zero_point[:2]),
        (codes, scale, None),
    ]:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            AffineQuantizedTensor.from_plain(*plain, UINT4, torch.float32)
        texts.append(str(error.value))
    with pytest.raises(ValueError, match=r"zero_point is given: .* int8"):
        AffineQuantizedTensor.from_plain(*quantized("int8 row").plain()[:2], torch.zeros(32, 1), INT8, torch.float32)
    assert_expected_inline(
        "\n".join(fill(text, 110) for text in texts),
        """\
qdata of a tensor of shape (4, 64) with weight uint4 PerGroup(group_size=32) asymmetric, PlainLayout() has
shape (4, 64) of torch.uint8, got (4, 64) of torch.int8
scale of a tensor of shape (4, 64) with weight uint4 PerGroup(group_size=32) asymmetric, PlainLayout() has
shape (4, 2) of floating point, got (4, 1) of torch.float32
zero_point of a tensor of shape (4, 64) with weight uint4 PerGroup(group_size=32) asymmetric, PlainLayout()
has shape (4, 2) of integers, got (2, 2) of torch.uint8
zero_point is missing: a tensor of shape (4, 64) with weight uint4 PerGroup(group_size=32) asymmetric,
PlainLayout() has one""",
    )


def test_the_scheme_is_hashable_and_independent_of_the_data() -> None:
    schemes = {quantized(name).scheme for name in SPECS} | {quantized(name).scheme for name in SPECS}
    assert len(schemes) == len(SPECS)
    w = quantized("int8 row")
    assert w.half().scheme == replace(w.scheme, dtype=torch.float16)
