"""tutorials/qat_digits.py in its short form; and what it serves are integers of few bits."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("sklearn")

from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from tutorials import qat_digits


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    table = qat_digits.main(["--short"])
    assert list(table) == ["float", "PTQ", "QAT", "LSQ"]
    assert all(0 < value < 100 for row in table.values() for value in row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["accuracy,", *table]


def test_what_is_served() -> None:
    """Integers of 2 bits, of 8 at the edges, in kernels that sum integers."""
    torch.manual_seed(0)
    data = qat_digits.Digits.load()
    model = qat_digits.train(qat_digits.ResNet(8), data, 1, 1e-2, 4)
    for served in (
        qat_digits.with_ptq(copy.deepcopy(model), 2, data),
        qat_digits.with_qat(copy.deepcopy(model), 2, data, 1, 2),
        qat_digits.with_lsq(copy.deepcopy(model), 2, data, 1, 2),
    ):
        convs = [module for module in served.modules() if isinstance(module, torch.nn.Conv2d)]
        assert all(type(conv.weight) is ConvWeight for conv in convs)
        assert [conv.weight.scheme.weight.dtype.bits for conv in convs] == [8, *[2] * (len(convs) - 1)]
        assert served.head.weight.scheme.weight.dtype.bits == 8
        with record_kernels() as ran:
            qat_digits.accuracy(served, data)
        linear = [kernel for kernel in ran if kernel.startswith("linear:")]
        assert len(linear) > len(convs)
        assert all("int8" in kernel for kernel in linear)
