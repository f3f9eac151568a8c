"""Embedding gathers, then dequantizes: the same numbers as dequantizing the whole table."""

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.primitives import compute_error

pytestmark = pytest.mark.usefixtures("torch_kernels")


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor(), PerGroup(16), PerAxis(1), PerBlock((5, 8))], ids=str)
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_dequantized_table(granularity, mapping, dtype):
    table = torch.randn(30, 32, dtype=dtype)
    quantized = AffineQuantizedTensor.from_float(table, QuantSpec("int8", granularity, mapping))
    ids = torch.randint(0, 30, (4, 7))
    with record_kernels() as ran:
        rows = functional.embedding(ids, quantized)
    assert ran == ["embedding:gather_rows"]
    assert rows.dtype == dtype
    assert torch.equal(rows, functional.embedding(ids, quantized.dequantize()))
    assert 25 < compute_error(functional.embedding(ids, table), rows) < 55


def test_no_rows():
    quantized = AffineQuantizedTensor.from_float(torch.randn(30, 32), QuantSpec("int8"))
    assert functional.embedding(torch.empty(0, 3, dtype=torch.long), quantized).shape == (0, 3, 32)
