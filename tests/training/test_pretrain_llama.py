"""benchmarks/pretrain_llama.py in a short form: it runs, resumes where it was, alone and under torchrun, and its
figures are read back."""

import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import pretrain_llama
from qtorch.recipes.base import RECIPES
from tests.distributed.processes import torchrun

OPTIONS = "--size 100k --length 64 --log-every 2 --validate-every 4 --validation-batches 2 --name run"


def run(folder: Path, *options: str, ranks: int = 1) -> list[tuple[str, float, float]]:
    """(step, loss in training, in validation) of each row of its table."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    command = ["--data", str(folder / "text.txt"), "--output", str(folder), "--batch", str(4 // ranks)]
    command += [*OPTIONS.split(), *options]
    if ranks == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["pretrain_llama", *command])
            pretrain_llama.main()
    else:
        torchrun("-m", "benchmarks.pretrain_llama", *command, ranks=ranks)
    with (folder / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["tokens"] for row in rows] == [str(256 * int(row["step"])) for row in rows]
    return [(row["step"], float(row["train_loss"]), float(row["val_loss"] or "nan")) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, optimizer",
    [("int8_mixed_precision", "adamw"), ("int8_weights", "adamw"), ("bitnet", "adamw")]
    + [("float", name) for name in pretrain_llama.OPTIMIZERS if name != "adamw"],
)
def test_resumes_where_it_was(recipe: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses after an interruption are those of a run without one, random rounding included."""
    checkpoint, chosen = str(tmp_path / "checkpoint.pt"), ("--recipe", recipe, "--optimizer", optimizer)
    whole = run(tmp_path, *chosen, "--steps", "8")
    with monkeypatch.context() as patch:
        # The schedule of the longer run, stopped half way.
        original = pretrain_llama.learning_rate
        patch.setattr(pretrain_llama, "learning_rate", lambda step, options: original(step, _of_8_steps(options)))
        run(tmp_path, *chosen, "--steps", "4", "--checkpoint", checkpoint)
    resumed = run(tmp_path, *chosen, "--steps", "8", "--checkpoint", checkpoint, "--resume")
    assert str(whole) == str(resumed)
    assert whole[-1][1] < whole[0][1]


def _of_8_steps(options: object) -> object:
    return type(options)(**{**vars(options), "steps": 8})


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    checkpoint = ("--recipe", "int8_mixed_precision", "--checkpoint", str(tmp_path / "checkpoint"))
    one = run(tmp_path, *checkpoint[:2], "--steps", "8")
    two = run(tmp_path, *checkpoint, "--steps", "8", ranks=2)
    assert [row[0] for row in one] == [row[0] for row in two] == ["2", "4", "6", "8"]
    for a, b in zip(one, two, strict=True):
        # Sums of gradients have another order, and codes of activations at ties may differ.
        assert b[1:] == pytest.approx(a[1:], rel=1e-3, nan_ok=True)
    assert two[-1][1] < two[0][1]
    resumed = run(tmp_path, *checkpoint, "--resume", "--steps", "10")
    assert str(resumed[:4]) == str(two)
    assert resumed[4][1] < two[2][1]


@pytest.mark.slow
def test_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pretrain_llama, "OUTPUT", tmp_path)
    for recipe in ("float", "switchback"):
        run(tmp_path, "--recipe", recipe, "--steps", "4")
        (tmp_path / "run.csv").rename(tmp_path / f"{recipe}.csv")
    monkeypatch.setattr(sys, "argv", ["pretrain_llama", "--plot", str(tmp_path / "curves.png")])
    pretrain_llama.main()
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    rows = pretrain_llama.table().splitlines()[2:]
    assert {row.split("|")[1].strip() for row in rows} == {"float", "switchback"}


def test_every_training_recipe_can_be_chosen() -> None:
    chosen = {recipe.name for recipe in pretrain_llama.RECIPES.values() if recipe is not None}
    to_serve = {"qat", "lora_qat", "scheduled_qat", "lsq"}  # for the benefit of inference: tutorials/qat_llama.py
    of_others = {"scheduled_training"}  # runs another of these recipes from some step on
    assert chosen | to_serve | of_others == {
        name for name, recipe in RECIPES.items() if recipe.__module__.startswith("qtorch.training.") and recipe.trains
    }
