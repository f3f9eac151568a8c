"""Opaque operators and the record of what ran."""

import torch

from qtorch.kernels import record_kernels
from qtorch.kernels.custom_ops import note


def test_records_nest_and_end():
    with record_kernels() as outer:
        note("a")
        with record_kernels() as inner:
            note("b")
        note("c")
    note("d")
    assert outer == ["a", "b", "c"]
    assert inner == ["b"]


def test_equal_records_are_told_apart():
    with record_kernels() as outer:
        with record_kernels():
            pass
        note("a")
    assert outer == ["a"]


def test_opaque_operators_are_recorded_from_compiled_graphs():
    from qtorch.kernels import int_matmul

    a = torch.randint(-9, 9, (3, 4), dtype=torch.int8)
    compiled = torch.compile(lambda a, b: int_matmul(a, b) + 1, fullgraph=True, backend="aot_eager")
    with record_kernels() as ran:
        result = compiled(a, a.t())
    assert "int_matmul" in ran
    assert torch.equal(result, int_matmul(a, a.t()) + 1)
