"""tutorials/low_bit_optimizers.py in its short form: losses near torch's, a part of its memory, and an exact resume."""

from __future__ import annotations

from tutorials import low_bit_optimizers


def test_it_runs() -> None:
    said: list[str] = []
    results = low_bit_optimizers.main(["--short"], said.append)
    loss, size = results.pop("torch AdamW")
    assert 7.9 < size < 8.1
    resumed = results.pop("resumed")
    sizes = {name: of_one[1] for name, of_one in results.items()}
    assert sizes["AdamW4bit"] < 1.2 < 2.0 < sizes["AdamW8bit"] < 2.2
    assert sizes["AdamW4bit"] < sizes["AdamW4bit, embedding in fp32"] < sizes["AdamW8bit"]
    assert all(abs(of_one[0] / loss - 1) < 0.05 for of_one in results.values())
    assert all(of_one[0] != loss for of_one in results.values())
    assert len(said) == 7
    # The last steps of the resumed run are those of the whole one.
    model, optimizer, schedule = low_bit_optimizers.start(low_bit_optimizers.OPTIMIZERS["AdamW8bit"], 12)
    low_bit_optimizers.train(model, optimizer, schedule, range(6))
    assert low_bit_optimizers.train(model, optimizer, schedule, range(6, 12))[0] == resumed[0]
