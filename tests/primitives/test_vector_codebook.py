"""Vectors of four weights in a byte: the codebook, its bytes, rotation, and tensors of it."""

import pickle

import pytest
import torch

import qtorch
from qtorch import PerBlock, PerGroup, PerRow, PerTensor, compute_error
from qtorch.primitives import vector_spec
from qtorch.primitives.spec import LinearSpec, Scheme
from qtorch.primitives.vector_spec import ENTRIES, RotatedVectorSpec, VectorSpec, nearest_entries, pack_vectors, signs
from tests.refusals import refuses


def spec(granularity=PerRow(), kind=RotatedVectorSpec):
    return kind(granularity=granularity, **vector_spec.codebook_arguments())


def test_the_bytes_of_the_entries():
    """As the top of the file has them, bit by bit."""
    assert len(vector_spec.BASES) == 32
    for byte, entry in enumerate(ENTRIES.tolist()):
        flips = [byte >> bit & 1 for bit in (4, 5, 6)]
        flips.append(sum(flips) % 2)
        base = vector_spec.BASES[byte % 16 + 16 * (byte >> 7)]
        assert entry == [-value if flip else value for value, flip in zip(base, flips, strict=True)]
    assert len(torch.unique(ENTRIES, dim=0)) == 256
    assert ENTRIES.abs().max() == vector_spec.LARGEST
    assert bool((ENTRIES % 2 == 1).all())  # in Python's sense, also of negative ones


def test_normal_numbers():
    """The error is that of the file's first lines, less than any four values leave (Lloyd and Max: .1175)."""
    x = torch.randn(1 << 16, 4)
    error = (x - nearest_entries(x * vector_spec.DEVIATION) / vector_spec.DEVIATION).square().mean()
    assert 0.095 < error < 0.1


def test_nearest_by_a_metric():
    x, root = torch.randn(50, 4) * vector_spec.DEVIATION, torch.randn(4, 4)
    metric = root @ root.t() + 0.1 * torch.eye(4)
    apart = x.unsqueeze(1) - ENTRIES
    for of_metric, given in ((torch.eye(4), None), (metric, metric)):
        distances = torch.einsum("vei,ij,vej->ve", apart, of_metric, apart)
        assert torch.equal(nearest_entries(x, given), ENTRIES[distances.argmin(1)])
    assert nearest_entries(x[:0]).shape == (0, 4)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_packing(axis):
    packed = torch.randint(0, 256, (8, 12, 16), dtype=torch.uint8)
    codes = vector_spec.unpack_vectors(packed, axis)
    assert codes.shape[axis] == 4 * packed.shape[axis]
    assert torch.equal(pack_vectors(codes, axis), packed)
    codes = codes.contiguous()
    codes[3, 5, 7] += 1
    refuses("1 of 1536 vectors", lambda: pack_vectors(codes, axis))


@pytest.mark.parametrize("size", [4, 8, 32, 256])
def test_rotation(size):
    """Orthogonal, its own inverse, and S H S entry by entry; an outlier is spread."""
    eye = torch.eye(size, dtype=torch.float64)
    matrix = vector_spec.rotate_vectors(eye, size)
    torch.testing.assert_close(matrix @ matrix, eye)
    assert torch.equal(matrix, matrix.t())
    index = torch.arange(size)
    parity = torch.tensor([[(int(i) & int(j)).bit_count() & 1 for j in index] for i in index])
    flips = torch.tensor(signs(size))
    torch.testing.assert_close(matrix, (flips.outer(flips) * (1 - 2 * parity)).double() / size**0.5)
    assert abs(sum(signs(size))) <= 2 * size**0.5 + 2
    assert signs(2 * size)[:size] == signs(size)


@pytest.mark.parametrize(("columns", "block"), [(352, 32), (512, 256), (36, 4), (128, 128)])
def test_rows_are_rotated_in_blocks(columns, block):
    x = torch.randn(3, columns)
    assert torch.equal(spec().rotated(x), vector_spec.rotate_vectors(x, block))


