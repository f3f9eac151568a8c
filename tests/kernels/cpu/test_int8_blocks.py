"""Integer products of training, compiled: the bits of the portable ones."""

import itertools

import pytest
import torch
from torch import Tensor

from qtorch.kernels import features, record_kernels
from qtorch.kernels.cpu import compiled_library, variants
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.block_mm import int8_block_mm
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm, int8_product, int8_rows_product
from qtorch.primitives import Rounding
from qtorch.training import integer

from .builds import NEEDS_LIBRARY

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def scale(*shape: int) -> Tensor:
    return torch.rand(shape) * torch.randint(-8, 8, shape).float().exp2()


def same(ours: Tensor, reference: Tensor) -> bool:
    return ours.dtype == reference.dtype and torch.equal(ours.nan_to_num(7), reference.nan_to_num(7))


# (M, N, groups of x, groups of w, size of the smaller ones, rows of x and of w that share a scale)
BLOCKS = [
    (64, 96, 3, 3, 32, 32, 32),
    (1, 1, 1, 2, 4, 1, 1),
    (7, 35, 4, 2, 12, 1, 5),
    (130, 33, 2, 6, 20, 10, 1),
    (64, 16, 2, 2, 1024, 64, 16),
]


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_both(build: str, case: tuple[int, ...]) -> None:
    m, n, x_groups, w_groups, size, x_rows, w_rows = case
    k = max(x_groups, w_groups) * size
    x, w = codes(m, k), codes(n, k)
    xs, ws = scale(m // x_rows, x_groups), scale(n // w_rows, w_groups)
    for dtype, number in zip(DTYPES, (0.0, float("nan"), float("inf")), strict=True):
        xs[-1, -1] = number or xs[-1, -1]
        expected = portable(int8_block_mm)(x, xs, w, ws, dtype)
        of_w = (w, w.t().contiguous().t(), torch.cat([w, w], 1)[:, :k])
        for a, b in itertools.product((x, x.t().contiguous().t()), of_w):
            with record_kernels() as ran:
                ours = int8_block_mm(a, xs.t().contiguous().t(), b, ws, dtype)
            assert ran == ["int8_block_mm", f"int8_block_mm.{build}"]
            assert same(ours, expected), (dtype, a.stride(), b.stride())


@NEEDS_LIBRARY
def test_blocks_of_other_sizes_run_in_torch() -> None:
    for size in (3, 2048):
        with record_kernels() as ran:
            int8_block_mm(codes(8, size), scale(8, 1), codes(8, size), scale(8, 1), torch.float32)
        assert ran[:2] == ["int8_block_mm", "int8_block_mm.torch"]


@pytest.mark.parametrize("shape", [(64, 96, 128), (1, 1, 1), (3, 1, 70), (1, 33, 5), (40, 130, 1500)])
def test_one_scale_a_row(build: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w = codes(m, k), codes(n, k)
    for dtype, xs, ws in itertools.product(DTYPES, (scale(m, 1), scale(1, 1)), (scale(n, 1), scale(1, 1).expand(n, 1))):
        xs[-1] = float("nan") if dtype is torch.bfloat16 else xs[-1]
        for a, b in itertools.product((x, x.t().contiguous().t()), (w, w.t().contiguous().t())):
            with record_kernels() as ran:
                ours = int8_product(a, xs, None, b, ws, None, -1, dtype)
            variant = variants.choose(build, variants.key_of("int8", False, False, n * k), m)
            direct = k >= 32 and all(t.is_contiguous() for t in (a, b, ws)) and len(xs) == m and variant != "torch"
            sums = ["int_matmul", "int_matmul.sliced"] if k <= 1024 else [f"scale_sums.{build}", "int_matmul"]
            if features.cpu_has("vnni"):
                sums = [f"scale_sums.{build}", "int_matmul"]
            assert ran[:2] == (["int_matmul", f"int_matmul.{build}.{variant}"] if direct else sums)
            assert same(ours, int8_grouped_mm(x, xs, None, w, ws, None, dtype)), (dtype, xs.shape, ws.stride())


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_floats(build: str, bits: int) -> None:
    """Quantized and multiplied in one step, in any order of memory: the bits of the two steps in torch."""
    spec, noisy = integer(bits), integer(bits, rounding=Rounding.STOCHASTIC)
    for dtype, lost, (m, n, k) in itertools.product(DTYPES, (False, True), [(4, 64, 96), (33, 17, 1056), (64, 40, 3)]):
        x, w = torch.randn(k, m).t().to(dtype), torch.randn(n, k).to(dtype)
        x[0, 0] = torch.nan if lost else 0
        torch.manual_seed(1)
        with record_kernels() as ran:
            ours = int8_rows_product(x, noisy, w, spec, dtype)
        assert ran[:2] == [f"quantize_matrix.{build}"] * 2
        for context in (compiled_library.use(None), torch.autocast("cpu")):  # a backward may run in autocast
            torch.manual_seed(1)
            with context:
                assert same(ours, int8_rows_product(x, noisy, w, spec, dtype))


@NEEDS_LIBRARY
def test_a_result_is_no_view() -> None:
    """Sums are scaled in the memory of the result, which is then changed like any other."""
    y = int8_product(codes(4, 8), scale(4, 1), None, codes(4, 8), scale(4, 1), None, -1, torch.float32)
    assert not y._is_view()
