"""TensorCoreTiledLayout: an exact bijection on every size, on any device, and what it asks for."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PlainLayout, QuantSpec, TensorCoreTiledLayout
from qtorch.primitives import ZeroPointDomain
from qtorch.primitives.layouts import tensor_core_tiled
from tests.dtypes.specs import ASYMMETRIC

TILED = TensorCoreTiledLayout()


def spec(group: int = 32, domain: ZeroPointDomain = ZeroPointDomain.FLOAT, dtype: str = "uint4") -> QuantSpec:
    preserve_zero = domain is not ZeroPointDomain.FLOAT
    return QuantSpec(dtype, PerGroup(group), ASYMMETRIC, domain, preserve_zero=preserve_zero)


def tiled(n: int = 48, k: int = 96, group: int = 32, dtype: torch.dtype = torch.float32) -> AffineQuantizedTensor:
    return AffineQuantizedTensor.from_float(torch.randn(n, k, dtype=dtype), LinearSpec(spec(group), layout=TILED))


def same_plain(a: AffineQuantizedTensor, b: AffineQuantizedTensor) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a.plain(), b.plain()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(0, 150),
    groups=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128, 256]),
    inner_k_tiles=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_bijection(n: int, groups: int, group: int, inner_k_tiles: int, dtype: torch.dtype) -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(n, groups * group, dtype=dtype), spec(group))
    packed = w.to_layout(TensorCoreTiledLayout(inner_k_tiles))
    assert packed.shape == w.shape
    assert same_plain(packed, w)
    assert packed.scale_and_zero.shape == (groups, -(-n // 64) * 64, 2)


def test_bytes() -> None:
    w = tiled(64, 256, 64, torch.bfloat16)
    assert w.nbytes == 64 * 256 // 2 + 64 * 4 * 2 * 2


def test_another_packing_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second device here: pretend that fp16 tensors are on one whose packing is CUDA's."""
    w = tiled()
    cuda = {"half": TILED.inner_k_tiles}
    monkeypatch.setattr(TensorCoreTiledLayout, "packing", lambda self, device: cuda.pop("half", None))
    packed = []
    monkeypatch.setattr(tensor_core_tiled, "pack_cpu", lambda codes, _: packed.append(codes) or codes)
    w.to("cpu", copy=True)
    assert len(packed) == 1
    assert torch.equal(packed[0][:48], w.to_layout(PlainLayout()).qdata)


def test_a_pickle_holds_codes() -> None:
    """The packing depends on the processor; the file may be read on another one."""
    w = torch.nn.Parameter(tiled(dtype=torch.bfloat16), requires_grad=False)
    file = io.BytesIO()
    torch.save({"w": w}, file)
    assert set(w.__reduce_ex__(2)[1][1]) == {"codes", "scale", "zero_point"}
    file.seek(0)
    again = torch.load(file, weights_only=True)["w"]
    assert again.scheme == w.scheme
    assert torch.equal(again.qdata, w.qdata)
    assert torch.equal(again.scale_and_zero, w.scale_and_zero)


def test_views() -> None:
    w = tiled(128, 128)
    float_weight = w.dequantize()
    for view, layout in [(lambda w: w[5:70], TILED), (lambda w: w[:, 32:96], TILED), (lambda w: w.t(), PlainLayout())]:
        assert view(w).scheme.layout == layout
        assert torch.equal(view(w).dequantize(), view(float_weight))
    meta = w.to("meta")
    assert functional.linear(torch.empty(3, 128, device="meta"), meta).shape == (3, 128)


def test_what_it_asks_for() -> None:
    weight = torch.randn(8, 96)
    for wrong, text in [
        (spec(domain=ZeroPointDomain.INT), "zero points of the FLOAT domain, the weight has zero_point_domain INT"),
        (spec(dtype="uint3"), "takes uint4 codes from 0 to 15, the weight has uint3"),
        (spec(16), r"takes groups of 32, 64, 128 or 256 along a row, the weight has blocks of \(1, 16\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            AffineQuantizedTensor.from_float(weight, LinearSpec(wrong, layout=TILED))
    with pytest.raises(ValueError, match=r"takes a matrix, the weight has shape \(2, 8, 96\)"):
        AffineQuantizedTensor.from_float(torch.randn(2, 8, 96), LinearSpec(spec(), layout=TILED))
    with pytest.raises(ValueError, match="inner_k_tiles is 2, 4 or 8, got 3"):
        TensorCoreTiledLayout(3)
    codes, scale, zero_point = AffineQuantizedTensor.from_float(weight, spec()).plain()
    with pytest.raises(ValueError, match=r"in one dtype, got torch\.float32 and torch\.float16"):
        AffineQuantizedTensor.from_plain(
            codes, scale, zero_point.half(), LinearSpec(spec(), layout=TILED), torch.float32
        )


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
def test_moving_to_cuda_and_back(inner_k_tiles: int) -> None:
    layout = TensorCoreTiledLayout(inner_k_tiles)
    w = AffineQuantizedTensor.from_float(torch.randn(45, 160).bfloat16(), LinearSpec(spec(), layout=layout))
    there = w.cuda()
    assert there.qdata.dtype == torch.int32
    assert same_plain(there.cpu(), w)
    assert torch.equal(there.dequantize().cpu(), w.dequantize())
