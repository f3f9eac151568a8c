"""Small changes of the arithmetic, each of which a test has to notice: a sign, a bound, an axis, a rounding.

    python -m benchmarks.mutants [--write] [PART OF A FILE'S NAME ...]

`results/mutants.json` has for each command line of pytest the mutants that it has to kill: file in qtorch, old text,
which stands there once, new text, and the outcome of the last run: killed, survived, or slow (stopped, as if killed).

No file is changed. A process collects the tests and forks for each mutant; the fork gives the functions of the file
the code that the changed text compiles to, runs the tests until one fails, and ends. So a mutant changes what is in a
function, or a constant of a module; what Triton compiles is read from the file, and is not reached.
"""

import argparse
import gc
import json
import os
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType

import _pytest.main
import pytest
import torch  # noqa: F401 (forked processes have it)

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "benchmarks" / "results" / "mutants.json"
SECONDS = 240
"""After which a mutant is stopped."""
OUTCOMES = {0: "survived", 1: "killed"}

Row = list[str]


def codes_of(code: CodeType) -> list[CodeType]:
    """The code of all functions in `code`."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return inner + [nested for part in inner for nested in codes_of(part)]


def mutate(name: str, old: str, new: str) -> None:
    """Change the functions of this process, and the constants of the module where the text is one of those."""
    path = ROOT / "qtorch" / name
    text = path.read_text()
    if text.count(old) != 1 or old.count("\n") != new.count("\n"):
        raise SystemExit(f"{name} has {text.count(old)} times: {old}")
    before, after = (codes_of(compile(source, str(path), "exec")) for source in (text, text.replace(old, new)))
    changed = {one: other for one, other in zip(before, after, strict=True) if one != other}
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            function.__code__ = changed.get(function.__code__, function.__code__)
    if not old.startswith(" ") and f"\n{old}" in text:
        exec(new, vars(sys.modules[".".join(("qtorch", *Path(name).with_suffix("").parts))]))
    elif not changed:
        raise SystemExit(f"{name}: no function has {old}")


class Forks:
    """Plugin of pytest: in place of a run of the tests, one for each mutant, until a test fails. In the end those that
    failed run without a mutant, and have to pass."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.outcomes = rows, ["no test"] * len(rows)
        self.ends, self.shown = os.pipe(), os.dup(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for index, row in enumerate(self.rows):
            self.outcomes[index] = self._fork(session, row)
            os.write(self.shown, f"{self.outcomes[index]:8}  {row[0]}: {row[1]}  ->  {row[2]}\n".encode())
        os.write(self.ends[1], b"\n")
        failed = set(os.read(self.ends[0], 1 << 20).decode().split("\n"))
        session.items = [item for item in session.items if item.nodeid in failed]
        if self._fork(session, None) != "survived":
            self.outcomes = ["fails without a mutant"] * len(self.rows)
            os.write(self.shown, b"... which fail without a mutant, too\n")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.ends[1], f"{report.nodeid}\n".encode())

    @staticmethod
    def _fork(session: pytest.Session, row: Row | None) -> str:
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            status = 3
            try:
                if row is not None:
                    mutate(*row[:3])
                _pytest.main.pytest_runtestloop(session)
                status = int(session.testsfailed > 0)
            except (session.Failed, session.Interrupted):
                status = 1
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            return "slow" if os.WTERMSIG(status) == signal.SIGALRM else "killed"
        return OUTCOMES.get(os.WEXITSTATUS(status), "no mutant")


def outcomes(group: tuple[str, list[Row]]) -> list[str]:
    """Those of the mutants of one command line."""
    tests, rows = group
    os.chdir(ROOT)
    forks = Forks(rows)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    pytest.main([*tests.split(), "-n0", "-x", "-q", "-p", "no:cacheprovider"], [forks])
    return forks.outcomes


def as_text(mutants: dict[str, list[Row]]) -> str:
    """JSON with a mutant in a line."""
    lines = {tests: ",\n".join(f"    {json.dumps(row)}" for row in rows) for tests, rows in mutants.items()}
    return "{\n" + ",\n".join(f"  {json.dumps(tests)}: [\n{rows}\n  ]" for tests, rows in lines.items()) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="run the mutants of files with this in their name")
    parser.add_argument("--write", action="store_true", help="write the outcomes into the file of mutants")
    arguments = parser.parse_args()
    mutants: dict[str, list[Row]] = json.loads(MUTANTS.read_text())
    named = [
        (tests, [row for row in rows if any(part in row[0] for part in arguments.parts or ("",))])
        for tests, rows in mutants.items()
    ]
    groups = [group for group in named if group[1]]
    found: list[str] = []
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for (_, rows), results in zip(groups, pool.imap(outcomes, groups), strict=True):
            for row, result in zip(rows, results, strict=True):
                row[3:] = [result]
            found += results
            if arguments.write:
                MUTANTS.write_text(as_text(mutants))
    print(", ".join(f"{found.count(word)} {word}" for word in sorted(set(found))))


if __name__ == "__main__":
    main()
