"""Views and selections: the same numbers as on the float tensor, or a ValueError; never a wrong number."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch import AffineQuantizedTensor, PerBlock, QuantSpec
from tests.dtypes.specs import ASYMMETRIC, DTYPES, LUTS, OTHER_LAYOUTS, SPECS, quantized
from tests.refusals import refuses

Operation = Callable[[torch.Tensor], Any]


def check_exact(operation: Operation, w: torch.Tensor) -> None:
    got, wanted = operation(w), operation(w.dequantize())
    if isinstance(wanted, torch.Tensor):
        got, wanted = [got], [wanted]
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert type(a) is type(w)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.dequantize(), b)


EXACT: dict[str, Operation] = {
    "t": lambda w: w.t(), "T": lambda w: w.T, "mT": lambda w: w.mT, "transpose": lambda w: w.transpose(-1, 0),
    "permute": lambda w: w.permute(1, 0), "twice": lambda w: w.t().t(), "movedim": lambda w: w.movedim(0, 1),
    "unsqueeze": lambda w: w.unsqueeze(0), "None": lambda w: w[:, None],
    "squeeze": lambda w: w[None, :, None].squeeze(), "squeeze one": lambda w: w[None].squeeze(0),
    "squeeze several": lambda w: w[None, :, None].squeeze((0, 2)), "squeeze nothing": lambda w: w.squeeze(0),
    "same view": lambda w: w.view(32, 64), "reshape rows": lambda w: w.reshape(4, 8, 64),
    "unflatten": lambda w: w.unflatten(0, (2, 16)), "flatten again": lambda w: w.unflatten(0, (-1, 16)).flatten(0, 1),
    "slice": lambda w: w[8:24], "negative": lambda w: w[-8:], "empty": lambda w: w[8:8], "beyond": lambda w: w[16:100],
    "columns": lambda w: w[:, 32:], "narrow": lambda w: w.narrow(0, 8, 8), "split": lambda w: w.split(8),
    "split sizes": lambda w: w.split([8, 0, 24]), "split columns": lambda w: w.split(32, dim=1),
    "chunk": lambda w: w.chunk(4), "tensor_split": lambda w: torch.tensor_split(w, 2),
    "hsplit": lambda w: torch.hsplit(w, 2), "inside a block": lambda w: w[3:5, 1:7], "row": lambda w: w[3],
    "last row": lambda w: w[-1], "column": lambda w: w[:, 63], "select": lambda w: w.select(1, -2),
    "element": lambda w: w[3, 5], "unbind": lambda w: w.unbind(), "iterate": lambda w: list(w.t()),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPECS, *LUTS])
def test_exact(name: str) -> None:
    w = quantized(name)
    for operation in EXACT.values():
        check_exact(operation, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_keep_dtype_and_activation(dtype: torch.dtype) -> None:
    for name in ["int8 row, int8 token", "int8 row, static int8"]:
        w = quantized(name, dtype=dtype)
        for view in [w.t(), w[:8], w[None], w.reshape(2, 16, 64), w.split(8)[0]]:
            assert view.scheme.activation == SPECS[name].activation
            assert view.act_scale is w.act_scale
            assert view.dtype == dtype


# Codes that a new layout packs along no axis are unpacked by a view.
VIEWABLE = [n for n, spec in SPECS.items() if n not in OTHER_LAYOUTS or spec.layout.packed_axis is not None]


@pytest.mark.parametrize("name", VIEWABLE)
def test_slices_of_whole_blocks_share_memory(name: str) -> None:
    """Packed codes too, along the axes that they are not packed along."""
    w = quantized(name)
    assert w[8:].qdata.data_ptr() == w.qdata[8:].data_ptr()
    assert w.t().qdata.data_ptr() == w.qdata.data_ptr()
    assert w[None, :, None][0, :, 0].qdata.data_ptr() == w.qdata.data_ptr()
    experts = quantized(name, 4, 32, 64)
    assert experts.transpose(1, 2)[2].t().qdata.data_ptr() == experts.qdata[2].data_ptr()


@pytest.mark.parametrize("name", ["int8 row", "uint4 group", "int8 row, int8 token", "float8 row", "int8 block"])
def test_cat_of_parts_is_the_whole(name: str) -> None:
    w = quantized(name)
    whole = torch.cat(w.split([8, 16, 8]))
    assert whole.scheme == w.scheme
    assert torch.equal(whole, w)
    if name == "uint4 group":
        assert torch.equal(torch.cat([w[:, :32], w[:, 32:]], dim=-1), w)


@pytest.mark.parametrize("name", SPECS)
def test_stack_of_matrices_is_exact(name: str) -> None:
    """One that scales span each matrix keeps its scales; double quantization of its own does not."""
    one, two = quantized(name), quantized(name)
    both = torch.stack([one, two])
    assert torch.equal(both.dequantize(), torch.stack([one.dequantize(), two.dequantize()]))
    if one.scheme.weight.scale_spec is None:
        assert torch.equal(both[1], two)
    refuses("along axis 0", lambda: torch.stack([one, two], 1))
    refuses("some are not", lambda: torch.stack([one, torch.randn(one.shape)]))


INDICES = [torch.tensor([5, 0, 5]), torch.tensor([-1, -32]), torch.tensor([], dtype=torch.int64), torch.tensor([31])]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", [name for name in [*SPECS, *LUTS] if " block" not in name])
def test_rows_by_index(name: str, index: torch.Tensor) -> None:
    w = quantized(name)
    check_exact(lambda w: w[index], w)
    check_exact(lambda w: w[index.tolist()], w)
    check_exact(lambda w: w.index_select(0, index % 32), w)
    check_exact(lambda w: w[torch.isin(torch.arange(32), index)], w)
    assert torch.equal(torch.nn.functional.embedding(index % 32, w), w.dequantize()[index])


def test_indices_and_empty_tensors() -> None:
    index = torch.tensor([63, 1, -1])
    check_exact(lambda w: w[:, index], quantized("int8 row"))
    refuses("index_select along axis 1 cuts blocks of 32", lambda: quantized("uint4 group")[:, index])
    w = quantized("int8 row")
    for operation in [
        lambda w: w[torch.tensor([32])],
        lambda w: w[torch.tensor([-33])],
        lambda w: w[torch.ones(31, dtype=torch.bool)],
        lambda w: w[32],
        lambda w: w.index_select(0, torch.tensor([32])),
        lambda w: torch.nn.functional.embedding(torch.tensor([32]), w),
    ]:
        with pytest.raises((IndexError, RuntimeError)):
            operation(w.dequantize())
        with pytest.raises((IndexError, RuntimeError)):
            operation(w)
    refuses("takes one 1-d index tensor", lambda: w[torch.ones(32, 64, dtype=torch.bool)], NotImplementedError)
    for name in ["int8 row", "int8 tensor", "uint4 group"]:
        w = quantized(name)[:0]
        for operation in [
            lambda w: w.t(),
            lambda w: w[None],
            lambda w: w.view(0, 2, 32),
            lambda w: w.view(-1),
            lambda w: w[torch.tensor([], dtype=torch.int64)],
        ]:
            check_exact(operation, w)


def test_what_cuts_blocks_says_so() -> None:
    group, row, block = quantized("uint4 group"), quantized("int8 row"), quantized("int8 block")
    static = quantized("int8 row, static int8")
    other = static.with_activation(static.scheme.activation, static.act_scale * 2)
    for operation, words in [
        (lambda: group[:, 16:48], "slice 16:48:1 along axis 1 cuts blocks of 32 (uint4"),
        (lambda: group[:, ::2], "slice 0:64:2 along axis 1 cuts blocks of 32 (uint4"),
        (lambda: group.t().reshape(-1), "shape (2048,) of a tensor of shape (64, 32) cuts across its blocks (uint4"),
        (lambda: quantized("int8 row", 2, 48).view(3, 32), "(3, 32) of a tensor of shape (2, 48) cuts across"),
        (lambda: block[4:12], "slice 4:12:1 along axis 0 cuts blocks of 8 (int8"),
        (lambda: block.flatten(), "shape (2048,) of a tensor of shape (32, 64) cuts across its blocks (int8"),
        (lambda: block.unsqueeze(1).flatten(), "shape (2048,) of a tensor of shape (32, 1, 64) cuts across its blocks"),
        (lambda: block[torch.tensor([1])], "index_select along axis 0 cuts blocks of 8 (int8"),
        (lambda: row.split([8, 8]), "split: sizes [8, 8] do not add up to 32"),
        (lambda: torch.cat([row, row[torch.arange(31, -1, -1)]], dim=1), "cat along axis 1: one scale spans the axis"),
        (lambda: torch.cat([row, group]), "cat joins tensors quantized alike, got AffineQuantizedTensor(weight int8"),
        (lambda: torch.cat([torch.randn(2, 64), row]), "and a tensor of torch.float32"),
        (lambda: torch.cat([row, row], dim=2), "cat along axis 2 of tensors of shape (32, 64)"),
        (lambda: torch.cat([row, row.half()]), "cat joins tensors of one dtype, got torch.float32 and torch.float16"),
        (lambda: torch.cat([static, other]), "cat cannot join weights with static activation scales, which differ"),
    ]:
        refuses(re.escape(words), operation, (ValueError, RuntimeError))


@pytest.mark.parametrize("name", ["int8 row", "int8 row, static int8"])
def test_parts_that_share_scales_join_again(name: str) -> None:
    whole = quantized(name)
    joined = torch.cat([whole[:, :24], whole[:, 24:]], dim=1)
    assert torch.equal(joined.dequantize(), whole.dequantize())
    assert joined.scheme.activation == whole.scheme.activation


# ----------------------------------------------------------------------- property: exact, or ValueError

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def tensors(draw: st.DrawFn) -> AffineQuantizedTensor:
    shape = draw(st.lists(sizes, min_size=1, max_size=4))
    block = [draw(st.sampled_from([-1, *(d for d in range(1, n + 1) if n % d == 0)])) for n in shape]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    return AffineQuantizedTensor.from_float(x, QuantSpec("uint4", PerBlock(tuple(block)), ASYMMETRIC))


@st.composite
def operations(draw: st.DrawFn, shape: torch.Size) -> tuple[str, Operation]:
    """An operation that torch allows on a tensor of this shape."""
    ndim = len(shape)
    axis = draw(st.integers(-ndim, ndim - 1)) if ndim else 0
    n = shape[axis] if ndim else 1
    kind = draw(st.sampled_from(["view", "unsqueeze", "squeeze", "permute", "flatten", *(["cut"] * 6 if ndim else [])]))
    if kind == "cut":
        kind = draw(st.sampled_from(["slice", "select", "split", "index", "mask", "cat"]))
    positions = draw(st.lists(st.integers(-n, n - 1), max_size=4))
    at = (slice(None),) * (axis % max(ndim, 1))
    start, stop, step = draw(st.integers(-9, 9)), draw(st.integers(-9, 9)), draw(st.integers(1, 3))
    if kind == "view":
        factors = [d for n in shape for d in draw(st.sampled_from([[n], [n, 1], [1, n], [2, n // 2], [n // 2, 2]]))]
        merged = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        size: list[int] = []
        for factor, merge in zip(factors, merged):
            size[-1:] = [size[-1] * factor] if merge and size else [*size[-1:], factor]
        if torch.Size(size).numel() != shape.numel():
            size = list(shape)
        return f"view {size}", lambda w: w.reshape(size)
    if kind == "permute":
        axes = draw(st.permutations(range(ndim)))
        return f"permute {axes}", lambda w: w.permute(tuple(axes))
    simple: dict[str, Operation] = {
        "unsqueeze": lambda w: w.unsqueeze(axis),
        "squeeze": lambda w: w.squeeze(axis) if ndim else w.squeeze(),
        "flatten": lambda w: w.flatten(axis),
        "slice": lambda w: w[(*at, slice(start, stop, step))],
        "select": lambda w: w.select(axis, start % n),
        "split": lambda w: w.split(step, axis)[start % (-(-n // step))],
        "index": lambda w: w[(*at, torch.tensor(positions, dtype=torch.int64))],
        "mask": lambda w: w[(*at, torch.arange(n) % step == 0)],
        "cat": lambda w: torch.cat(w.split(step, axis)[::-1], axis),
    }
    return f"{kind} axis {axis} {start}:{stop}:{step} {positions}", simple[kind]


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_property_exact_or_value_error(data: st.DataObject) -> None:
    w = data.draw(tensors())
    for _ in range(3):
        label, operation = data.draw(operations(w.shape))
        wanted = operation(w.dequantize())
        try:
            got = operation(w)
        except ValueError:
            return
        assert torch.equal(got.dequantize(), wanted), label
        assert got.shape == wanted.shape, label
        if not wanted.numel():
            return
        w = got
