"""SemiSparseLayout: what is only true of it; the rest of these tests run over it as over every scheme."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from qtorch.dtypes import AffineQuantizedTensor, PlainLayout, SemiSparseLayout, copying
from qtorch.primitives import LinearSpec, MappingType, QuantSpec, prune_2_4
from tests.dtypes.specs import FLOAT8, INT8, SPARSE, SPECS, quantized
from tests.refusals import refuses

SEMI_SPARSE = SemiSparseLayout()


def same_bits(a: AffineQuantizedTensor, b: AffineQuantizedTensor) -> bool:
    (p, s, _), (q, t, _) = a.plain(), b.plain()
    return p.dtype == q.dtype and torch.equal(p.view(torch.uint8), q.view(torch.uint8)) and torch.equal(s, t)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    spec=st.sampled_from([INT8, FLOAT8]),
    shape=st.lists(st.integers(0, 37), min_size=1, max_size=3),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_bijection_on_every_size(spec: QuantSpec, shape: list[int], zeros: float) -> None:
    """Runs of two, one or no number; in float8 also a kept -0.0, the code of a small negative number."""
    values = prune_2_4(torch.randn(shape)) * (torch.rand(shape) >= zeros)
    values = torch.where((values < 0) & (torch.rand(shape) < 0.2), -1e-12, values)
    w = AffineQuantizedTensor.from_float(prune_2_4(values), spec)
    packed = w.to_layout(SEMI_SPARSE)
    assert packed.shape == w.shape
    assert same_bits(packed, w)
    assert same_bits(packed.to_layout(PlainLayout()), w)


@pytest.mark.parametrize(("n", "k", "row"), [(16, 64, 40), (3, 5, 10), (7, 33, 30), (1, 16, 10), (4, 0, 0)])
@pytest.mark.parametrize("spec", [INT8, FLOAT8], ids=str)
def test_bytes(spec: QuantSpec, n: int, k: int, row: int) -> None:
    """5 bits a code, K padded to 16, and a scale in fp32 for each row."""
    w = AffineQuantizedTensor.from_float(prune_2_4(torch.randn(n, k)), LinearSpec(spec, layout=SEMI_SPARSE))
    assert w.shape == (n, k)
    assert w.qdata.nbytes == n * row
    assert w.nbytes == n * (row + 4)


@pytest.mark.parametrize("name", SPARSE)
def test_views_that_leave_the_axis_whole_stay_packed(name: str) -> None:
    w = quantized(name, 4, 32, 96)
    for view, axis in [
        (w[1], -1),
        (w[:, 3:9], -1),
        (w.transpose(1, 2), -2),
        (w.transpose(1, 2)[2].t(), -1),
        (w.reshape(128, 96), -1),
    ]:
        assert view.scheme.layout == SemiSparseLayout(axis)
        assert view.qdata.numel() * 8 == view.numel() * 5
        assert view.qdata.untyped_storage().data_ptr() == w.qdata.untyped_storage().data_ptr()
    assert w[torch.tensor([2, 0])].scheme.layout == SEMI_SPARSE
    assert torch.equal(w.transpose(1, 2).dequantize(), w.dequantize().transpose(1, 2))


@pytest.mark.parametrize("name", SPARSE)
def test_views_that_cut_the_axis_are_plain(name: str) -> None:
    """Whether what they leave is 2:4 depends on the codes, and the layout of a view must not."""
    w = quantized(name)
    d = w.dequantize()
    for view in [
        lambda w: w[:, 1:],
        lambda w: w[:, 16:32],
        lambda w: w.reshape(16, 2, 64)[..., ::2],
        lambda w: w[3, 5],
    ]:
        assert view(w).scheme.layout == PlainLayout()
        assert torch.equal(view(w).dequantize(), view(d))


@pytest.mark.parametrize("name", SPARSE)
def test_copying_in(name: str) -> None:
    """What is 2:4 can be written into it; what is not is an error, and nothing is written."""
    w = quantized(name)
    before, values = w.dequantize(), prune_2_4(torch.randn(32, 64))
    refuses("runs of four have more than two that are not zero; prune the weight", lambda: w.copy_(torch.randn(32, 64)))
    assert torch.equal(w.dequantize(), before)
    w.copy_(values)
    assert same_bits(w, AffineQuantizedTensor.from_float(values, SPECS[name]))


def test_what_it_cannot_hold() -> None:
    def make(weight: torch.Tensor, spec: QuantSpec) -> None:
        AffineQuantizedTensor.from_float(weight, LinearSpec(spec, layout=SEMI_SPARSE))

    refuses(r"\(32, 64\) are not 2:4 sparse along axis -1: 512 of 512 runs", lambda: make(torch.ones(32, 64), INT8))
    pruned = prune_2_4(torch.randn(32, 64))
    refuses("packs int8 and float8_e4m3fn codes, the weight has int4", lambda: make(pruned, QuantSpec("int4")))
    with pytest.raises(ValueError, match=r"without zero point, whose zeros have the code zero, got int8 P.* asymm"):
        make(pruned, QuantSpec("int8", mapping=MappingType.ASYMMETRIC))


def test_another_packing_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA here: pretend that the processor compresses, into the bare codes, and cannot cut what it has."""
    from qtorch.primitives.layouts import semi_sparse

    with monkeypatch.context() as patch:
        patch.setattr(SemiSparseLayout, "packing", lambda self, device: "cusparselt")
        patch.setattr(semi_sparse, "has_cusparselt", lambda codes: True)
        patch.setattr(semi_sparse, "compressed_shape", lambda n, k: (n, k))
        patch.setattr(semi_sparse, "compress_cusparselt", lambda codes: codes.clone())
        copying.forms_of.cache_clear()
        patch.setattr(semi_sparse, "decompress_cusparselt", lambda qdata, n, k: qdata[:n, :k])
        w = quantized("float8 row, 2:4")
        d = w.dequantize()
        assert w.qdata.dtype == torch.float8_e4m3fn
        # A pickle holds plain codes, a view unpacks and is plain.
        assert set(w.__reduce_ex__(2)[1][1]) == {"codes", "scale"}
        for view in [lambda w: w.t(), lambda w: w[4:8], lambda w: w.reshape(4, 8, 64), lambda w: w[torch.tensor([3])]]:
            assert view(w).scheme.layout == PlainLayout()
            assert torch.equal(view(w).dequantize(), view(d))
        ids = torch.tensor([3, 0, 3])
        assert torch.equal(functional.embedding(ids, w), d[ids])
        patch.setattr(SemiSparseLayout, "packing", lambda self, device: None if device.type == "cpu" else 1)
        assert same_bits(copy.deepcopy(w), w)
    copying.forms_of.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("shape", [(32, 64), (45, 50), (256, 512), (1, 3)], ids=str)
def test_moving_to_cuda_and_back(name: str, shape: tuple[int, int]) -> None:
    w = quantized(name, *shape)
    there = w.cuda()
    if torch.backends.cusparselt.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        assert there.qdata.dtype == w.scheme.weight.dtype.storage
        assert there.qdata.nbytes == (shape[0] + -shape[0] % 32) * (shape[1] + -shape[1] % 32) * 5 // 8
    assert same_bits(there.cpu(), w)
    assert torch.equal(there.dequantize().cpu(), w.dequantize())
    assert torch.equal(there.t().dequantize().cpu(), w.t().dequantize())
    assert torch.equal(there[:1].dequantize().cpu(), w[:1].dequantize())


@pytest.mark.gpu
def test_a_negative_zero_survives_on_cuda() -> None:
    w = AffineQuantizedTensor.from_float(torch.tensor([[1.0, 0, 0, -1e-12]]), LinearSpec(FLOAT8, layout=SEMI_SPARSE))
    assert same_bits(w.cuda().cpu(), w)
