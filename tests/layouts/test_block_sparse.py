"""BlockSparseLayout: what is stored, what is refused."""

import pytest
import torch

from qtorch import AffineQuantizedTensor, BlockSparseLayout, LinearSpec, MappingType, PerGroup, PerRow, QuantSpec
from qtorch.primitives import mask_blocks, prune_blocks


@pytest.mark.parametrize(
    ("spec", "bytes_of_codes"),
    [(QuantSpec("int8"), 64 * 48), (QuantSpec("int4", PerGroup(16)), 64 * 24), (QuantSpec("int3", PerRow()), 64 * 18)],
    ids=str,
)
def test_only_what_is_kept_is_stored(spec: QuantSpec, bytes_of_codes: int) -> None:
    values = prune_blocks(torch.randn(64, 160), 16, 0.7)
    w = AffineQuantizedTensor.from_float(values, LinearSpec(spec, layout=BlockSparseLayout(16, 0.7)))
    assert w.qdata.numel() == bytes_of_codes
    assert w.columns.shape == (4, 3)  # of 10
    assert torch.equal(w.columns, w.columns.sort(1).values)
    dense = AffineQuantizedTensor.from_float(values, LinearSpec(spec))
    assert torch.equal(w.dequantize(), dense.dequantize())
    assert int((w.dequantize() != 0).sum()) <= 64 * 48


def test_fewer_blocks_than_are_kept() -> None:
    values = torch.zeros(32, 160)
    values[:16, 144:] = torch.randn(16, 16).sign()
    w = AffineQuantizedTensor.from_float(values, LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.7)))
    assert w.columns.tolist() == [[0, 1, 9], [0, 1, 2]]
    assert torch.equal(w.dequantize() != 0, values != 0)


def test_more_blocks_than_are_kept_are_refused() -> None:
    spec = LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.7))
    with pytest.raises(ValueError, match=r"keeps 3 of 10 blocks .* has 10 that are not zero; prune"):
        AffineQuantizedTensor.from_float(torch.randn(64, 160), spec)


@pytest.mark.parametrize(("spec", "shape", "message"), [
    (QuantSpec("uint4", PerGroup(16), MappingType.ASYMMETRIC), (64, 160), "without zero point"),
    (QuantSpec("int8"), (60, 160), "do not divide"),
    (QuantSpec("int8"), (2, 64, 160), "do not divide"),
    (QuantSpec("int8", PerGroup(32)), (64, 160), "divisor of 16 columns"),
])  # fmt: skip
def test_what_is_refused(spec: QuantSpec, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AffineQuantizedTensor.from_float(torch.zeros(shape), LinearSpec(spec, layout=BlockSparseLayout(16, 0.5)))


def test_arguments() -> None:
    for size, sparsity in ((0, 0.5), (16, 1.0), (16, -0.1)):
        with pytest.raises(ValueError, match="positive block_size and a sparsity"):
            BlockSparseLayout(size, sparsity)


def test_the_mask_keeps_the_largest_blocks_of_each_row() -> None:
    importance = torch.zeros(4, 8)
    importance[:2, 6:], importance[2:, :2], importance[3, 5] = 1.0, 2.0, 1.0
    mask = mask_blocks(importance, 2, 0.75)
    assert mask.float().sum(1).tolist() == [2, 2, 2, 2]
    assert mask[:2, 6:].all()
    assert mask[2:, :2].all()
    with pytest.raises(ValueError, match="do not divide a matrix"):
        mask_blocks(importance, 3, 0.5)
