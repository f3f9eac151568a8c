"""Products with block-sparse weights, in torch operators and compiled, against the dense weight of the same numbers."""

import pickle

import pytest
import torch

from qtorch import AffineQuantizedTensor, BlockSparseLayout, LinearSpec, PerGroup, PlainLayout, explain
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.primitives import PerRow, QuantSpec, compute_error, prune_blocks
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY
from tests.kernels.quantized_weights import ASYMMETRIC_TOKEN, TOKEN
from tests.refusals import refuses

ACTIVATIONS = {"weight-only": None, "int8": TOKEN, "asymmetric": ASYMMETRIC_TOKEN}
WEIGHTS = {
    "int8 row": QuantSpec("int8", quant_min=-127), "int8 group": QuantSpec("int8", PerGroup(16)),
    "int4 group": QuantSpec("int4", PerGroup(16)), "int4 row": QuantSpec("int4", PerRow()),
    "int3 group": QuantSpec("int3", PerGroup(32)),
}  # fmt: skip
VARIANTS = [pytest.param(None, id="torch"), *BUILDS]
LEAST = {torch.float32: 110, torch.float16: 50, torch.bfloat16: 35}
"""SQNR of a product whose sums are taken in another order."""


def pair(weight: QuantSpec, input: QuantSpec | None, size: int) -> tuple[AffineQuantizedTensor, AffineQuantizedTensor]:
    """The same weight (128, 320) in blocks, and plain."""
    values = prune_blocks(torch.randn(128, 320), size, 0.6)
    spec = LinearSpec(weight, input, layout=BlockSparseLayout(size, 0.6))
    sparse = AffineQuantizedTensor.from_float(values, spec)
    return sparse, sparse.to_layout(PlainLayout())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("build", VARIANTS)
def test_the_numbers_of_the_dense_weight(build: str | None, name: str, activation: str) -> None:
    for size in (16, 32, 64):
        if WEIGHTS[name].block_size((128, 320))[1] not in (16, 320) and size == 16:
            continue
        sparse, dense = pair(WEIGHTS[name], ACTIVATIONS[activation], size)
        bias = torch.randn(128)
        for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (8, torch.float16), (37, torch.float32)):
            x, b = (torch.randn(rows, 320) + 0.3).to(dtype), bias.to(dtype)
            with compiled_library.use(build), record_kernels() as ran:
                y = torch.nn.functional.linear(x, sparse.to(dtype), b)
            if build is None:
                assert ran[0].startswith("linear:block_sparse")
            else:
                assert ran[-1] == f"cpu_block_sparse_mm.{build}"
            with compiled_library.use(None):
                expected = torch.nn.functional.linear(x, dense.to(dtype), b)
            if ACTIVATIONS[activation] is not None:
                assert torch.equal(y, expected)
            else:
                assert compute_error(expected, y) > LEAST[dtype]


@pytest.mark.parametrize("build", VARIANTS)
def test_rows_of_an_input_with_nan_are_nan_as_in_the_dense_product(build: str | None) -> None:
    for activation in (None, TOKEN):
        sparse, _ = pair(WEIGHTS["int8 row"], activation, 32)
        x = torch.randn(5, 320)
        good = torch.nn.functional.linear(x, sparse)
        for column in range(0, 320, 32):  # also where no block reads it
            bad = x.clone()
            bad[2, column] = torch.nan if column % 64 else torch.inf
            with compiled_library.use(build):
                y = torch.nn.functional.linear(bad, sparse)
            assert not y[2].isfinite().any()
            others = [0, 1, 3, 4]
            assert compute_error(good[others], y[others]) > 100


@NEEDS_LIBRARY
def test_strides_and_columns_outside() -> None:
    sparse, dense = pair(WEIGHTS["int8 row"], TOKEN, 32)
    for x in (torch.randn(320, 6).t(), torch.randn(4, 3, 640)[..., ::2], torch.randn(0, 320)):
        assert torch.equal(torch.nn.functional.linear(x, sparse), torch.nn.functional.linear(x, dense))
    sparse, _ = pair(WEIGHTS["int8 row"], TOKEN, 32)
    assert "runs cpu_block_sparse_int8_mm" in str(explain(sparse, torch.randn(1, 320)))
    odd, _ = pair(WEIGHTS["int8 row"], None, 8)
    assert "runs block_sparse_weight_only_mm" in str(explain(odd, torch.randn(1, 320)))
    # A damaged pickle must not read foreign memory.
    for wrong in (-1, 10, 2**30):
        sparse, _ = pair(WEIGHTS["int8 row"], TOKEN, 32)
        sparse = pickle.loads(pickle.dumps(sparse))
        sparse.columns[1, 1] = wrong
        refuses("10 columns of blocks", lambda sparse=sparse: torch.nn.functional.linear(torch.randn(2, 320), sparse))
