"""The complete file of each page of docs/extending, and a run of tests with it loaded."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

import qtorch

ROOT = Path(qtorch.__file__).parent.parent
FOLDER = ROOT / "docs" / "extending"


class CompleteFile(NamedTuple):
    name: str
    text: str

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py")


def complete_file(page: str) -> CompleteFile:
    """What the page tells to save, and under which name; it has no other Python."""
    text = (FOLDER / f"{page}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (name,) = re.findall(r"^The complete file, `(\w+\.py)`:$", text, re.MULTILINE)
    return CompleteFile(name, code)


def environment(folder: Path) -> dict[str, str]:
    """For an interpreter that finds the files of `folder`, with Triton's interpreter where there is no GPU."""
    without = {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return {**kept, **interpreter, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run_tests_with(page: str, folder: Path, *arguments: str) -> dict[str, str]:
    """Save the file of `page` in `folder` and run pytest with it loaded as a plugin.

    Args:
        arguments: of pytest: which tests.

    Returns:
        "passed", "skipped" or "failed" of each test that was collected, ``"tests.kernels.test_linear::test_name[id]"``.
    """
    file = complete_file(page)
    (folder / file.name).write_text(file.text)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", file.module, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *arguments], capture_output=True, text=True, cwd=ROOT,
        env=environment(folder),
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = [element.tag for element in case if element.tag in ("skipped", "failure", "error")]
        outcome = "passed" if not outcomes else "skipped" if outcomes == ["skipped"] else "failed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    failed = [name for name, outcome in found.items() if outcome == "failed"]
    assert not failed, f"{failed}\n{done.stdout[-6000:]}"
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def run_file(page: str, folder: Path) -> str:
    """What the file of `page` prints when it is run as a program, in a fresh interpreter."""
    file = complete_file(page)
    (folder / file.name).write_text(file.text)
    command = [sys.executable, "-W", "error::UserWarning:qtorch", file.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(folder))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def layers(recipe: object, k: int, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """A float layer with normal weights, and the same layer by `recipe`."""
    in_float = torch.nn.Linear(k, n, device=device, dtype=dtype)
    torch.nn.init.normal_(in_float.weight)
    quantized = copy.deepcopy(in_float)
    qtorch.quantize_(quantized, recipe)
    return in_float, quantized


def reloaded(layer: torch.nn.Linear, folder: Path) -> Any:
    """The layer that a file of this one gives."""
    qtorch.save_quantized(layer, folder / "layer.safetensors")
    with torch.device("meta"):
        made = torch.nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    return qtorch.load_quantized(made, folder / "layer.safetensors", device=layer.bias.device)
