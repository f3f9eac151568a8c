"""Granularities and the block arithmetic behind them."""

from collections.abc import Callable
from math import prod
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.primitives import Granularity, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from qtorch.primitives.granularity import BlockView, block_of, granularity_of, resolve_block, scale_shape

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def shapes_and_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape of one to four axes, some empty, and a block that divides it."""
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    counts = [draw(st.integers(0, 3)) for _ in blocks]
    return tuple(b * n for b, n in zip(blocks, counts)), tuple(blocks)


@pytest.mark.parametrize(("granularity", "shape", "block", "scale"), [
    (PerTensor(), (), (), ()),
    (PerTensor(), (7,), (7,), (1,)),
    (PerTensor(), (3, 5), (3, 5), (1, 1)),
    (PerTensor(), (2, 0), (2, 0), (1, 1)),
    (PerRow(), (7,), (7,), (1,)),
    (PerRow(), (3, 5), (1, 5), (3, 1)),
    (PerRow(), (2, 3, 5), (1, 1, 5), (2, 3, 1)),
    (PerRow(), (0, 5), (1, 5), (0, 1)),
    (PerToken(), (2, 3, 5), (1, 1, 5), (2, 3, 1)),
    (PerAxis(0), (4, 3, 2, 2), (1, 3, 2, 2), (4, 1, 1, 1)),
    (PerAxis(-1), (4, 3), (4, 1), (1, 3)),
    (PerGroup(3), (9,), (3,), (3,)),
    (PerGroup(3), (2, 9), (1, 3), (2, 3)),
    (PerGroup(-1), (2, 9), (1, 9), (2, 1)),
    (PerGroup(4), (3, 0), (1, 4), (3, 0)),
    (PerBlock((2, 3)), (4, 9), (2, 3), (2, 3)),
    (PerBlock((2, 3)), (5, 4, 9), (1, 2, 3), (5, 2, 3)),
    (PerBlock((-1, 3)), (4, 9), (4, 3), (1, 3)),
    (PerBlock(()), (2, 3), (1, 1), (2, 3)),
])  # fmt: skip
def test_block_and_scale_shape(
    granularity: Granularity,
    shape: tuple[int, ...],
    block: tuple[int, ...],
    scale: tuple[int, ...],
) -> None:
    assert granularity.block(shape) == block
    assert scale_shape(shape, block) == BlockView(shape, block).scale_shape == scale


@pytest.mark.parametrize("granularity", [
    PerTensor(), PerRow(), PerGroup(8), PerBlock((1, 4, 4)), PerBlock((-1, 2, -1))
])  # fmt: skip
def test_the_word_is_found_again_from_its_pattern(granularity: Granularity) -> None:
    assert granularity_of(granularity.pattern(3)) == granularity


def test_words_compare_by_kind_and_value() -> None:
    assert PerGroup(32) == PerGroup(32) != PerGroup(64)
    assert PerRow() != PerToken() != PerTensor()
    assert PerBlock([1, 32]) == PerBlock((1, 32))  # type: ignore[arg-type]
    assert len({PerRow(), PerRow(), PerToken(), PerAxis(0), PerAxis(0)}) == 3


@PROPERTY
@given(shapes_and_blocks())
def test_the_block_follows_from_the_shape_of_the_scale(case) -> None:
    shape, block = case
    scale = scale_shape(shape, resolve_block(block, shape))
    assert scale_shape(shape, block_of(shape, scale)) == scale
    if prod(shape):
        assert block_of(shape, scale) == block


@PROPERTY
@given(shapes_and_blocks())
def test_merge_undoes_split(case) -> None:
    """Of a tensor that need not be contiguous; reducing over `dims` reduces each block."""
    shape, block = case
    x = torch.arange(prod(shape)).reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    view = BlockView(shape, block)
    assert torch.equal(view.split(x), view.split(x.contiguous()))
    assert torch.equal(view.merge(view.split(x)), x)
    ones = view.split(torch.ones(shape))
    sizes = ones.sum(view.dims).reshape(view.scale_shape) if view.dims else ones
    assert torch.equal(sizes, torch.full(view.scale_shape, float(prod(view.block))))
    assert torch.equal(view.as_rows(ones).sum(1).reshape(view.scale_shape), sizes.reshape(view.scale_shape))


@PROPERTY
@given(shapes_and_blocks())
def test_each_scale_meets_the_elements_of_its_block(case) -> None:
    shape, block = case
    view = BlockView(shape, block)
    scale = torch.arange(prod(view.scale_shape)).reshape(view.scale_shape)
    spread = view.merge(view.split_scale(scale).expand_as(view.split(torch.zeros(shape))))
    wanted = scale
    for axis, size in enumerate(block):
        if view.scale_shape[axis] * size == shape[axis]:
            wanted = wanted.repeat_interleave(size, axis)
    assert torch.equal(spread, wanted.expand(shape))


def test_a_scale_may_lack_the_reduced_axes() -> None:
    view = BlockView((4, 6), (1, 6))
    scale = torch.arange(4.0)
    assert torch.equal(view.split_scale(scale), view.split_scale(scale.reshape(4, 1)))


@pytest.mark.parametrize("make", [lambda: PerGroup(0), lambda: PerGroup(-2), lambda: PerBlock((4, 0))])
def test_sizes_are_positive(make: Callable[[], Granularity]) -> None:
    with pytest.raises(ValueError, match="must be positive, or -1 for a whole"):
        make()


def test_error_texts() -> None:
    cases: dict[str, Callable[[], object]] = {
        "does not divide": lambda: PerGroup(32).block((4, 48)),
        "larger than the axis": lambda: PerBlock((8, 8)).block((4, 8)),
        "too many axes": lambda: PerBlock((2, 2)).block((4,)),
        "wrong rank": lambda: resolve_block((1, 4), (4,)),
        "no such axis": lambda: PerAxis(2).block((4, 4)),
        "zero-dimensional": lambda: PerAxis(0).block(()),
        "wrong scale count": lambda: BlockView((4, 6), (1, 3)).split_scale(torch.ones(4, 1)),
    }
    texts = []
    for name, call in cases.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the texts follow)
            call()
        texts.append(fill(f"{name}: {error.value}", 96))
    assert_expected_inline(
        "\n".join(texts),
        """\
does not divide: block_size (1, 32) does not divide shape (4, 48): 48 % 32 along axis 1
larger than the axis: block_size (8, 8) does not divide shape (4, 8): 4 % 8 along axis 0
too many axes: PerBlock(2, 2) needs 2 axes, the tensor has 1
wrong rank: block_size (1, 4) has 2 axes, the tensor has shape (4,)
no such axis: PerAxis(2) does not exist on a tensor of 2 dimensions
zero-dimensional: PerAxis(0) does not exist on a tensor of 0 dimensions
wrong scale count: a tensor of shape (4, 6) in blocks of (1, 3) has 8 scales of shape (4, 2),
got shape (4, 1)""",
    )
