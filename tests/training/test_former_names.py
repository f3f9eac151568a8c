"""Classes of weights in training that were renamed: their former names import, and files that hold these names load.

`tests/golden/training_weights.pt` was written before the names changed: a model of two layers, in training by
`int8_mixed_precision_training()` and by `int8_weight_only_quantized_training()`; its state dict and its parameters,
both with the names of their classes; the numbers of the parameters; an input and the output.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import nn

import qtorch.training
from qtorch import quantize_
from qtorch.training import (
    CodesWeight,
    MasterWeight,
    TrainingWeight,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)

FILE = Path(__file__).parents[1] / "golden" / "training_weights.pt"


def test_former_names_are_classes_of_today() -> None:
    assert TrainingWeight is TrainingWeight
    assert CodesWeight is CodesWeight
    assert issubclass(MasterWeight, TrainingWeight)
    assert {"TrainingWeight", "CodesWeight"} <= set(qtorch.training.__all__)


def test_a_file_with_former_names_loads() -> None:
    content = FILE.read_bytes()
    assert b"CodesWeight" in content
    assert b"MasterWeight" not in content
    assert b"CodesWeight" not in content
    old = torch.load(FILE, weights_only=True)
    assert [type(old["state"][name]) for name in ("0.weight", "1.weight")] == [MasterWeight, CodesWeight]
    assert [type(p) for p in old["parameters"]] == [MasterWeight, nn.Parameter, CodesWeight]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in old["parameters"])
    for state in (old["state"], dict(zip(old["numbers"], old["parameters"], strict=True))):
        for name, numbers in old["numbers"].items():
            values = state[name].floats() if isinstance(state[name], TrainingWeight) else state[name]
            assert torch.equal(values, numbers)


def test_a_state_dict_of_then_goes_into_a_model_of_today() -> None:
    old = torch.load(FILE, weights_only=True)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4, bias=False))
    quantize_(model[0], int8_mixed_precision_training())
    quantize_(model[1], int8_weight_only_quantized_training())
    model.load_state_dict(old["state"])
    torch.testing.assert_close(model(old["input"]), old["output"])


def test_a_pickle_of_today_holds_names_of_today() -> None:
    weight = nn.Parameter(MasterWeight.of(torch.randn(4, 8), int8_mixed_precision_training().training_spec()))
    content = pickle.dumps(weight)
    assert b"MasterWeight" in content
    assert type(pickle.loads(content)) is MasterWeight
