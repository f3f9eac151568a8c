"""Every recipe under every operation: it works, or is refused by a clear error; no cell is wrong.

A row fails too when docs/reference/behaviour.md says something else: `python -m tests.attack.matrix --write`.
"""

import pytest

import qtorch
from tests.attack import matrix
from tests.attack.operations import OPERATIONS, Operation, first_words
from tests.attack.subject import FEW, SUBJECTS, Subject
from tests.every_recipe import K_TYPES

QUICK = ("intx_weight_only", "int8_dynamic_activation_int4_weight", "switchback_training")
"""A frozen weight alone, one with codes of its input, one that trains. All recipes take minutes."""


def outcomes_of(operation: Operation, names: tuple[str, ...] = ()) -> dict[Subject, str]:
    """None of them wrong."""
    outcomes = matrix.row(operation, names)
    wrong = [f"{subject}: {outcome}" for subject, outcome in outcomes.items() if outcome.startswith("wrong")]
    assert not wrong, f"{operation.title}: {len(wrong)} of {len(outcomes)} cells\n" + "\n".join(wrong)
    return outcomes


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_few_recipes(name: str) -> None:
    operation = OPERATIONS[name]
    outcomes = outcomes_of(operation, FEW[:1] if operation.few else QUICK)
    (line,) = (line for line in matrix.PAGE.read_text().splitlines() if line.startswith(f"| {operation.title} |"))
    assert all(matrix.escaped(outcome) in line for outcome in outcomes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_cell_is_wrong(name: str) -> None:
    operation = OPERATIONS[name]
    line = matrix.line(operation, outcomes_of(operation))
    assert line in matrix.PAGE.read_text(), "python -m tests.attack.matrix --write"


def test_every_recipe_is_a_column() -> None:
    names = {name for name, cls in qtorch.recipes.base.RECIPES.items() if cls.__module__.startswith("qtorch.")}
    # Recipes that look at data, and padded ones, give the tensors of those that they wrap; the others work on weights
    # in preparation. Layers here are too narrow for super-blocks.
    assert names - {*K_TYPES, "convert", "from_observers", "padded", *qtorch.calibration.__all__} <= {
        subject.name for subject in SUBJECTS
    }
    few = {subject.family for subject in SUBJECTS if subject.name in FEW}
    assert {subject.family for subject in SUBJECTS} == few


def test_an_outcome_is_one_of_three() -> None:
    """A clear error that is not the one asked for, and every other exception, is wrong."""

    def raising(error: Exception | None) -> Operation:
        def run(subject: object) -> None:
            if error is not None:
                raise error

        return Operation("", "", run, refuses="frozen")

    subject = SUBJECTS[0]
    assert raising(None).outcome(subject) == "works"
    assert raising(ValueError("it is frozen")).outcome(subject) == "refused: it is frozen"
    assert raising(ValueError("no")).outcome(subject) == "wrong: ValueError: no"
    assert raising(KeyError("frozen")).outcome(subject) == "wrong: KeyError: 'frozen'"
    assert raising(AssertionError("stale")).outcome(subject) == "wrong: stale"
    assert first_words(ValueError("word " * 40)).endswith(" ...")
