"""clip: ranges of groups that bring the output of a layer nearer."""

from typing import Any

import pytest
import torch
from torch import nn

import qtorch
from qtorch import quantize_
from qtorch.calibration import Nearest, calibrated, clip


def layer_with_outliers(data: torch.Tensor) -> nn.Linear:
    """Weights with a few large values for inputs that are small."""
    layer = nn.Linear(64, 24)
    layer.weight.data[:, ::16] *= 6
    data[:, ::16] *= 0.05
    return layer


@pytest.mark.parametrize(
    "recipe",
    [
        qtorch.intx_weight_only("int3", group_size=16),
        qtorch.uintx_weight_only("uint3", group_size=32),
        qtorch.int8_dynamic_activation_int4_weight(group_size=32),
    ],
    ids=str,
)
def test_clipping_lessens_the_error_of_the_output(recipe: Any) -> None:
    x = torch.randn(600, 64)
    layer = layer_with_outliers(x)
    wanted, old = layer(x).detach(), layer.weight.detach().clone()
    errors = []
    for transforms in ((), (clip(tokens=600),)):
        layer.weight = nn.Parameter(old.clone())
        report = quantize_(layer, calibrated(recipe, [x], None, Nearest(), transforms=transforms))
        with torch.no_grad():
            errors.append(float((layer(x) - wanted).square().sum() / wanted.square().sum()))
    assert 0 < errors[1] < 0.8 * errors[0]
    (item,) = report.transforms
    assert item.action == "clipped"
    assert item.error_before == pytest.approx(errors[0], rel=0.02)
    assert item.error_after == pytest.approx(errors[1], rel=0.02)


def test_nothing_is_clipped_where_that_would_hurt() -> None:
    layer, x = nn.Linear(32, 8), torch.randn(40, 32)
    layer.weight.data = layer.weight.data.sign() * 0.5
    report = quantize_(layer, calibrated(qtorch.int8_weight_only(), [x], None, Nearest(), transforms=[clip()]))
    assert [item.action for item in report.transforms] == ["unchanged"]


def test_look_up_tables_have_no_range() -> None:
    layer, x = nn.Linear(64, 8), torch.randn(40, 64)
    report = quantize_(layer, calibrated(qtorch.nf4_weight_only(), [x], None, Nearest(), transforms=[clip()]))
    assert [item.detail for item in report.transforms] == ["look-up tables have no range"]
