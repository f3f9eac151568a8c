"""tutorials/qat_llama.py in its short form: it runs, and conversion changes no perplexity (it checks that itself)."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tutorials import qat_llama


def test_it_runs() -> None:
    said: list[str] = []
    results = qat_llama.learn(qat_llama.SHORT, said.append)
    assert set(results) == set(qat_llama.SCHEMES)
    for name, found in results.items():
        assert list(found) == ["float", "PTQ", *qat_llama.SCHEMES[name].trains]
        assert len(set(found.values())) == len(found)
        assert all(1 < value < 256 for value in found.values())
    assert sum("recovered" in line for line in said) == sum(len(s.trains) for s in qat_llama.SCHEMES.values())
