"""Every registered layout is an exact bijection, on whatever schemes it takes, and can be written as JSON."""

from dataclasses import dataclass

import pytest
import torch

from qtorch import AffineQuantizedTensor, PlainLayout, vector_codebook_weight_only
from qtorch.dtypes import Layout, register_layout
from qtorch.primitives import from_json, to_json
from qtorch.primitives.layouts import LAYOUTS
from tests.dtypes.specs import SPECS, quantized

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
        assert set(packed.inner_tensors) <= {*layout.tensors, "scale_scale", "act_scale", "act_zero_point"}
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


def test_the_plain_layout_packs_nothing() -> None:
    w = quantized("uint4 group")
    codes, scale, zero_point = w.plain()
    assert (w.qdata is codes, w.scale is scale, w.zero_point is zero_point) == (True, True, True)


def test_a_name_is_taken_once() -> None:
    @dataclass(frozen=True)
    class Impostor(Layout):
        name = "plain"
        tensors = ("qdata",)

    with pytest.raises(ValueError, match=r"the name 'plain' is taken by .*PlainLayout"):
        register_layout(Impostor)
    assert LAYOUTS["plain"] is PlainLayout
