"""The type stubs: fresh, and of use to a type checker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.stubs import PACKAGES, path_of, text_of

CODE = """
import qtorch
from qtorch.training import int8_mixed_precision_training

reveal_type(qtorch.int4_weight_only(group_size=32))
reveal_type(int8_mixed_precision_training())
qtorch.int4_weight_only(groupsize=32)
qtorch.int5_weight_only
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_stub_is_fresh(package: str) -> None:
    assert path_of(package).read_text() == text_of(package), "run `make stubs`"


@pytest.mark.slow
def test_mypy_sees_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(CODE)
    options = ["--no-incremental", "--follow-imports=silent", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "user.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    told = [line.split(": ", 2)[2] for line in lines if "user.py" in line and 'note: "' not in line]
    assert told[0] == 'Revealed type is "qtorch.recipes.integer.Int4WeightOnly"'
    assert told[1] == 'Revealed type is "qtorch.training.recipes.int8.Int8MixedPrecisionTraining"'
    assert told[2].startswith('Unexpected keyword argument "groupsize" for "Int4WeightOnly"')
    assert told[3].startswith('Module has no attribute "int5_weight_only"')
