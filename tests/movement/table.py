"""Runs the conformance suite, and writes docs/reference/movement.md.

python -m tests.movement.table                  what is wrong
python -m tests.movement.table MOVEMENT ...     of some columns
python -m tests.movement.table --write          the page
"""

import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from tests.distributed.processes import run
from tests.movement import in_process  # noqa: F401  fills MOVEMENTS
from tests.movement.across import ACROSS
from tests.movement.kinds import FAMILIES, KINDS, Kind
from tests.movement.movements import MOVEMENTS, Movement, outcome
from tests.movement.reasons import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "movement.md"

ALL = {**MOVEMENTS, **ACROSS}

Cells = dict[str, dict[str, str]]
"""Movement -> kind -> outcome."""

HEAD = """\
# How quantized tensors move

Written by `python -m tests.movement.table --write`; `tests/movement` runs every cell. *yes*: the result has the same
class and the same codes and scales, bit for bit, and its layer gives the same outputs and gradients. A number is a
reason, below: an error says it, and the weight is what it was before.

Rows that are alike stand in one. Between processes gradients may differ by the order of a sum, and so may outputs under
tensor parallelism, and those of weights that FSDP2 shards in another layout.
"""

NOTES = """\
- `half` and `param_dtype` change the dtype of results, and round weights that train in floats; codes stay.
- `save_quantized` writes weights that train in codes as the weights that serve.
- FSDP2 gathers the weights of `bitnet_training` as ternary codes, whose scale is the mean over all shards.
- FSDP2 gathers codes of weights that train in floats, too, where all of their products take the same codes.
- With `param_dtype`, layers that learn ranges (LSQ, schedules, adapters) compute as `layer.bfloat16()`: they hold
  plain parameters.
- `pin_memory` needs an accelerator; without one the tests count copies as pinned.
- A cache of keys and values is no tensor: it is moved by `cache.to`, see [KV cache](../guides/kv_cache.md).
"""


def cells(names: Iterable[str], kinds: Sequence[Kind] = KINDS) -> Cells:
    """The outcomes of these movements for these kinds; between processes for all."""
    found: Cells = {}
    for name in names:
        start = time.perf_counter()
        found[name] = _across(name) if name in ACROSS else _in_process(ALL[name], kinds)
        wrong = {kind: cell for kind, cell in found[name].items() if cell.startswith("wrong")}
        print(f"{name}: {len(found[name])} cells, {len(wrong)} wrong, {time.perf_counter() - start:.1f} s", flush=True)
        for kind, cell in wrong.items():
            print(f"    {kind}: {cell}", flush=True)
    return found


def _in_process(movement: Movement, kinds: Sequence[Kind]) -> dict[str, str]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return {kind.name: outcome(movement, kind) for kind in kinds}


def _across(name: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "cells.json"
        run("../movement/across.py", str(result), name)
        found: Cells = json.loads(result.read_text())
    return found[name]


def page(found: Cells) -> str:
    """docs/reference/movement.md."""
    numbers: dict[str, int] = {}
    for name in REASONS:
        if any(name in column.values() for column in found.values()):
            numbers[name] = len(numbers) + 1
    parts = [HEAD]
    for group in dict.fromkeys(movement.group for movement in ALL.values()):
        columns = [name for name, movement in ALL.items() if movement.group == group]
        parts += [f"## {group}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for names, row in _rows(found, columns):
            written = [cell if cell == "yes" else str(numbers.get(cell, cell)) for cell in row]
            parts.append(f"| {names} | {' | '.join(written)} |")
        parts.append("")
    parts += ["## Reasons", ""]
    parts += [f"{number}. {REASONS[name].sentence}" for name, number in numbers.items()]
    parts += ["", "## Notes", "", NOTES, "## The kinds", ""]
    parts += [f"- **{family}**: {', '.join(f'`{k.name}`' for k in KINDS if k.family == family)}" for family in FAMILIES]
    return "\n".join(parts) + "\n"


def _rows(found: Cells, columns: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(names of the kinds, their cells); kinds with equal cells are one row, in the order of their families."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        alike.setdefault(tuple(found[name][kind.name] for name in columns), []).append(kind.name)
    most = max(alike.values(), key=len)
    rows = [(_names(names, names is most), row) for row, names in alike.items()]
    return sorted(rows, key=lambda row: row[0] != OTHERS)


OTHERS = "all others"


def _names(names: list[str], is_most: bool) -> str:
    """`names` as a person reads them: whole families by name."""
    if is_most and len(names) > 1:
        return OTHERS
    texts = []
    for family in FAMILIES:
        members = [kind.name for kind in KINDS if kind.family == family]
        if all(name in names for name in members):
            texts.append(family)
        else:
            texts += [f"`{name}`" for name in members if name in names]
    return ", ".join(texts)


def read(text: str) -> Cells:
    """The outcomes that a page says: the inverse of `page`."""
    numbered = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    reasons: Mapping[str, str] = {reason.sentence: name for name, reason in REASONS.items()}
    found: Cells = {}
    columns: list[str] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if line.startswith("| |"):
            columns = parts[1:]
        elif line.startswith("| ") and columns:
            row = ["yes" if cell == "yes" else reasons.get(numbered.get(cell, ""), cell) for cell in parts[1:]]
            for column, cell in zip(columns, row, strict=True):
                of_column = found.setdefault(column, {})
                names = {kind.name for kind in KINDS} if parts[0] == OTHERS else _members(parts[0])
                # The others come first; the rows after them are exceptions.
                of_column.update(dict.fromkeys(names, cell))
    return found


def _members(text: str) -> set[str]:
    names = set(re.findall(r"`([^`]+)`", text))
    plain = re.sub(r"`[^`]+`", "", text)
    return names | {kind.name for kind in KINDS if kind.family in plain}


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--write"] or list(ALL)
    found = cells(names)
    if "--write" in arguments:
        PAGE.write_text(page({**read(PAGE.read_text()), **found} if PAGE.exists() else found))


if __name__ == "__main__":
    main(sys.argv[1:])
