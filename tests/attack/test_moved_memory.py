"""Inner tensors that are resized, set, transposed, exchanged or freed after a weight was made, and before or after a
kernel has remembered where they lie: a clear error or the new numbers, never a crash, never memory of others."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtorch
from qtorch import quantize_
from tests.attack import workers
from tests.attack.moved_memory import CASES


def test_every_change_of_every_tensor() -> None:
    found = workers.failures("tests.attack.moved_memory", 0, len(CASES))
    assert not found, f"{len(found)} of {len(CASES)}:\n" + "\n".join(found[:40])


def test_the_cases_are_there() -> None:
    assert len(CASES) > 1000
    assert {"qdata", "scale", "zero_point"} <= {case.tensor for case in CASES}


@pytest.mark.parametrize("calls", [0, 1, 5])
@pytest.mark.parametrize("name", ["int8_weight_only", "int4_weight_only", "int8_dynamic_activation_int8_weight"])
def test_a_scale_that_is_taken_away(name: str, calls: int) -> None:
    """As above, through a layer."""
    layer, x = nn.Linear(128, 256), torch.randn(1, 128)
    quantize_(layer, getattr(qtorch, name)())
    with torch.no_grad():
        for _ in range(calls):
            layer(x)
        layer.weight.scale.resize_(0)
        for _ in range(3):
            with pytest.raises((ValueError, RuntimeError), match="scale"):
                layer(x)
            with pytest.raises((ValueError, RuntimeError), match="scale"):
                functional.embedding(torch.tensor([255]), layer.weight)
