"""Names of types and granularities, and the sizes and signal-to-noise ratios that go with them."""

import copy
import math
import pickle
from collections.abc import Callable
from math import prod
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.primitives import PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, QDType, compute_error, qdtype
from qtorch.primitives.granularity import BlockView, Granularity, block_of, granularity_of, resolve_block, scale_shape
from tests.refusals import refuses

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def shapes_and_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape of one to four axes, some empty, and a block that divides it."""
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return tuple(b * n for b, n in zip(blocks, [draw(st.integers(0, 3)) for _ in blocks])), tuple(blocks)


@pytest.mark.parametrize(("granularity", "shape", "block", "scale"), [
    (PerTensor(), (), (), ()), (PerTensor(), (7,), (7,), (1,)), (PerTensor(), (3, 5), (3, 5), (1, 1)),
    (PerTensor(), (2, 0), (2, 0), (1, 1)), (PerRow(), (7,), (7,), (1,)), (PerRow(), (3, 5), (1, 5), (3, 1)),
    (PerRow(), (2, 3, 5), (1, 1, 5), (2, 3, 1)), (PerRow(), (0, 5), (1, 5), (0, 1)),
    (PerToken(), (2, 3, 5), (1, 1, 5), (2, 3, 1)), (PerAxis(0), (4, 3, 2, 2), (1, 3, 2, 2), (4, 1, 1, 1)),
    (PerAxis(-1), (4, 3), (4, 1), (1, 3)), (PerGroup(3), (9,), (3,), (3,)), (PerGroup(3), (2, 9), (1, 3), (2, 3)),
    (PerGroup(-1), (2, 9), (1, 9), (2, 1)), (PerGroup(4), (3, 0), (1, 4), (3, 0)),
    (PerBlock((2, 3)), (4, 9), (2, 3), (2, 3)), (PerBlock((2, 3)), (5, 4, 9), (1, 2, 3), (5, 2, 3)),
    (PerBlock((-1, 3)), (4, 9), (4, 3), (1, 3)), (PerBlock(()), (2, 3), (1, 1), (2, 3)),
])  # fmt: skip
def test_block_and_scale_shape(
    granularity: Granularity, shape: tuple[int, ...], block: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    assert granularity.block(shape) == block
    assert scale_shape(shape, block) == BlockView(shape, block).scale_shape == scale


@pytest.mark.parametrize("granularity", [
    PerTensor(), PerRow(), PerGroup(8), PerBlock((1, 4, 4)), PerBlock((-1, 2, -1))
])  # fmt: skip
def test_the_word_is_found_again_from_its_pattern(granularity: Granularity) -> None:
    assert granularity_of(granularity.pattern(3)) == granularity


def test_words_and_scaling() -> None:
    assert PerGroup(32) == PerGroup(32) != PerGroup(64)
    assert PerRow() != PerToken() != PerTensor()
    assert PerBlock([1, 32]) == PerBlock((1, 32))  # type: ignore[arg-type]
    assert len({PerRow(), PerRow(), PerToken(), PerAxis(0), PerAxis(0)}) == 3
    view = BlockView((4, 6), (1, 6))
    scale = torch.arange(4.0)
    assert torch.equal(view.split_scale(scale), view.split_scale(scale.reshape(4, 1)))
    with pytest.raises(AttributeError):
        qdtype("int8").bits = 7  # type: ignore[misc]
    x, noise = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    y = x + noise / 16
    assert torch.equal(compute_error(x, y), compute_error(4 * x, 4 * y))
    ones = torch.ones(3, requires_grad=True)
    assert compute_error(ones, ones) == math.inf
    assert compute_error(torch.zeros(3), ones) == -math.inf
    assert not compute_error(ones, ones * 2).requires_grad
    assert compute_error(ones, ones * 2).shape == ()


@PROPERTY
@given(shapes_and_blocks())
def test_blocks_and_their_scales(case) -> None:
    shape, block = case
    scale = scale_shape(shape, resolve_block(block, shape))
    assert scale_shape(shape, block_of(shape, scale)) == scale
    if prod(shape):
        assert block_of(shape, scale) == block
    # Of a tensor that need not be contiguous; reducing over `dims` reduces each block.
    shape, block = case
    x = torch.arange(prod(shape)).reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    view = BlockView(shape, block)
    assert torch.equal(view.split(x), view.split(x.contiguous()))
    assert torch.equal(view.merge(view.split(x)), x)
    ones = view.split(torch.ones(shape))
    sizes = ones.sum(view.dims).reshape(view.scale_shape) if view.dims else ones
    assert torch.equal(sizes, torch.full(view.scale_shape, float(prod(view.block))))
    assert torch.equal(view.as_rows(ones).sum(1).reshape(view.scale_shape), sizes.reshape(view.scale_shape))
    shape, block = case
    view = BlockView(shape, block)
    scale = torch.arange(prod(view.scale_shape)).reshape(view.scale_shape)
    spread = view.merge(view.split_scale(scale).expand_as(view.split(torch.zeros(shape))))
    wanted = scale
    for axis, size in enumerate(block):
        if view.scale_shape[axis] * size == shape[axis]:
            wanted = wanted.repeat_interleave(size, axis)
    assert torch.equal(spread, wanted.expand(shape))


@pytest.mark.parametrize("make", [lambda: PerGroup(0), lambda: PerGroup(-2), lambda: PerBlock((4, 0))])
def test_sizes_are_positive(make: Callable[[], Granularity]) -> None:
    refuses("must be positive, or -1 for a whole", make)


def test_error_texts() -> None:
    cases: dict[str, Callable[[], object]] = {
        "does not divide": lambda: PerGroup(32).block((4, 48)),
        "larger than the axis": lambda: PerBlock((8, 8)).block((4, 8)),
        "too many axes": lambda: PerBlock((2, 2)).block((4,)),
        "without elements": lambda: resolve_block((0, 4), (4, 4)),
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
without elements: block_size (0, 4) does not divide shape (4, 4): 4 % 0 along axis 0
wrong rank: block_size (1, 4) has 2 axes, the tensor has shape (4,)
no such axis: PerAxis(2) does not exist on a tensor of 2 dimensions
zero-dimensional: PerAxis(0) does not exist on a tensor of 0 dimensions
wrong scale count: a tensor of shape (4, 6) in blocks of (1, 3) has 8 scales of shape (4, 2),
got shape (4, 1)""",
    )


INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
WIDE = ["int16", "int32"]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_bounds_follow_from_the_bits(name: str) -> None:
    kind = qdtype(name)
    assert kind.quant_max - kind.quant_min == 2**kind.bits - 1
    assert kind.quant_min == (-(2 ** (kind.bits - 1)) if kind.is_signed else 0)
    assert kind.is_signed == name.startswith("int")
    assert kind.storage == (torch.int8 if kind.is_signed else torch.uint8)
    assert not kind.is_floating_point


@pytest.mark.parametrize("name", ["int8", "uint8", *WIDE, *FLOATS])
def test_bounds_are_those_of_torch_where_torch_has_the_type(name: str) -> None:
    kind, info = qdtype(name), (torch.finfo if name in FLOATS else torch.iinfo)(getattr(torch, name))
    assert (kind.quant_min, kind.quant_max, kind.bits) == (info.min, info.max, 8 if name in FLOATS else info.bits)
    assert kind.storage == getattr(torch, name)
    assert kind.is_floating_point == (name in FLOATS)
    assert kind.is_signed == (info.min < 0)


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, *WIDE])
def test_one_object_per_name(name: str) -> None:
    kind = qdtype(name)
    assert kind.name == repr(kind) == name
    assert qdtype(getattr(torch, name)) is qdtype(f"torch.{name}") is qdtype(kind) is kind
    assert copy.deepcopy(kind) is copy.copy(kind) is pickle.loads(pickle.dumps(kind)) is kind
    assert len({kind, qdtype(name)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int23", ""])
def test_other_dtypes_are_refused(dtype: torch.dtype | str) -> None:
    refuses("is not a quantized type; known: int1, int2", lambda: qdtype(dtype))


@pytest.mark.parametrize("dtype", [None, 8, int, QDType])
def test_other_kinds_are_refused(dtype: object) -> None:
    refuses(r"expected a torch\.dtype, a name or a QDType", lambda: qdtype(dtype), TypeError)  # type: ignore[arg-type]


@pytest.mark.parametrize("decibels", [-6.0, 0.0, 20.0, 60.0])
def test_noise_of_known_strength(decibels: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    y = x * (1 + 10 ** (-decibels / 20))
    assert compute_error(x, y).item() == pytest.approx(decibels, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_computed_in_fp32(dtype: torch.dtype) -> None:
    # In fp16 the squared norm of x would overflow.
    x = torch.full((2000,), 1024.0, dtype=dtype)
    error = compute_error(x, x - 8)
    assert error.dtype == torch.float32
    assert error.item() == pytest.approx(20 * math.log10(128), abs=1e-3)
