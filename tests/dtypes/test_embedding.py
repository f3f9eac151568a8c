"""Look-ups in quantized tables: equal to those in the dequantized table."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from qtorch import LUTQuantizedTensor, compute_error
from qtorch.kernels import record_kernels, registry
from tests.dtypes.specs import DTYPES, LUTS, SPECS, quantized
from tests.refusals import message_of
from tests.rounding import EXTRA, gamma

pytestmark = pytest.mark.usefixtures("torch_kernels")

IDS = torch.tensor([3, 0, 31, 3, 7, 0, 0, 12])
OFFSETS = torch.tensor([0, 2, 2, 5, 8])  # the second and the last bag are empty
WEIGHTS = torch.linspace(-1, 2, 8)


GATHER = {"plain": "gather_rows", "packed": "gather_packed_rows", "semi_sparse": "gather_semi_sparse_rows"}


def kernel_of(table: Tensor) -> str:
    """What runs: of a layout that is not named here, what is registered for it."""
    if isinstance(table, LUTQuantizedTensor):
        return "embedding:gather_lut_rows"
    problem = registry.Problem("embedding", table.scheme, table.dtype, "cpu")
    return f"embedding:{GATHER.get(table.scheme.layout.name) or registry.choose(problem).name}"


@pytest.mark.parametrize("name", [*SPECS, *LUTS])
def test_embedding(name: str) -> None:
    table, ids = quantized(name), torch.tensor([[0, 31, 5], [7, 7, 0]])
    with record_kernels() as ran:
        rows = functional.embedding(ids, table, padding_idx=0)
    assert ran == [kernel_of(table)]
    assert torch.equal(rows, functional.embedding(ids, table.dequantize()))
    layer = nn.Embedding.from_pretrained(table)
    assert torch.equal(layer(ids), rows)
    assert functional.embedding(ids[:0], table.half()).dtype == torch.float16


@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1, -32])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", SPECS)
def test_bags(name: str, mode: str, padding_idx: int | None) -> None:
    table = quantized(name)
    values = table.dequantize()
    for ids, options in [
        (IDS, {"offsets": OFFSETS}),
        (IDS, {"offsets": torch.tensor([0, 5, 8]), "include_last_offset": True}),
        (IDS.int(), {"offsets": OFFSETS.int()}),
        (IDS.reshape(2, 4), {}),
        (IDS.reshape(4, 2).t(), {}),
        (IDS[:0], {"offsets": torch.tensor([0, 0])}),
        (IDS[:0], {"offsets": torch.tensor([0]), "include_last_offset": True}),
        (IDS[:0].reshape(0, 4), {}),
    ]:
        options = {**options, "mode": mode, "padding_idx": padding_idx}
        with record_kernels() as ran:
            y = functional.embedding_bag(ids, table, **options)
        assert ran == [kernel_of(table)]
        assert type(y) is Tensor
        assert torch.equal(y, functional.embedding_bag(ids, values, **options)), options


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bags_in_every_dtype(dtype: torch.dtype, mode: str) -> None:
    table = quantized("uint4 group, packed", dtype=dtype)
    y = functional.embedding_bag(IDS, table, OFFSETS, mode=mode)
    assert y.dtype == dtype
    assert torch.equal(y, functional.embedding_bag(IDS, table.dequantize(), OFFSETS, mode=mode))


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_weights_of_the_rows_and_their_gradient(shape: tuple[int, ...], padding_idx: int | None) -> None:
    table = quantized("uint4 group")
    results = []
    for weight in (table, table.dequantize()):
        scales = WEIGHTS.reshape(shape).clone().requires_grad_()
        offsets = OFFSETS if len(shape) == 1 else None
        y = functional.embedding_bag(
            IDS.reshape(shape), weight, offsets, mode="sum", per_sample_weights=scales, padding_idx=padding_idx
        )
        results.append((y, *torch.autograd.grad(y.square().sum(), scales)))
    # torch fuses the products of some paths. A row is the sum of up to eight; its square's gradient sums its columns.
    largest, terms = float(table.dequantize().abs().max()), 8 + table.shape[1]
    row = 8 * largest * float(WEIGHTS.abs().max())
    for (got, wanted), size in zip(zip(*results), (row, 2 * row * largest * table.shape[1])):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2 * gamma(terms + EXTRA) * size)
    assert bool((results[0][1] != 0).any())


def test_rows_weights_and_frozen_tables() -> None:
    """Rows that would dequantize to NaN are not touched, not even times zero."""
    table = quantized("int8 row")
    table.scale[5] = float("nan")
    assert functional.embedding_bag(IDS, table, OFFSETS).isfinite().all()
    table = nn.Parameter(quantized("int8 row"))
    for y in (functional.embedding(IDS, table), functional.embedding_bag(IDS, table, OFFSETS)):
        assert not y.requires_grad
    layer = nn.EmbeddingBag(32, 64)
    layer.weight = nn.Parameter(quantized("int8 row"), requires_grad=False)
    wanted = layer(IDS, OFFSETS)
    with torch.inference_mode():
        assert torch.equal(layer(IDS, OFFSETS), wanted)
    layer = nn.EmbeddingBag(32, 64, mode="sum")
    layer.weight = nn.Parameter(quantized("uint4 group"), requires_grad=False)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        scales = WEIGHTS.reshape(2, 4).clone().requires_grad_()
        y = run(IDS.reshape(2, 4), per_sample_weights=scales)
        results.append((y, *torch.autograd.grad(y.square().sum(), scales)))
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted)


BAGS = [("sum", None), ("sum", 3), ("max", 3)]


@pytest.mark.parametrize("name", ["int8 row", pytest.param("nf4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "padding_idx"), [("mean", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in BAGS)]
)
def test_bags_in_one_graph(name: str, mode: str, padding_idx: int | None) -> None:
    layer = nn.EmbeddingBag(32, 64, mode=mode, padding_idx=padding_idx)
    layer.weight = nn.Parameter(quantized(name), requires_grad=False)
    counter, first = CompileCounterWithBackend("aot_eager"), 0
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for ids, offsets in [(IDS, OFFSETS), (IDS[:5], OFFSETS[:3]), (IDS.repeat(9), torch.arange(0, 72, 6))]:
        assert torch.equal(compiled(ids, offsets), layer(ids, offsets))
        first = first or counter.frame_count
    assert counter.frame_count == first, "another number of indices or bags is no other graph"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_inductor(mode: str) -> None:
    layer = nn.EmbeddingBag(32, 64, mode=mode, padding_idx=0)
    layer.weight = nn.Parameter(quantized("uint4 group, packed"), requires_grad=False)
    wanted = layer(IDS, OFFSETS)
    assert compute_error(wanted, torch.compile(layer, fullgraph=True)(IDS, OFFSETS)) > 100


def test_what_does_not_fit_says_so() -> None:
    table = quantized("int8 row")
    operations = [
        lambda: functional.embedding_bag(IDS, table, OFFSETS, max_norm=1.0),
        lambda: functional.embedding_bag(IDS, table, OFFSETS, padding_idx=32),
        lambda: functional.embedding_bag(IDS, table),
        lambda: functional.embedding_bag(IDS.reshape(2, 4), table, OFFSETS),
        lambda: functional.embedding_bag(IDS, table, OFFSETS, mode="median"),
        lambda: functional.embedding_bag(IDS, table, OFFSETS, mode="sum", per_sample_weights=WEIGHTS[:3]),
        lambda: functional.embedding_bag(IDS, table.to("meta"), OFFSETS),
    ]
    assert_expected_inline(
        "\n".join(map(message_of, operations)),
        """\
ValueError: embedding_bag: max_norm would rewrite the table, and a quantized table is frozen; leave it out
ValueError: embedding_bag: padding_idx 32 is not in a table of 32 rows
ValueError: embedding_bag takes indices (B, L), or (I) with offsets (B), got indices of shape (8,) and no offsets
ValueError: embedding_bag takes indices (B, L), or (I) with offsets (B), got indices of shape (2, 4) and offsets of shape (5,)
ValueError: mode has to be one of sum, mean or max
ValueError: embedding_bag takes a weight for each index, got shape (3,) for indices of shape (8,)
ValueError: embedding: the input is on cpu, the weight on meta""",  # noqa: E501
    )
    with pytest.raises(IndexError):
        functional.embedding_bag(IDS + 30, table, OFFSETS)
