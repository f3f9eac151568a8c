"""docs/reference/aqt.md: each feature of AQT is there, with yes, expressions that evaluate, and tests that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import qtorch
import qtorch.calibration
import qtorch.primitives
import qtorch.training

from .pages import DOCS, ROOT

# What AQT v2 and AQTp have; each is in the first column of a row.
FEATURES = (
    "`IntSymmetric`, 1 to 22 bits",
    "`preserve_zero`, `preserve_max_val`",
    "`clip_gradient`",
    "`Fp8Numerics`",
    "`FpNumerics`",
    "stochastic rounding of float8",
    "uniform, custom-1; `noise_sharing_axes`",
    "`ConstantCalibration`",
    "`AbsMaxCalibration(clipping_scale)`",
    "`AbsMeanCalibration(clipping_scale, p)`",
    "`SnrBasedAutoCalibration`",
    "`po2_scale`; dtype of scales",
    "`MeanOfAbsMaxCalibration`",
    "`WeightedStatsCalibration`",
    "`DelayedScalingCalibration`",
    "`scale_stop_grad",
    "`DotGeneral`: fwd, dlhs, drhs",
    "CONTRACTING_AXIS, REMAINING_AXIS",
    "OUTPUT, THIS_INPUT, OTHER_INPUT",
    "`use_fwd_quant`",
    "`mid_quant`",
    "`local_aqt`, `tiled_dot_general`",
    "accumulators: int32, int16",
    "`ragged_dot`",
    "`conv_general_dilated`, `einsum`",
    "`QuantMode`",
    "`Freezer`",
    "Q(T(w))",
    "`intercept_methods`",
    "dummy gradients",
    "schedules (AQTp)",
    "GPTQ extension",
    "PokeBNN, 4-bit ResNet",
)

PAGE = (DOCS / "reference" / "aqt.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| AQT |")
]
FILES = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
TESTS = {name for text in FILES for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def names() -> dict[str, Any]:
    """What an expression may use."""
    found: dict[str, Any] = {"torch": torch, "batches": [torch.zeros(1, 4)]}
    for module in (qtorch.calibration, qtorch.primitives, qtorch, qtorch.training):
        found |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    clipping = qtorch.QuantSpec("int4", scale_rule=qtorch.primitives.AbsMaxRule(0.5))  # type: ignore[arg-type]
    return found | {"clipping": clipping}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_a_row(feature: str) -> None:
    assert any(feature in row[0] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row(row: list[str]) -> None:
    _, answer, spelling, tested = row
    assert answer == "yes"
    expressions = re.findall(r"`([^`]+)`", spelling)
    assert expressions
    for expression in expressions:
        assert eval(expression, names()) is not None
    tests = re.findall(r"`(\w+)`", tested)
    assert tests
    assert [test for test in tests if test not in TESTS] == []
