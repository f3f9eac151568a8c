"""Every tutorial, in its short form."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))
NEEDS = {"qat_digits": "sklearn", "qat_llama": "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_short_form(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    done = subprocess.run(
        [sys.executable, "-m", f"tutorials.{name}", "--short"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    for way in ("float", "PTQ", "QAT"):
        assert re.search(rf"{way}.*\d", done.stdout), done.stdout


@pytest.fixture
def digits():
    pytest.importorskip("sklearn")
    from tutorials import qat_digits

    return qat_digits


def test_digits_are_served_in_few_bits(digits) -> None:
    """Eight batches are enough to see that each way ends in integers: 2 bits, and 8 at the edges."""
    import copy

    import torch

    from qtorch.dtypes import ConvWeight
    from qtorch.kernels import record_kernels

    torch.manual_seed(0)
    data = digits.Digits.load()
    model = digits.train(digits.ResNet(8), data, 1, 1e-2, 8)
    for served in (
        digits.with_ptq(copy.deepcopy(model), 2, data),
        digits.with_qat(copy.deepcopy(model), 2, data, 1, 2),
        digits.with_lsq(copy.deepcopy(model), 2, data, 1, 2),
    ):
        assert type(served.stem.weight) is ConvWeight
        bits = [m.weight.scheme.weight.dtype.bits for m in served.modules() if isinstance(m, torch.nn.Conv2d)]
        assert bits == [8, *[2] * 8]
        assert served.head.weight.scheme.weight.dtype.bits == 8
        with record_kernels() as ran:
            digits.accuracy(served, data)
        linear = [kernel for kernel in ran if kernel.startswith("linear:")]
        assert len(linear) >= 10
        assert all("int8" in kernel for kernel in linear)
