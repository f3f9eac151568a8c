"""Every registered layout: a bijection on every scheme and shape; and weights that are sparse in blocks."""

from dataclasses import dataclass

import pytest
import torch

from qtorch import AffineQuantizedTensor, BlockSparseLayout, PlainLayout, QuantSpec, vector_codebook_weight_only
from qtorch.dtypes import Layout, register_layout
from qtorch.primitives import LinearSpec, MappingType, PerGroup, PerRow, from_json, mask_blocks, prune_blocks, to_json
from qtorch.primitives.layouts import LAYOUTS
from tests.dtypes.specs import SPECS, quantized
from tests.refusals import refuses

SHAPES = [(32, 64), (8, 32), (40, 96), (1, 64), (0, 64), (2, 16, 64), (3, 5), (7, 33), (1, 1), (5,)]

all_layouts = pytest.mark.parametrize("layout", [cls() for cls in LAYOUTS.values()], ids=LAYOUTS)


def examples() -> list[AffineQuantizedTensor]:
    """Every spec in every shape that its blocks divide, whole and as a strided view."""
    tensors = []
    for name, spec in SPECS.items():
        for shape in SHAPES:
            try:
                spec.weight.block_size(shape)
            except ValueError:
                continue
            w = quantized(name, *shape)
            tensors += [w, w.transpose(0, -1)]
    for shape, size in (((8, 32), -1), ((40, 96), 32), ((2, 16, 64), -1)):
        w = vector_codebook_weight_only(size).apply(torch.randn(shape))
        tensors += [w, w.transpose(0, -1)]
    return tensors


@all_layouts
def test_unpack_is_the_inverse_of_pack(layout: Layout) -> None:
    taken = 0
    for w in examples():
        try:
            packed = w.to_layout(layout)
        except ValueError:
            continue
        taken += 1
        assert packed.scheme.layout == layout
        assert set(packed.inner_tensors) <= {
            *layout.tensors, "scale_scale", "scale_mean", "act_scale", "act_zero_point",
        }  # fmt: skip
        for a, b in zip(packed.plain(), w.plain()):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a.float(), b.float()))
        assert torch.equal(packed.dequantize(), w.dequantize())
        assert torch.equal(packed.to_layout(PlainLayout()), w)
    assert taken


@all_layouts
def test_layouts_are_values(layout: Layout) -> None:
    assert layout == type(layout)()
    assert hash(layout) == hash(type(layout)())
    assert from_json(to_json(layout)) == layout
    assert LAYOUTS[layout.name] is type(layout)


def test_names_and_numbers_of_blocks() -> None:
    w = quantized("uint4 group")
    codes, scale, zero_point = w.plain()
    assert (w.qdata is codes, w.scale is scale, w.zero_point is zero_point) == (True, True, True)

    @dataclass(frozen=True)
    class Impostor(Layout):
        name = "plain"
        tensors = ("qdata",)

    refuses(r"the name 'plain' is taken by .*PlainLayout", lambda: register_layout(Impostor))
    assert LAYOUTS["plain"] is PlainLayout
    values = torch.zeros(32, 160)
    values[:16, 144:] = torch.randn(16, 16).sign()
    w = AffineQuantizedTensor.from_float(values, LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.7)))
    assert w.columns.tolist() == [[0, 1, 9], [0, 1, 2]]
    assert torch.equal(w.dequantize() != 0, values != 0)
    spec = LinearSpec(QuantSpec("int8"), layout=BlockSparseLayout(16, 0.7))
    with pytest.raises(ValueError, match=r"keeps 3 of 10 blocks .* has 10 that are not zero; prune"):
        AffineQuantizedTensor.from_float(torch.randn(64, 160), spec)
    for size, sparsity in ((0, 0.5), (16, 1.0), (16, -0.1)):
        with pytest.raises(ValueError, match="positive block_size and a sparsity"):
            BlockSparseLayout(size, sparsity)
    importance = torch.zeros(4, 8)
    importance[:2, 6:], importance[2:, :2], importance[3, 5] = 1.0, 2.0, 1.0
    mask = mask_blocks(importance, 2, 0.75)
    assert mask.float().sum(1).tolist() == [2, 2, 2, 2]
    assert mask[:2, 6:].all()
    assert mask[2:, :2].all()
    refuses("do not divide a matrix", lambda: mask_blocks(importance, 3, 0.5))


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


@pytest.mark.parametrize(("spec", "shape", "message"), [
    (QuantSpec("uint4", PerGroup(16), MappingType.ASYMMETRIC), (64, 160), "without zero point"),
    (QuantSpec("int8"), (60, 160), "do not divide"),
    (QuantSpec("int8"), (2, 64, 160), "do not divide"),
    (QuantSpec("int8", PerGroup(32)), (64, 160), "divisor of 16 columns"),
])  # fmt: skip
def test_what_is_refused(spec: QuantSpec, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AffineQuantizedTensor.from_float(torch.zeros(shape), LinearSpec(spec, layout=BlockSparseLayout(16, 0.5)))
