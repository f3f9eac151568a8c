"""tutorials/grpo_rollouts.py in its short form."""

import pytest

pytest.importorskip("transformers")


def test_log_probabilities_are_equal_in_every_step() -> None:
    from tutorials import grpo_rollouts

    rows = grpo_rollouts.main(["--short"])
    assert [difference for _, difference in rows] == [0.0] * 3
    assert all(0 < reward <= 1 for reward, _ in rows)
