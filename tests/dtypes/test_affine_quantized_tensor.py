"""AffineQuantizedTensor itself: making it, what it says of itself, and what it refuses to be made of."""

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from qtorch import AffineQuantizedTensor, LinearSpec, PerTensor, PlainLayout, QuantSpec, compute_error
from tests.dtypes.specs import ASYMMETRIC, DTYPES, INT8, SPECS, SQNR, TOKEN, UINT4, quantized, values
from tests.refusals import refuses


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
    low, high = SQNR[name.split(",")[0]]
    assert low < compute_error(x, w.dequantize()) < high


@pytest.mark.parametrize("name", SPECS)
def test_forms_bytes_and_numbers(name: str) -> None:
    w = quantized(name)
    again = AffineQuantizedTensor.from_plain(*w.plain(), w.scheme.spec, w.dtype, w.act_scale, w.act_zero_point)
    assert torch.equal(again, w)
    # Scales that are given stay as they are.
    spec = w.scheme.spec
    assert again.scheme.spec == replace(spec, weight=replace(spec.weight, scale_spec=None))
    assert again.scale_scale is None
    again = AffineQuantizedTensor.from_canonical(*w.canonical(), w.scheme)
    assert again.scheme == w.scheme
    assert again.inner_tensors.keys() == w.inner_tensors.keys()
    for key, tensor in w.inner_tensors.items():
        assert torch.equal(again.inner_tensors[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.equal(w.to_layout(PlainLayout()), w)
    w = quantized(name)
    codes, others = w.canonical()
    if "zero_point" in others:  # the portable layout stores them in int32
        others["zero_point"] = others["zero_point"].to(w.zero_point.dtype)
    kept = [codes if w.scheme.layout.name == "plain" else w.qdata, *others.values()]
    assert w.nbytes == sum(t.numel() * t.element_size() for t in kept)
    assert w.nbytes < torch.empty(32, 64).nbytes
    assert torch.nn.Parameter(w, requires_grad=False).nbytes == w.nbytes


def test_rounding_activations_and_what_it_refuses() -> None:
    w = quantized("int8 row", dtype=torch.bfloat16)
    exact = w.dequantize(torch.float32)
    assert torch.equal(exact.bfloat16(), w.dequantize())
    assert not torch.equal(exact, w.dequantize().float())
    w = AffineQuantizedTensor.from_float(torch.randn(4, 8), INT8)
    assert w.scheme.spec == LinearSpec(INT8, layout=PlainLayout())
    schemes = {quantized(name).scheme for name in SPECS} | {quantized(name).scheme for name in SPECS}
    assert len(schemes) == len(SPECS)
    w = quantized("int8 row")
    assert w.half().scheme == replace(w.scheme, dtype=torch.float16)
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
    static = SPECS["int8 row, static int8"]
    for x, spec, act_scale, words in [
        (torch.randn(4, 48), UINT4, None, r"block_size \(1, 32\) does not divide shape \(4, 48\): 48 % 32 along"),
        (torch.randn(4, 4).long(), INT8, None, r"from_float takes a floating-point tensor, got torch\.int64"),
        (torch.randn(32, 64), static, None, r"act_scale is missing: .* \(32, 64\) with weight int8 .* has one"),
        (torch.randn(32, 64), SPECS["int8 row"], torch.ones(1, 1), "act_scale is given: .* has no act_scale"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            AffineQuantizedTensor.from_float(x, spec, act_scale)
    codes, scale, zero_point = quantized("uint4 group", 4, 64).plain()
    for plain, words in [
        ((codes.to(torch.int8), scale, zero_point), r"qdata .* \(4, 64\) of torch.uint8, got \(4, 64\) of torch.int8"),
        ((codes, scale[:, :1], zero_point), r"scale .* \(4, 2\) of floating point, got \(4, 1\) of torch.float32"),
        ((codes, scale, zero_point[:2]), r"zero_point .* \(4, 2\) of integers, got \(2, 2\) of torch.uint8"),
        ((codes, scale, None), r"zero_point is missing: .* uint4 .* has one"),
    ]:
        refuses(words, lambda plain=plain: AffineQuantizedTensor.from_plain(*plain, UINT4, torch.float32))
    with pytest.raises(ValueError, match=r"zero_point is given: .* int8"):
        AffineQuantizedTensor.from_plain(*quantized("int8 row").plain()[:2], torch.zeros(32, 1), INT8, torch.float32)


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (64,), (2, 3, 64), (1, 64)])
@pytest.mark.parametrize("name", ["int8 row", "int8 tensor", "uint4 group"])
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    w = quantized(name, *shape)
    assert w.shape == shape
    assert w.dequantize().shape == shape


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
