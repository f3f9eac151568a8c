"""Supported versions of the packages that qtorch connects to: each is installed beside this environment and runs tests.

    python -m tools.versions                        all of TESTED; the results go into docs/reference/versions.md
    python -m tools.versions peft==0.20.0 ...       these, also of torch, whose builds for CUDA take 5 GB each
    python -m tools.versions oldest                 the oldest of each together: what CI runs; nothing is written

An environment sees the packages of this one behind its own, so that only what differs is installed. It stays in
.venv/versions for the next run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from qtorch.primitives.supported_versions import OLDEST

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = Path(sys.prefix) / "versions"
PAGE = ROOT / "docs/reference/versions.md"
MARKS = ("<!-- versions: begin -->", "<!-- versions: end -->")

TESTED = {
    "transformers": ("5.0.0", "5.5.4", "5.10.4", "5.15.1", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0"),
    "peft": ("0.18.0", "0.19.1", "0.20.0", "0.21.2"),
    "accelerate": ("1.10.0", "1.11.0", "1.12.0", "1.13.0", "1.14.0", "1.15.0"),
    "diffusers": ("0.39.0", "0.40.0", "0.41.0", "0.42.1"),
}

_TESTS = "tests/integrations"
SUITES = {
    "transformers": [
        f"{_TESTS}/transformers/test_{name}.py" for name in ("round_trip", "on_the_fly", "after_quantize", "trainer")
    ],
    "peft": [f"{_TESTS}/peft/test_{name}.py" for name in ("merge", "experts", "prepare")],
    "accelerate": [f"{_TESTS}/test_accelerate.py", f"{_TESTS}/transformers/test_trainer.py"],
    "diffusers": [f"{_TESTS}/test_diffusers.py"],
    "compressed-tensors": ["tests/formats/compressed_tensors/test_against_package.py"],
    "auto-round": ["tests/formats/test_gptq_awq.py"],
    "torch": ["tests/primitives", "tests/layouts", "tests/dtypes", "tests/test_recipes.py", "tests/training"],
}
# transformers 5.23 refuses PEFT before 0.20 in `add_adapter`.
CHOICE = ["-m", "not slow", "-k", "not add_adapter_of_transformers"]


def environment(requirements: list[str]) -> Path:
    """The Python of an environment that has them.

    Raises:
        CalledProcessError: they cannot be installed.
    """
    folder = ENVIRONMENTS / "_".join(re.sub("==", "-", each) for each in requirements)
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        own = next(folder.glob("lib/python*/site-packages"))
        # Paths of .pth files come behind site-packages itself.
        (own / "packages_of_the_other.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        subprocess.run([*pip, *requirements], check=True)
        complete.touch()
    return python


def run(requirements: list[str], suites: list[str]) -> tuple[bool, str]:
    """(whether all passed, such as ``"92 passed, 2 skipped"``) of the tests of `suites`."""
    tests = list(dict.fromkeys(path for suite in suites for path in SUITES[suite]))
    command = [str(environment(requirements)), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *CHOICE]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines() or [""]
    if done.returncode:
        print("\n".join(line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))), done.stderr[-2000:])
    found = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", lines[-1])
    return done.returncode == 0, ", ".join(found) or "did not run"


def write(results: dict[tuple[str, str], str]) -> None:
    """Put results into the table of the page; those of other versions stay."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    found = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| (.+) \|$", table, re.M)
    rows = {(package, version): result for package, version, result in found}
    order = sorted((rows | results).items(), key=lambda row: (list(SUITES).index(row[0][0]), _numbers(row[0][1])))
    lines = [f"| {package} | {version} | {result} |" for (package, version), result in order]
    new = "\n".join(["", "", "| package | version | tests |", "|---|---|---|", *lines, "", ""])
    PAGE.write_text(f"{before}{MARKS[0]}{new}{MARKS[1]}{after}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def main(arguments: list[str]) -> int:
    """See the top of the file."""
    if arguments == ["oldest"]:
        requirements = [f"{package}=={OLDEST[package]}.0" for package in TESTED]
        passed, result = run(requirements, list(TESTED))
        print(f"{' '.join(requirements)}: {result}")
        return 0 if passed else 1
    asked = arguments or [f"{package}=={version}" for package, versions in TESTED.items() for version in versions]
    failed = False
    for requirement in asked:
        package, _, version = requirement.partition("==")
        passed, result = run([requirement], [package])
        print(f"{requirement}: {result}", flush=True)
        write({(package, version): result})
        failed |= not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
