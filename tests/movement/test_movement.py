"""Every kind of tensor through every movement: yes, or the reason that docs/reference/movement.md gives.

After a change: `python -m tests.movement.table --write`.
"""

import pytest
import torch

from tests.movement import across, reasons, table
from tests.movement.kinds import BY_NAME, KINDS, Kind
from tests.movement.movements import MOVEMENTS, Movement, outcome

QUICK = ("int4_weight_only", "int8_dynamic_activation_int8_weight", "nf4, a convolution", "qat", "lsq")
QUICK += ("int8 mixed precision, experts", "int8 codes, an embedding", "AdamW8bit, exp_avg")
"""Some of each family."""


def check(name: str, kinds: list[Kind] = KINDS) -> None:
    found = table.cells([name], kinds)[name]
    wrong = [f"{kind}: {cell}" for kind, cell in found.items() if cell.startswith("wrong")]
    assert not wrong, f"{name}: {len(wrong)} of {len(found)} cells\n" + "\n".join(wrong)
    said = table.read(table.PAGE.read_text())[name]
    assert found == {kind.name: said[kind.name] for kind in kinds}, "python -m tests.movement.table --write"


@pytest.mark.parametrize("name", MOVEMENTS)
def test_some_kinds(name: str) -> None:
    check(name, [BY_NAME[kind] for kind in QUICK])


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVEMENTS)
def test_in_one_process(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("name", across.ACROSS)
def test_between_processes(name: str) -> None:
    check(name)


def test_the_page() -> None:
    """That every class of tensors is among the kinds: tests/dtypes/test_inner_tensors.py."""
    text = table.PAGE.read_text()
    assert table.page(table.read(text)) == text, "python -m tests.movement.table --write"
    used = {cell for column in table.read(text).values() for cell in column.values()} - {"yes"}
    assert used == set(reasons.REASONS), "every reason is that of a cell"


def test_an_outcome_is_one_of_three() -> None:
    """A change, an unclear error and an error with other words are wrong."""

    def raising(error: Exception) -> Movement:
        def run(case: object) -> None:
            raise error

        return Movement("", "", run)

    def changing(case: object) -> None:
        with torch.no_grad():
            case.weight.qdata.zero_()  # type: ignore[attr-defined]
        raise ValueError("the slice cuts blocks of 32")

    kind = KINDS[0]
    assert outcome(raising(ValueError("the slice cuts blocks of 32")), kind) == "blocks"
    assert outcome(raising(ValueError("no")), kind) == "wrong: ValueError: no"
    assert outcome(raising(KeyError("cuts blocks of 32")), kind).startswith("wrong: KeyError")
    assert outcome(raising(AssertionError("other numbers")), kind) == "wrong: other numbers"
    assert outcome(Movement("", "", changing), kind).startswith("wrong: after the error")
