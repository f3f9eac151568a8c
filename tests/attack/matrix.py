"""The matrix recipe x operation: runs it, and writes docs/reference/behaviour.md.

python -m tests.attack.matrix                    what is wrong
python -m tests.attack.matrix OPERATION RECIPE   one cell
python -m tests.attack.matrix --write            the table
"""

import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Collection
from pathlib import Path

import torch

from tests.attack.operations import OPERATIONS, Operation
from tests.attack.subject import FEW, SUBJECTS, Subject

for _name in ("inputs_and_shapes", "in_place", "copies", "raw_memory", "transforms", "installs", "defaults"):
    importlib.import_module(f"tests.attack.{_name}")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "behaviour.md"

HEAD = """\
# What holds for each recipe and operation

Written by `python -m tests.attack.matrix --write`; `tests/attack` runs every cell. *works* means that the result was
compared with one from elsewhere: a layer made anew from the same numbers, a copy, the arithmetic in torch operators.
Where an operation is refused, its error is quoted, and nothing has changed after it. Copies, moves, compilers and
several processes have [a page of their own](movement.md), over all kinds of tensors.

Columns are families of recipes:
"""


def cell(operation: Operation, subject: Subject) -> str:
    """The outcome of an operation for a recipe."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return operation.outcome(subject)


def row(operation: Operation, names: Collection[str] = ()) -> dict[Subject, str]:
    """The outcomes for the recipes of these names; without names for every recipe, or for a few of each family."""
    names = names or (FEW if operation.few else [subject.name for subject in SUBJECTS])
    subjects = [subject for subject in SUBJECTS if subject.name in names]
    if operation.may_kill:
        return _in_children(operation, subjects)
    return {subject: cell(operation, subject) for subject in subjects}


def _in_children(operation: Operation, subjects: list[Subject]) -> dict[Subject, str]:
    """One process for all, and another after each that has died."""
    outcomes: dict[Subject, str] = {}
    while rest := subjects[len(outcomes) :]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            torch.set_num_threads(1)  # the threads of the parent are not here
            for subject in rest:
                os.write(write, f"{json.dumps(cell(operation, subject))}\n".encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            outcomes |= zip(rest, map(json.loads, pipe))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            outcomes[subjects[len(outcomes)]] = f"wrong: the process died: {signal.Signals(-status).name}"
    return outcomes


def families() -> dict[str, list[Subject]]:
    """Columns of the page."""
    found: dict[str, list[Subject]] = {}
    for subject in SUBJECTS:
        found.setdefault(subject.family, []).append(subject)
    return found


def line(operation: Operation, outcomes: dict[Subject, str]) -> str:
    """A row of the page."""
    cells = []
    for members in families().values():
        found = {escaped(outcomes[subject]) for subject in members if subject in outcomes}
        cells.append("<br>".join(sorted(found)))
    return f"| {operation.title} | {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """An outcome as it stands on the page."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def page(outcomes: dict[str, dict[Subject, str]]) -> str:
    """docs/reference/behaviour.md."""
    columns = families()
    parts = [HEAD]
    parts += [f"- **{name}**: {', '.join(f'`{s.name}`' for s in members)}" for name, members in columns.items()]
    group = None
    for name, operation in OPERATIONS.items():
        if operation.group != group:
            group = operation.group
            parts += ["", f"## {group}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        parts.append(line(operation, outcomes[name]))
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> None:
    if len(arguments) == 2:
        (subject,) = [subject for subject in SUBJECTS if subject.name == arguments[1]]
        print(cell(OPERATIONS[arguments[0]], subject))
        return
    outcomes = {}
    for name, operation in OPERATIONS.items():
        if arguments and name not in arguments and "--write" not in arguments:
            continue
        start = time.perf_counter()
        outcomes[name] = row(operation)
        wrong = {subject: outcome for subject, outcome in outcomes[name].items() if outcome.startswith("wrong")}
        print(f"{name}: {len(outcomes[name])} cells, {len(wrong)} wrong, {time.perf_counter() - start:.1f} s")
        for subject, outcome in wrong.items():
            print(f"    {subject}: {outcome}", flush=True)
    if "--write" in arguments:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
