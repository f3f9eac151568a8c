"""tutorials/low_bit_digits.py in its short form; binary training converges, and serves one bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn")

from qtorch.dtypes import ConvWeight
from tutorials import low_bit_digits


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    table = low_bit_digits.main(["--short"])
    assert list(table) == ["float", "int4", "binary"]
    assert all(0 < value < 100 for row in table.values() for value in row)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["seed", *table]


@pytest.mark.parametrize(("name", "bits", "at_least"), [("binary", 1, 50), ("int4", 4, 60)])
def test_it_converges(name: str, bits: int, at_least: float) -> None:
    """From the start, in three epochs of half the digits, far above the 10% of chance."""
    torch.manual_seed(0)
    data = low_bit_digits.Digits.load()
    model = low_bit_digits.trained(name, data, 3, 8)
    assert low_bit_digits.accuracy(model, data) > at_least
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert all(type(weight) is ConvWeight for weight in weights)
    assert [weight.scheme.weight.dtype.bits for weight in weights] == [8, *[bits] * (len(weights) - 1)]
    assert model.head.weight.scheme.weight.dtype.bits == 8
    if bits == 1:
        inner = weights[1].matrix.inner_tensors["qdata"]
        assert inner.nbytes * 8 == weights[1].numel()
        assert len(weights[1].dequantize().abs().flatten(1).unique(dim=1)) == len(weights[1])
