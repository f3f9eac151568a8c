"""2:4 sparsity: pruning, packing, and the layout."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.dtypes import AffineQuantizedTensor, PlainLayout, SemiSparseLayout, copying
from qtorch.primitives import LinearSpec, MappingType, QuantSpec, compute_error, is_2_4, prune_2_4
from qtorch.primitives.layouts.semi_sparse import pack_2_4, unpack_2_4
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
    assert (w.shape, w.qdata.nbytes) == ((n, k), n * row)
    assert w.nbytes == n * (row + 4)


@pytest.mark.parametrize("name", SPARSE)
def test_views_that_leave_the_axis_whole_stay_packed(name: str) -> None:
    w = quantized(name, 4, 32, 96)
    for view, axis in [
        (w[1], -1), (w[:, 3:9], -1), (w.transpose(1, 2), -2), (w.transpose(1, 2)[2].t(), -1),
        (w.reshape(128, 96), -1),
    ]:  # fmt: skip
        assert view.scheme.layout == SemiSparseLayout(axis)
        assert view.qdata.numel() * 8 == view.numel() * 5
        assert view.qdata.untyped_storage().data_ptr() == w.qdata.untyped_storage().data_ptr()
    assert w[torch.tensor([2, 0])].scheme.layout == SEMI_SPARSE
    assert torch.equal(w.transpose(1, 2).dequantize(), w.dequantize().transpose(1, 2))


@pytest.mark.parametrize("name", SPARSE)
def test_views_and_writes(name: str) -> None:
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
    # What is 2:4 can be written into it; what is not is an error, and nothing is written.
    w = quantized(name)
    before, values = w.dequantize(), prune_2_4(torch.randn(32, 64))
    refuses("runs of four have more than two that are not zero; prune the weight", lambda: w.copy_(torch.randn(32, 64)))
    assert torch.equal(w.dequantize(), before)
    w.copy_(values)
    assert same_bits(w, AffineQuantizedTensor.from_float(values, SPECS[name]))


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
        assert torch.equal(torch.nn.functional.embedding(ids, w), d[ids])
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
        assert there.qdata.nbytes == (shape[0] + -shape[0] % 64) * (shape[1] + -shape[1] % 64) * 5 // 8
    assert same_bits(there.cpu(), w)
    assert torch.equal(there.dequantize().cpu(), w.dequantize())
    assert torch.equal(there.t().dequantize().cpu(), w.t().dequantize())
    assert torch.equal(there[:1].dequantize().cpu(), w[:1].dequantize())


@pytest.mark.gpu
def test_a_negative_zero_survives_on_cuda() -> None:
    w = AffineQuantizedTensor.from_float(torch.tensor([[1.0, 0, 0, -1e-12]]), LinearSpec(FLOAT8, layout=SEMI_SPARSE))
    assert same_bits(w.cuda().cpu(), w)


DTYPES = [torch.int8, torch.float8_e4m3fn, torch.uint8]


def naive_prune(row: list[float]) -> list[float]:
    kept = []
    for start in range(0, len(row), 4):
        run = row[start : start + 4]
        order = sorted(range(len(run)), key=lambda i: (-abs(run[i]), i))
        kept += [x if i in order[:2] else 0.0 for i, x in enumerate(run)]
    return kept


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 3), max_size=23))
def test_prune_keeps_the_two_largest_of_each_four_the_first_of_equals(row: list[int]) -> None:
    assert prune_2_4(torch.tensor(row, dtype=torch.float32)).tolist() == naive_prune([float(x) for x in row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruning_a_normal_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64, 130).to(dtype)
    pruned = prune_2_4(weight)
    assert (pruned.shape, pruned.dtype) == (weight.shape, dtype)
    assert pruned.is_contiguous()
    assert is_2_4(pruned)
    assert not is_2_4(weight)
    assert torch.equal(prune_2_4(pruned), pruned)
    # Nothing in a last run of two is pruned: 66 of 130 stay.
    assert int((pruned != 0).sum()) == 3 * 64 * 66
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])
    assert 8 < compute_error(weight, pruned) < 10


def test_what_is_held_and_the_format() -> None:
    assert is_2_4(torch.tensor([0, 1, 2, 0, 3, 0, 0, 4]))
    # Runs start at multiples of four.
    assert not is_2_4(torch.tensor([1, 2, 3, 0]))
    assert is_2_4(torch.tensor([0, 0, 1, 2, 3, 4, 0, 0]))
    assert is_2_4(torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]]))
    assert not is_2_4(torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert is_2_4(torch.tensor([-0.0, 1, 2, -0.0])), "a negative zero is zero"
    assert is_2_4(torch.empty(3, 0))

    def make(weight: torch.Tensor, spec: QuantSpec) -> None:
        AffineQuantizedTensor.from_float(weight, LinearSpec(spec, layout=SEMI_SPARSE))

    refuses(r"\(32, 64\) are not 2:4 sparse along axis -1: 512 of 512 runs", lambda: make(torch.ones(32, 64), INT8))
    pruned = prune_2_4(torch.randn(32, 64))
    refuses("packs int8 and float8_e4m3fn codes, the weight has int4", lambda: make(pruned, QuantSpec("int4")))
    with pytest.raises(ValueError, match=r"takes no zero point, as zeros have the code zero, got int8 P.* asymm"):
        make(pruned, QuantSpec("int8", mapping=MappingType.ASYMMETRIC))
    # 16 codes: the first of each run, the second of each, then the positions, as `pack_bits` has them.
    codes = torch.tensor([0, 9, 0, 8, 7, 6, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0], dtype=torch.int8)
    # Items 2 of `pack_bits` of 8 codes at 2 bits, G = 1: byte i holds codes 4 i .. 4 i + 3, the first lowest.
    firsts, seconds = 1 | 0 << 2 | 0 << 4 | 0 << 6, 3 | 1 << 2 | 2 << 4 | 1 << 6
    assert pack_2_4(codes).tolist() == [9, 7, 0, 0, 8, 6, 5, 0, firsts, seconds]
    pruned = prune_2_4(-torch.arange(1.0, 9))
    assert pruned.tolist() == [0, 0, -3, -4, 0, 0, -7, -8]
    assert not pruned[:2].signbit().any()
    codes = torch.ones(2, 8, dtype=torch.int8)
    codes[1, 4:6] = 0
    refuses(r"\(2, 8\) are not 2:4 sparse along axis -1: 3 of 8 runs of four have more", lambda: pack_2_4(codes))
    with pytest.raises(ValueError, match="more than two that are not zero"):
        pack_2_4(torch.tensor([1.0, 2.0, -0.0, 0.0]).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"17 codes, 2:4 sparse, take 20 bytes, axis -1 of \(3, 10\) has 10"):
        unpack_2_4(torch.zeros(3, 10, dtype=torch.uint8), 17, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_that_is_2_4(dtype: torch.dtype) -> None:
    """Every set of positions, with bytes of every kind: 0x80 is -128 and the negative zero of float8, 0x7f its NaN."""
    runs = {
        tuple(a if k == i else b if k == j else 0 for k in range(4))
        for i, j in itertools.combinations(range(4), 2)
        for a, b in itertools.product([0, 1, 0x7F, 0x80, 0xFF], repeat=2)
    }
    codes = torch.tensor(sorted(runs), dtype=torch.uint8).flatten().view(dtype)
    unpacked = unpack_2_4(pack_2_4(codes), len(codes), dtype)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked.view(torch.uint8), codes.view(torch.uint8))
