"""benchmarks/pretrain_llama.py in a short form: it runs, resumes where it was, and its figures are read back."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import pretrain_llama


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretrain_llama, "OUTPUT", tmp_path)
    monkeypatch.setitem(pretrain_llama.SIZES, "1M", (32, 64, 1, 2))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    monkeypatch.setattr(sys, "argv", ["pretrain_llama"])


def run(tmp_path: Path, *options: str) -> list[dict[str, str]]:
    common = "--size 1M --batch 4 --length 64 --log-every 2 --validate-every 4 --validation-batches 2 --name run"
    sys.argv = ["pretrain_llama", "--data", str(tmp_path / "text.txt"), *common.split(), *options]
    pretrain_llama.main()
    with (tmp_path / "run.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, optimizer",
    [("int8_mixed_precision", "adamw"), ("int8_weights", "adamw"), ("bitnet", "adamw")]
    + [("float", name) for name in pretrain_llama.OPTIMIZERS if name != "adamw"],
)
def test_resumes_where_it_was(recipe: str, optimizer: str, tmp_path: Path) -> None:
    """Losses after an interruption are those of a run without one, random rounding included."""
    checkpoint, chosen = str(tmp_path / "checkpoint.pt"), ("--recipe", recipe, "--optimizer", optimizer)
    whole = run(tmp_path, *chosen, "--steps", "8")
    original = pretrain_llama.learning_rate
    try:
        # The schedule of the longer run, stopped half way.
        pretrain_llama.learning_rate = lambda step, options: original(step, _with_steps(options, 8))
        run(tmp_path, *chosen, "--steps", "4", "--checkpoint", checkpoint)
        resumed = run(tmp_path, *chosen, "--steps", "8", "--checkpoint", checkpoint, "--resume")
    finally:
        pretrain_llama.learning_rate = original
    losses = [[(row["step"], row["train_loss"], row["val_loss"]) for row in rows] for rows in (whole, resumed)]
    assert losses[0] == losses[1]
    assert float(whole[-1]["train_loss"]) < float(whole[0]["train_loss"])


def _with_steps(options: object, steps: int) -> object:
    return type(options)(**{**vars(options), "steps": steps})


@pytest.mark.slow
def test_table_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for recipe in ("float", "switchback"):
        run(tmp_path, "--recipe", recipe, "--steps", "4")
        (tmp_path / "run.csv").rename(tmp_path / f"{recipe}.csv")
    sys.argv = ["pretrain_llama", "--plot", str(tmp_path / "curves.png")]
    pretrain_llama.main()
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    rows = pretrain_llama.table().splitlines()[2:]
    assert {row.split("|")[1].strip() for row in rows} == {"float", "switchback"}


def test_every_training_recipe_can_be_chosen() -> None:
    from qtorch.recipes.base import RECIPES

    chosen = {recipe.name for recipe in pretrain_llama.RECIPES.values() if recipe is not None}
    to_serve = {"qat", "lora_qat", "scheduled_qat", "lsq"}  # for the benefit of inference: tutorials/qat_llama.py
    of_others = {"scheduled_training"}  # runs another of these recipes from some step on
    assert chosen | to_serve | of_others == {
        name for name, recipe in RECIPES.items() if recipe.__module__.startswith("qtorch.training.") and recipe.trains
    }
