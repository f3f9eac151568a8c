"""What LUTQuantizedTensor has of its own: tables, sizes, kernels. The tests over all schemes run on it too."""

from dataclasses import replace

import pytest
import torch

from qtorch import LinearSpec, LUTQuantizedTensor, PackedLayout, PlainLayout, QuantSpec, compute_error, config, explain
from qtorch.dtypes import NF4Tensor, codebook_tensor, linear_nf4, serialize, to_nf4
from qtorch.kernels import FallbackError, lookup
from qtorch.kernels.ops.weight_only_mm import SLICE_BYTES
from tests.dtypes import specs
from tests.dtypes.specs import DTYPES
from tests.dtypes.specs import LUTS as SPECS

pytestmark = pytest.mark.usefixtures("torch_kernels")
from qtorch.kernels.registry import Problem, candidates
from tests.refusals import refuses

# SQNR in dB of normal numbers: at least, at most.
SQNR = {
    "nf4": (19.5, 22), "nf4 single": (21.5, 26), "3 bits group": (16, 21), "2 bits row": (9, 12),
    "4 bits block": (20, 22), "8 bits block": (46, 56),
}  # fmt: skip

every_spec = pytest.mark.parametrize("name", SPECS)


def quantized(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> LUTQuantizedTensor:
    return specs.quantized(name, *(shape or (32, 128)), dtype=dtype)


@every_spec
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_float(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(32, 128, dtype=dtype)
    w = LUTQuantizedTensor.from_float(x, SPECS[name])
    codes, scale, table = w.plain()
    assert (w.shape, w.dtype, w.device.type) == ((32, 128), dtype, "cpu")
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (32, 128))
    assert tuple(scale.shape) == SPECS[name].scale_shape((32, 128))
    assert scale.is_floating_point()
    assert w.dequantize().dtype == dtype
    low, high = SQNR[name]
    assert low < compute_error(x, w.dequantize()) < high
    # Every element has its nearest entry under the scale that is stored.
    of_element = SPECS[name].dequantize(torch.zeros_like(codes), scale, torch.ones_like(table))
    distance = (x.float() - w.dequantize(torch.float32)).abs()
    other = LUTQuantizedTensor.from_plain(
        (codes + 1).clamp(max=table.shape[-1] - 1), scale, table, w.scheme.spec, dtype
    )
    assert bool((distance <= (x.float() - other.dequantize(torch.float32)).abs() + 1e-6 * of_element).all())


@pytest.mark.parametrize(("name", "bits"), [
    ("nf4", 4 + 8 / 64 + (2 * 32 + 32 + 16 * 32) / 2**15),
    ("nf4 single", 4 + 16 / 16 + 16 * 32 / 2**15),
    ("3 bits group", 3 + (16 + 8 * 16) / 32),
    ("2 bits row", 2 + (32 + 4 * 16) / 128),
    ("8 bits block", 8 + (32 + 256 * 16) / 1024),
])  # fmt: skip
def test_size(name: str, bits: float) -> None:
    w = quantized(name, 256, 128, dtype=torch.bfloat16)
    assert w.nbytes * 8 == bits * w.numel()


@every_spec
def test_kernels_agree_with_the_reference_and_cut_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, ids = quantized(name), torch.randn(3, 128), torch.tensor([[1, 31], [0, 1]])
    for op, input, bias in (("linear", x, (None,)), ("embedding", ids, ())):
        kernels = [k for k, reason in candidates(Problem(op, w.scheme, x.dtype, "cpu")) if reason is None]
        assert [k.is_reference for k in kernels] == [False, True]
        torch.testing.assert_close(kernels[0](input, w, *bias), kernels[1](input, w, *bias))
    # Several slices, the last one shorter, both ways around.
    monkeypatch.setitem(SLICE_BYTES, "cpu", 4 * 128 * 11)
    w = quantized(name, 40, 128)
    x, z = torch.randn(3, 128), torch.randn(3, 40)
    torch.testing.assert_close(torch.nn.functional.linear(x, w), x @ w.dequantize().t())
    torch.testing.assert_close(z @ w, z @ w.dequantize())


def test_parts_and_errors() -> None:
    w = quantized("nf4")
    assert w.scheme.layout == PackedLayout()
    assert w[8:16].qdata.data_ptr() == w.qdata[8:16].data_ptr()
    assert w.t().qdata.data_ptr() == w.qdata.data_ptr()
    assert w.t().scheme.layout == PackedLayout(-2)
    part = w[:4]
    assert (w.scale.dtype, part.scale.dtype) == (torch.int8, torch.float32)
    assert (w.codebook.scale_spec is None, part.codebook.scale_spec is None) == (False, True)
    refuses(r"copy_ into a part .* the part has its own scale", lambda: part.copy_(torch.ones(4, 128)))
    w = quantized("2 bits row")
    codes, scale, table = w.plain()
    make, ones = LUTQuantizedTensor.from_float, torch.ones(2, 64)
    for call, words in (
        (lambda: make(ones.long(), SPECS["nf4"]), r"floating-point tensor, got torch\.int64"),
        (lambda: make(ones, QuantSpec("int8")), "takes a CodebookSpec and no activation, got weight int8"),
        (lambda: make(ones, LinearSpec(SPECS["nf4"], QuantSpec("int8"))), r"weight uint4 NF4.*dynamic activation int8"),
        (lambda: w.with_activation(QuantSpec("int8")), "no product with quantized activations, got int8"),
        (lambda: w.with_plain((codes, scale, table[0, 0])), r"\(32, 1, 4\) of floating point, got \(4,\)"),
        (lambda: w.with_plain((codes, scale[:1], table)), r"scale of .* \(32, 1\) of floating point, got \(1, 1\)"),
        (lambda: w.with_plain((codes.to(torch.int8), scale, table)), r"uint8, got \(32, 128\) of torch\.int8"),
        (lambda: quantized("nf4 single")[:, 8:24], "cuts blocks of 16"),
        (lambda: torch.cat([quantized("nf4"), quantized("nf4 single")]), "cat joins tensors quantized alike"),
    ):
        refuses(words, call, (TypeError, ValueError))
    assert not torch.nn.functional.linear(torch.ones(1, 128), torch.nn.Parameter(w)).requires_grad
    assert replace(w.scheme) == w.scheme


def test_names_text_and_importance() -> None:
    stored, entry = serialize.to_canonical("fc.weight", quantized("nf4"))
    names = ["packed", "scale", "scale_mean", "scale_scale", "table"]
    assert sorted(stored) == [f"fc.weight_{name}" for name in names]
    assert stored["fc.weight_packed"].dtype == torch.int32
    del entry["tensors"]["table"]
    refuses(r"table is missing: .* NF4", lambda: serialize.from_canonical(entry, stored.__getitem__))
    module = torch.nn.Linear(128, 32)
    module.weight = torch.nn.Parameter(quantized("nf4"), requires_grad=False)
    explanation = str(explain(module))
    assert "runs lut_weight_mm" in explanation
    assert "not weight_only_mm: " in explanation
    with config.patch(strict=True):
        module(torch.ones(1, 128))
        with pytest.raises(FallbackError, match=r"lut_weight_mm takes a 2-d weight, this one has shape \(2, 32, 128\)"):
            lookup("linear", quantized("nf4", 2, 32, 128).scheme, torch.float32, "cpu")
    assert repr(quantized("3 bits group")) == (
        "LUTQuantizedTensor(weight uint3 k-means PerGroup(group_size=32), layout=PackedLayout(), "
        "shape=(32, 128), dtype=torch.float32, device=cpu, 4,096 bytes)"
    )
    x, weight = torch.randn(3, 128), torch.randn(32, 128)
    w = NF4Tensor.from_tensor(weight, 64, 256)
    assert isinstance(w, NF4Tensor)
    assert w.codebook == codebook_tensor.nf4_spec(64, 256)
    assert torch.equal(w, to_nf4(weight))
    assert torch.equal(linear_nf4(x, w), torch.nn.functional.linear(x, w))
    x, importance = torch.randn(4, 128), torch.rand(4, 128).pow(8)
    plain = LUTQuantizedTensor.from_float(x, SPECS["2 bits row"])
    weighted = LUTQuantizedTensor.from_float(x, SPECS["2 bits row"], importance)
    errors = [(importance * (x - w.dequantize()).square()).sum() for w in (plain, weighted)]
    assert errors[1] < 0.95 * errors[0]
    with pytest.raises(ValueError, match="importance is for k-means, the table of uint4 NF4"):
        LUTQuantizedTensor.from_float(x, SPECS["nf4"], importance)


@every_spec
def test_copy_allocate_and_zero_groups(name: str) -> None:
    w, x = quantized(name), torch.randn(32, 128)
    wanted = LUTQuantizedTensor.from_float(x, SPECS[name])
    assert torch.equal(w.clone().copy_(x), wanted)
    assert torch.equal(w.clone().copy_(wanted), wanted)
    assert torch.equal(w.clone().copy_(wanted.to_layout(PlainLayout())), wanted)
    refuses("into a float tensor", lambda: torch.empty(32, 128).copy_(w))
    assert not torch.zeros_like(w).dequantize().any()
    assert torch.empty_like(w, device="meta").shape == w.shape
    x = torch.randn(32, 128)
    x[8:16] = 0
    w = LUTQuantizedTensor.from_float(x, SPECS[name])
    assert not w.dequantize()[8:16].any()
    assert compute_error(x, w.dequantize()) > 9
