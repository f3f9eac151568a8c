"""The number of threads changes no bit of what the compiled kernels compute."""

from collections.abc import Callable

import pytest
import torch

from qtorch import AffineQuantizedTensor, BlockSparseLayout, LinearSpec, MappingType, PackedLayout, PerGroup, PerToken
from qtorch.dtypes.experts import grouped_linear
from qtorch.kernels.cache_form import cache_form
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops import block_mm, quantize, weight_only_mm
from qtorch.kernels.ops.adam import adam_step
from qtorch.kernels.ops.kv_attention import kv_attention
from qtorch.primitives import QuantSpec, prune_blocks
from qtorch.training.engine.numerics import float8, int8
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, gradient, step, tensors, zeros
from tests.kernels.cpu.builds import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

TOKEN = QuantSpec("int8", PerToken(), quant_min=-127)
UINT4 = QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC)
Product = Callable[[], list[torch.Tensor]]
"""Computes something of tensors that it was made with."""


def linear(shape: tuple[int, int], activation: QuantSpec | None, layout: object, spec: QuantSpec = UINT4) -> Product:
    values = prune_blocks(torch.randn(shape), 32, 0.6) if isinstance(layout, BlockSparseLayout) else torch.randn(shape)
    weight = AffineQuantizedTensor.from_float(values, LinearSpec(spec, activation, layout=layout))
    inputs = [torch.randn(rows, shape[1]) for rows in (1, 5, 40)]
    return lambda: [torch.nn.functional.linear(x, weight) for x in inputs]


def experts(activation: QuantSpec | None) -> Product:
    """Experts are cut into runs of output channels, few rows or many."""
    spec = LinearSpec(QuantSpec("int4", PerGroup(32)), activation, layout=PackedLayout())
    weight = AffineQuantizedTensor.from_float(torch.randn(5, 300, 256), spec)
    indices = (torch.tensor([[4, 0, 2]]), torch.randint(5, (40, 2)), torch.zeros(70, 1).long())
    cases = [(torch.randn(len(index), 256), weight, index) for index in indices]
    return lambda: [grouped_linear(*case) for case in cases]


def embedding() -> Product:
    table = AffineQuantizedTensor.from_float(torch.randn(500, 384), LinearSpec(UINT4, layout=PackedLayout()))
    ids = [torch.randint(0, 500, (count,)) for count in (1, 100, 3000)]
    return lambda: [torch.nn.functional.embedding(each, table) for each in ids]


def operands(spec: QuantSpec) -> Product:
    x = torch.randn(300, 700).t()

    def run() -> list[torch.Tensor]:
        codes, scale, _ = quantize.quantize_rows(x, spec)
        about = (spec.dtype, *spec.code_range, spec.zero_point_domain, torch.float32)
        return [codes, scale, weight_only_mm.dequantize_codes(codes, scale, None, *about)]

    return run


def weights() -> Product:
    weight = torch.randn(301, 96)
    wanted = list(portable(quantize.quantize_weight)(weight, UINT4))

    def run() -> list[torch.Tensor]:
        found = list(quantize.quantize_weight(weight, UINT4))
        assert all(map(torch.equal, found, wanted))
        return found

    return run


def blocks() -> Product:
    x, w = (torch.randint(-128, 128, (n, 256), dtype=torch.int8) for n in (300, 200))
    xs, ws = torch.rand(300, 8), torch.rand(200, 8)
    return lambda: [block_mm.int8_block_mm(x, xs, w, ws, torch.float32)]


def adam(form: str) -> Product:
    of_blocks = BLOCKS[0]._replace(rows=700)
    grad = gradient(of_blocks, torch.float32, 1)

    def run() -> list[torch.Tensor]:
        moments, weight = zeros(form, of_blocks, 2), torch.ones(of_blocks.rows * of_blocks.length)
        adam_step(weight, grad, moments, of_blocks, step(form, 1))
        return [weight, *tensors(moments)]

    return run


def attention() -> Product:
    keys, values = quantize.quantize_keys_and_values(*torch.randn(2, 1, 2, 3000, 64), cache_form("int8", "int8", 0))
    query, nothing = torch.randn(1, 8, 1, 64), (None, None, None)
    about = ("int8", "int8", 0, 64, 0.125, 0.0, False)
    return lambda: [kv_attention(query, list(keys), list(values), [], *nothing, *about)]


MAKE: dict[str, Callable[[], Product]] = {
    "weight-only": lambda: linear((301, 256), None, PackedLayout()),
    "int8": lambda: linear((301, 256), TOKEN, PackedLayout()),
    "block-sparse": lambda: linear((128, 320), TOKEN, BlockSparseLayout(32, 0.6), QuantSpec("int8", quant_min=-127)),
    "experts": lambda: experts(None),
    "experts, int8": lambda: experts(TOKEN),
    "embedding": embedding,
    "operands, int8": lambda: operands(int8()),
    "operands, float8": lambda: operands(float8()),
    "weights": weights,
    "blocks": blocks,
    "attention": attention,
    **{f"adam {form}": lambda form=form: adam(form) for form in ALL_FORMS},
}


@pytest.mark.parametrize("name", MAKE)
def test_the_number_of_threads_changes_nothing(name: str, set_threads: Callable[[int], None]) -> None:
    run = MAKE[name]()
    set_threads(1)
    expected = run()
    for threads in (2, 3, 8):
        set_threads(threads)
        assert all(map(torch.equal, run(), expected))
