"""The command line as a process: the entry point, `python -m`, and what they import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.fast_part import slow_but
from tests.float_checkpoints import decoder

ROOT = Path(__file__).parents[2]
SCRIPT = "import sys\nfrom qtorch.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def run(program: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.fixture(params=["module", "entry point"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "module":
        return ["-m", "qtorch"]
    # What an installer writes for [project.scripts].
    (tmp_path / "qtorch").write_text(SCRIPT)
    return [str(tmp_path / "qtorch")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["quantize", "--help"],
        ["nothing"],
        ["inspect"],
        ["inspect", "no such file"],
        ["quantize", "docs", "x", "--recipe", "int8_weight_onyl"],
        ["bench", "docs", "--rows", "0"],
        ["eval", "docs", "--text", "README.md"],
    ],
    ids=lambda value: " ".join(value),
)
def test_help_and_wrong_use_do_not_import_torch(arguments: list[str], program: list[str]) -> None:
    done = run(["-X", "importtime", *program], *arguments)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "qtorch.cli" in imported
    assert not imported & {"torch", "numpy", "transformers"}
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert done.stdout.startswith("usage: qtorch") == ("--help" in arguments)


@pytest.mark.parametrize("program", slow_but(["entry point"], ["module", "entry point"]), indirect=True)
def test_run(program: list[str], tmp_path: Path) -> None:
    save_file(decoder().state_dict(), tmp_path / "float.safetensors")
    done = run(
        program, "quantize", tmp_path / "float.safetensors", tmp_path / "q.safetensors", "--recipe", "int8_weight_only"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("quantized 6 of ")
    assert (tmp_path / "q.safetensors").is_file()
    done = run(program, "inspect", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"qtorch: error: {tmp_path / 'none'}: no such file or folder\n"


def test_another_program_called_qtorch_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "qtorch").write_text("import qtorch\nprint('mine')\n")
    done = run([str(tmp_path / "qtorch")], "--help")
    assert (done.returncode, done.stdout) == (0, "mine\n")


def test_the_entry_point_is_declared() -> None:
    assert 'qtorch = "qtorch.cli:main"' in (ROOT / "pyproject.toml").read_text()