@pytest.mark.parametrize("granularity", [PerRow(), PerGroup(64)], ids=str)
@pytest.mark.parametrize("kind", [VectorSpec, RotatedVectorSpec])
def test_spec(kind, granularity):
    of, x = spec(granularity, kind), torch.randn(16, 192) * torch.rand(16, 1)
    assert qtorch.primitives.from_json(qtorch.primitives.to_json(of)) == of
    scale, zero_point = of.choose_qparams(x)
    codes = of.quantize(x, scale, zero_point)
    assert zero_point is None
    assert torch.equal(vector_spec.unpack_vectors(pack_vectors(codes)), codes)
    assert 9.5 < compute_error(x, of.dequantize(codes, scale, None)) < 11
    assert compute_error(of.dequantize(codes, scale, None), of.fake_quantize(x)) > 100
    if kind is RotatedVectorSpec:
        assert torch.equal(codes, of.unrotated.quantize(of.rotated(x), scale, None))
        assert (
            compute_error(of.unrotated.dequantize(codes, scale, None), of.rotated(of.dequantize(codes, scale, None)))
            > 100
        )


def test_numbers_of_any_size():
    for size in (1e-30, 1e30):
        x = torch.randn(4, 64) * size
        x[1] = 0
        weight = qtorch.vector_codebook_weight_only().apply(x)
        assert 9 < compute_error(x / size, weight.dequantize() / size) < 11.5
        assert not weight.dequantize()[1].any()


def test_refusals():
    for granularity, kind, error in (
        (PerTensor(), RotatedVectorSpec, "blocks are rows, or parts of rows whose length is a power of two"),
        (PerGroup(24), RotatedVectorSpec, "power of two"),
        (PerGroup(6), VectorSpec, "a multiple of 4"),
        (PerBlock((4, 4)), VectorSpec, "a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=error):
            spec(granularity, kind)
    with pytest.raises(ValueError, match=r"RotatedVectorSpec: quant_max is 59\.0, got 7"):
        RotatedVectorSpec(**{**vector_spec.codebook_arguments(), "quant_max": 7})
    refuses("vectors of 4", lambda: spec().block_size((3, 6)), qtorch.primitives.granularity.IndivisibleError)
    with pytest.raises(ValueError, match="holds the codes of a VectorSpec"):
        qtorch.int8_weight_only().apply(torch.randn(4, 8)).to_layout(qtorch.primitives.layouts.VectorCodebookLayout())
    with pytest.raises(ValueError, match="lie along axis -1"):
        qtorch.primitives.layouts.VectorCodebookLayout(-2).check(Scheme(LinearSpec(spec()), (8, 8), torch.float32))


def test_views():
    """Exact, or an error; packed as long as they can be."""
    rows, groups = (qtorch.vector_codebook_weight_only(size).apply(torch.randn(8, 128)) for size in (-1, 32))
    views = (lambda t: t[2:7], lambda t: t.t(), lambda t: t.t()[:, 3:5], lambda t: t.view(2, 4, 128), lambda t: t[1:2])
    for weight in (rows, groups):
        whole = weight.dequantize()
        for view in views:
            assert torch.equal(view(weight).dequantize(), view(whole))
            assert view(weight).scheme.layout.name == "vector_codebook"
        assert torch.equal(pickle.loads(pickle.dumps(weight)).dequantize(), whole)
        assert torch.equal(torch.cat([weight[:3], weight[3:]]).dequantize(), whole)
    assert torch.equal(groups[:, 32:96].dequantize(), groups.dequantize()[:, 32:96])
    assert torch.equal(torch.cat([groups, groups], 1).dequantize(), groups.dequantize().repeat(1, 2))
    one = qtorch.vector_codebook_weight_only(128).apply(torch.randn(8, 128))
    cuts = (lambda: groups[:, 4:20], lambda: one[:, :64], lambda: rows[:, :64], lambda: rows[:, 4:8])
    picked = lambda: rows.index_select(1, torch.tensor([0, 1, 2, 3]))  # noqa: E731
    for view in (*cuts, picked, lambda: torch.cat([rows, rows], 1)):
        with pytest.raises(ValueError, match="cuts or joins rotated blocks"):
            view()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits(dtype):
    """2 bits for a weight, 16 for a scale, in memory and in files."""
    layer = torch.nn.Linear(512, 64, bias=False, dtype=dtype)
    qtorch.quantize_(layer, qtorch.vector_codebook_weight_only())
    assert layer.weight.nbytes == 64 * 512 // 4 + 64 * 2
    assert layer.weight.qdata.shape == (64, 128)
