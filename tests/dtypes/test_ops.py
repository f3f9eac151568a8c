"""aten operators on a quantized tensor as a whole: copies, conversions, comparison, allocation."""

import re
from dataclasses import replace

import pytest
import torch

from qtorch import AffineQuantizedTensor
from tests.dtypes.specs import DTYPES, LUTS, SPECS, TOKEN, UINT4, quantized, values
from tests.refusals import refuses

all_specs = pytest.mark.parametrize("name", SPECS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def identical(a: AffineQuantizedTensor, b: AffineQuantizedTensor) -> bool:
    """Not only equal values: the same codes, scales and zero points."""
    x, y = a.inner_tensors, b.inner_tensors
    return x.keys() == y.keys() and all(
        torch.equal(x[k].reshape(-1).view(torch.uint8), y[k].reshape(-1).view(torch.uint8)) for k in x
    )


@all_dtypes
@all_specs
def test_copies_from_floats_and_new_tensors(name: str, dtype: torch.dtype) -> None:
    w = quantized(name, dtype=dtype)
    x = values(name)
    wanted = AffineQuantizedTensor.from_float(x.to(dtype), w.scheme.spec, w.act_scale)
    alias, codes = w.detach(), w.qdata
    w.copy_(x)
    assert identical(w, wanted)
    assert w.qdata is codes
    assert identical(alias, wanted)
    w = quantized(name)
    empty, zeros = torch.empty_like(w, dtype=dtype), torch.zeros_like(w, dtype=dtype)
    assert empty.scheme == zeros.scheme == replace(w.scheme, dtype=dtype)
    assert torch.equal(zeros.dequantize(), torch.zeros(32, 64, dtype=dtype))
    assert w.act_scale is None or torch.equal(zeros.act_scale, w.act_scale)
    for like in [torch.empty_like(w, device="meta"), torch.zeros_like(w, device="meta")]:
        assert like.scheme == w.scheme
        assert all(inner.is_meta for inner in like.inner_tensors.values())


def test_copies_take_the_codes_and_keep_the_scale() -> None:
    half, w, source = quantized("int8 row").half(), quantized("int8 row, int8 token"), quantized("int8 row")
    assert half.copy_(source).dtype == torch.float16, "the logical dtype is the target's"
    assert torch.equal(half.dequantize(torch.float32), source.dequantize())
    w.copy_(source)
    assert w.scheme.activation == TOKEN
    assert identical(w, source)
    static = quantized("int8 row, static int8")
    static.act_scale.fill_(3)
    static.copy_(source)
    assert torch.equal(static.dequantize(), source.dequantize())
    assert static.act_scale.item() == 3
    w = quantized("uint4 group", dtype=torch.bfloat16).float()
    x = torch.randn(32, 64)
    w.copy_(x)
    assert w.scale.dtype == torch.bfloat16
    wanted = AffineQuantizedTensor.from_float(x, replace(UINT4, scale_dtype=torch.bfloat16))
    assert torch.equal(w.dequantize(), wanted.dequantize())
    w = quantized("int8 row")
    before = w.dequantize()
    for source in [torch.ones(64), torch.ones(64, 32), quantized("int8 row", 16, 64), torch.tensor(1.0)]:
        words = f"copy_: the target has shape (32, 64), the source {tuple(source.shape)}"
        refuses(f"^{re.escape(words)}$", lambda source=source: w.copy_(source))
    assert torch.equal(w.dequantize(), before)


@all_specs
def test_copy_from_another_spec_is_refused_and_to_the_same_is_the_same(name: str) -> None:
    """To quantize once more takes an explicit `dequantize`."""
    other = "int8 tensor" if name.startswith("float8 row") else "float8 row"
    w, source = quantized(name), AffineQuantizedTensor.from_float(values(name), SPECS[other])
    before = w.clone()
    refuses(r"copy_ of a weight quantized as .* into a weight quantized .*dequantize\(\)", lambda: w.copy_(source))
    assert identical(w, before)
    wanted = AffineQuantizedTensor.from_float(source.dequantize(), w.scheme.spec, w.act_scale)
    assert identical(w.copy_(source.dequantize()), wanted)
    w = quantized(name)
    assert w.to("cpu") is w.cpu() is w.float() is w.to(torch.float32) is w.contiguous() is w
    copy = w.to("cpu", copy=True)
    assert copy is not w
    assert identical(copy, w)
    assert copy.qdata.data_ptr() != w.qdata.data_ptr()


@pytest.mark.parametrize(
    ("name", "part"), [("int8 row", slice(8, 16)), ("int8 block", slice(8, 16)), ("uint4 group", slice(8, 9))]
)
def test_assigning_whole_blocks_changes_nothing_else(name: str, part: slice) -> None:
    w = quantized(name)
    wanted = w.dequantize()
    x = torch.full_like(wanted[part], 7.0)
    w[part] = x
    wanted[part] = AffineQuantizedTensor.from_float(x, w.scheme.spec).dequantize()
    assert torch.equal(w.dequantize(), wanted)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["int8 row", "int8 tensor", "int8 block", "uint4 group"])
def test_assigning_a_part_of_a_block_is_refused(name: str, inference: bool) -> None:
    w = quantized(name)
    before = w.dequantize()
    with torch.inference_mode(inference), pytest.raises(ValueError, match="would change the scales of the rest"):
        w[:8, :8] = torch.full((8, 8), 7.0)
    assert torch.equal(w.dequantize(), before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_to_a_dtype_that_is_not_for_reals(dtype: torch.dtype) -> None:
    w = quantized("int8 row")
    for convert in [torch.Tensor.to, torch.zeros_like, torch.empty_like]:
        with pytest.raises(TypeError, match=rf"takes a floating-point dtype of 16 bits or more, got {dtype}$"):
            convert(w, dtype=dtype)


@pytest.mark.parametrize("name", [*SPECS, *LUTS])
def test_equal(name: str) -> None:
    w = quantized(name)
    assert torch.equal(w, w.clone())
    assert torch.equal(w, w.dequantize())
    assert torch.equal(w.dequantize(), w)
    assert not torch.equal(w, quantized(name))
    assert not torch.equal(w, quantized(name, 16, 64))
    assert bool((w == w.clone()).all())
    assert bool((w == w.dequantize()).all())
    assert not bool((w == quantized(name)).all())
    assert (w == w).dtype == torch.bool


def test_unknown_operations_name_themselves_and_change_nothing() -> None:
    w = quantized("int8 row")
    before = w.dequantize()
    for name, operation in {
        "add.Tensor": lambda: w + 1,
        "sum.default": lambda: w.sum(),
        "add_.Tensor": lambda: w.add_(1),
        "zero_.default": lambda: torch.nn.init.zeros_(w),
        "convolution.default": lambda: torch.nn.functional.conv_transpose1d(torch.ones(1, 32, 8), w.unsqueeze(2)),
    }.items():
        words = f"aten.{name} is not implemented for AffineQuantizedTensor; call .dequantize() first"
        refuses(f"^{re.escape(words)}", operation, NotImplementedError)
    assert torch.equal(w.dequantize(), before)
