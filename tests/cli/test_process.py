"""The command line as a process, and the recipes that it reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import qtorch
from qtorch.cli.arguments import UsageError, size
from qtorch.cli.recipes import read_config, read_recipe
from qtorch.primitives import HQQRule, MSERule, to_json
from tests import fast_part, float_checkpoints
from tests.refusals import refuses

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


@pytest.mark.parametrize("arguments", [
    ["--help"],
    ["quantize", "--help"],
    ["--version"],
    ["nothing"],
    ["inspect"],
    ["inspect", "no such file"],
    ["quantize", "docs", "x", "--recipe", "int8_weight_onyl"],
    ["bench", "docs", "--rows", "0"],
    ["eval", "docs", "--text", "README.md"],
], ids=lambda value: " ".join(value))  # fmt: skip
def test_help_and_wrong_use_do_not_import_torch(arguments: list[str], program: list[str]) -> None:
    done = run(["-X", "importtime", *program], *arguments)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "qtorch.cli" in imported
    assert not imported & {"torch", "numpy", "transformers"}
    assert done.returncode == (0 if arguments[-1] in ("--help", "--version") else 2)
    assert done.stdout.startswith("usage: qtorch") == ("--help" in arguments)


@pytest.mark.parametrize("program", fast_part.slow_but(["entry point"], ["module", "entry point"]), indirect=True)
def test_run(program: list[str], tmp_path: Path) -> None:
    save_file(float_checkpoints.decoder().state_dict(), tmp_path / "float.safetensors")
    done = run(
        program, "quantize", tmp_path / "float.safetensors", tmp_path / "q.safetensors", "--recipe", "int8_weight_only"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("quantized 6 of ")
    assert (tmp_path / "q.safetensors").is_file()
    done = run(program, "inspect", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"qtorch: error: {tmp_path / 'none'}: no such file or folder\n"


def test_the_entry_point(tmp_path: Path) -> None:
    assert 'qtorch = "qtorch.cli:main"' in (ROOT / "pyproject.toml").read_text()
    (tmp_path / "qtorch").write_text("import qtorch\nprint('mine')\n")
    done = run([str(tmp_path / "qtorch")], "--help")
    assert (done.returncode, done.stdout) == (0, "mine\n")


FLOAT, TILED = qtorch.ZeroPointDomain.FLOAT, qtorch.TensorCoreTiledLayout()


@pytest.mark.parametrize(("text", "settings", "wanted"), [
    ("int4_weight_only", [], qtorch.int4_weight_only()),
    ("int4_weight_only()", ["group_size=32"], qtorch.int4_weight_only(group_size=32)),
    ("int4_weight_only(32)", [], qtorch.int4_weight_only(32)),
    ("int4_weight_only(group_size=-1)", [], qtorch.int4_weight_only(group_size=-1)),
    ("int4_weight_only", ["use_hqq=True"], qtorch.int4_weight_only(use_hqq=True)),
    (
        "int4_weight_only",
        ["zero_point_domain=FLOAT", "layout=TensorCoreTiledLayout()"],
        qtorch.int4_weight_only(zero_point_domain=FLOAT, layout=TILED),
    ),
    ("int4_weight_only(zero_point_domain=ZeroPointDomain.FLOAT)", [], qtorch.int4_weight_only(zero_point_domain=FLOAT)),
    ("int8_weight_only", ["scale_rule=MSERule(steps=9)"], qtorch.int8_weight_only(scale_rule=MSERule(steps=9))),
    ("int8_weight_only(scale_dtype=torch.bfloat16)", [], qtorch.int8_weight_only(scale_dtype=torch.bfloat16)),
    ("int8_weight_only", ["scale_dtype=bfloat16"], qtorch.int8_weight_only(scale_dtype=torch.bfloat16)),
    ("fpx_weight_only(3, 2)", [], qtorch.fpx_weight_only(3, 2)),
    ("qat(int8_weight_only())", [], qtorch.training.qat(qtorch.int8_weight_only())),
], ids=lambda value: str(value)[:50])  # fmt: skip
def test_text(text: str, settings: list[str], wanted: object) -> None:
    assert read_recipe(text, settings) == wanted


@pytest.mark.parametrize("recipe", [
    qtorch.int4_weight_only(group_size=32, scale_rule=HQQRule()),
    qtorch.uintx_weight_only(torch.uint3),
    qtorch.intx_weight_only(torch.int3),
    qtorch.nf4_weight_only(double_quantize=False),
    qtorch.int8_dynamic_activation_int4_weight(),
], ids=str)  # fmt: skip
def test_what_a_report_prints_is_read(recipe: object) -> None:
    assert read_recipe(str(recipe)) == recipe


@pytest.mark.parametrize(("text", "error"), [
    ("int4", "there is no recipe 'int4'; did you mean "),
    ("print('x')", "there is no recipe 'print'"),
    ("int4_weight_only(group_size=open('x'))", "there is no recipe, rule, layout or granularity 'open'"),
    ("int4_weight_only(layout=os.system)", "there is no os.system"),
    ("int4_weight_only(size=3)", r"int4_weight_only\(\).* argument 'size'|argument 'size'"),
    ("int4_weight_only(group_size=0)", "int4_weight_only: group_size is 0"),
    ("int4_weight_only(group_size=[x for x in ()])", "cannot read"),
])  # fmt: skip
def test_errors(text: str, error: str) -> None:
    refuses(error, lambda: read_recipe(text), UsageError)


def test_config_and_sizes(tmp_path: Path) -> None:
    given = {
        "lm_head": None,
        "a": "int8_weight_only",
        "b": {"recipe": "int4_weight_only", "group_size": 64, "zero_point_domain": "FLOAT"},
        "c": to_json(qtorch.nf4_weight_only()),
    }
    path = tmp_path / "recipes.json"
    path.write_text(json.dumps(given))
    assert read_config(path) == {
        "lm_head": None,
        "a": qtorch.int8_weight_only(),
        "b": qtorch.int4_weight_only(group_size=64, zero_point_domain=FLOAT),
        "c": qtorch.nf4_weight_only(),
    }
    assert [size(text) for text in ("10", "2kB", "1.5MB", "5GiB", "3 g")] == [10, 2000, 1_500_000, 5 * 2**30, 3 * 10**9]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"a": 3}', '{"a": {"recipe": "x"}}', '{"a": "int4"}'])
def test_wrong_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipes.json"
    path.write_text(text)
    refuses(r"recipes\.json", lambda: read_config(path), UsageError)
