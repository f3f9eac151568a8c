"""tutorials/trainable_tensor_subclass.py in its short form: both implementations agree, and both learn."""

from __future__ import annotations

from tutorials import trainable_tensor_subclass


def test_it_runs() -> None:
    said: list[str] = []
    results = trainable_tensor_subclass.main(["--short"], said.append)
    for product, (against_float, by_hand) in results["products"].items():
        assert by_hand > 110, product
        assert against_float > 110 if product == "grad_weight" else 17 < against_float < 30
    for name in ("float", "by hand", "by the spec"):
        first, last, accuracy = results[name]
        assert last < first / 2, name
        assert 60 < accuracy <= 100, name
    assert sum("loss" in line for line in said) >= 3 * 5
