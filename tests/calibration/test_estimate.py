"""A dry run says what a calibration will take, and does not start it."""

import itertools
import time

import pytest
import torch

from qtorch import quantize_
from qtorch.calibration import auto, gptq
from tests.calibration.test_in_order import INT3, Experts, Model, batches
from tests.calibration.test_resume import bits


def test_memory_is_counted_from_shapes() -> None:
    model, data = Model(), batches(3)
    before = bits(model)
    estimate = quantize_(model, gptq(INT3, data), dry_run=True).estimate
    assert (estimate.batches, estimate.blocks) == (3, 3)
    # `down` has 64 inputs; gate and up share one moment. `down` is (32, 64).
    assert estimate.statistics_bytes == 4 * 64 * 64
    assert estimate.work_bytes == 4 * (2 * 64 * 64 + 5 * 32 * 64)
    assert estimate.stream_bytes == 3 * 3 * (4 * 9 * 32 * 4)
    assert estimate.peak_bytes == estimate.statistics_bytes + estimate.work_bytes + estimate.stream_bytes
    of_both = quantize_(model, auto(INT3, data), dry_run=True).estimate
    assert of_both.statistics_bytes == 2 * estimate.statistics_bytes
    assert of_both.stream_bytes == 2 * estimate.stream_bytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())
    assert model.training


def test_experts_have_statistics_each() -> None:
    estimate = quantize_(Experts(), {"weight": gptq(INT3, [torch.randn(8, 32)])}, dry_run=True).estimate
    assert estimate.statistics_bytes == 3 * 4 * 32 * 32
    assert (estimate.blocks, estimate.stream_bytes) == (0, 0)


def test_the_report_says_it() -> None:
    report = quantize_(Model(), gptq(INT3, batches()), dry_run=True)
    assert "calibration on 3 batches in 3 blocks: about " in str(report)
    assert report.to_json()["estimate"]["blocks"] == 3
    assert all(row.calibration is None and row.bytes_after < row.bytes_before for row in report.quantized)
    assert quantize_(Model(), INT3, dry_run=True).estimate is None
    with pytest.raises(ValueError, match="at least one batch"):
        quantize_(Model(), gptq(INT3, []), dry_run=True)


def test_time_is_what_one_weight_took_scaled_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of which each reading is a second later."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    model, data = Model(), batches(3)
    found = quantize_(model, gptq(INT3, data), dry_run=True).estimate

    def rounding(rows: int, columns: int) -> int:
        return 4 * rows * columns**2 + 2 * columns**3

    # `calibrate` reads the clock twice itself, so that the sample, `down`, took three seconds.
    matrices = [(32, 16), *[(64, 32), (64, 32), (32, 64)] * 3, (16, 32)]
    of_rounding = 3 * sum(rounding(*shape) for shape in matrices) / rounding(32, 64)
    of_statistics = 3 * sum(columns**2 for columns in (16, *(32, 64) * 3, 32)) / 64**2
    assert found.seconds == pytest.approx(3 + of_rounding + of_statistics)
