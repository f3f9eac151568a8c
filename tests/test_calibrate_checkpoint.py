"""quantize_checkpoint with a recipe that calibrates gives what `quantize_` gives, with one block in memory."""

import copy
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import qtorch
from qtorch import load_quantized, quantize_, quantize_checkpoint
from qtorch.calibration import AutoRound, auto, gptq
from qtorch.calibration.engine.float_weights import Streamed
from qtorch.checkpoint import hf_folder
from qtorch.checkpoint.streaming.assignment import parameters_on_meta
from tests import fast_part, float_checkpoints
from tests.calibration.test_resume import INT3, Model, assert_same, batches, bits, made
from tests.refusals import refuses

INT4 = qtorch.int4_weight_only(group_size=32)


def saved(model: torch.nn.Module, folder: Path) -> Path:
    return float_checkpoints.save_shards(dict(model.state_dict()), folder, 2)


def on_meta() -> Model:
    with parameters_on_meta():
        return Model()


@pytest.mark.parametrize("make", fast_part.slow_but([gptq], [gptq, auto, partial(auto, learn=AutoRound(5))]))
def test_the_same_bits_as_quantize_(make: Any, tmp_path: Path) -> None:
    data = batches()
    source, model = saved(made(), tmp_path / "float"), on_meta()
    before = dict(model.named_parameters())
    report = quantize_checkpoint(source, tmp_path / "q.safetensors", make(INT3, data), model=model)
    wanted = made()
    rows = {row.name: row for row in quantize_(wanted, make(INT3, data)).quantized}
    assert_same(bits(load_quantized(made(1), tmp_path / "q.safetensors")), bits(wanted))
    assert {row.name for row in report.quantized} == rows.keys()
    for row in report.quantized:
        theirs = rows[row.name].calibration
        assert (row.calibration.tokens, row.calibration.error) == (theirs.tokens, theirs.error)
        assert row.sqnr == rows[row.name].sqnr
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not list(tmp_path.glob(".q*"))


def test_warnings_and_dry_runs(tmp_path: Path) -> None:
    source, model = saved(made(), tmp_path / "float"), on_meta()
    few = [batches()[0][:4]]
    with pytest.warns(UserWarning, match=r"quantize_: \d+ of \d+ weights were calibrated on fewer tokens"):
        quantize_(made(), gptq(INT3, few))
    with pytest.warns(UserWarning, match=r"quantize_checkpoint: \d+ of \d+ weights were calibrated on fewer tokens"):
        quantize_checkpoint(source, tmp_path / "q.safetensors", gptq(INT3, few), model=model)
    before = sorted(tmp_path.iterdir())
    recipe = gptq(INT3, batches())
    model = on_meta()
    report = quantize_checkpoint(source, tmp_path / "dry.safetensors", recipe, dry_run=True, model=model)
    assert report.dry_run
    assert len(report.quantized) == 8
    assert sorted(tmp_path.iterdir()) == before
    assert all(parameter.is_meta for parameter in model.parameters())
    wanted = quantize_(made(), recipe, dry_run=True).estimate
    assert replace(report.estimate, seconds=0) == replace(wanted, seconds=0)
    assert report.estimate.seconds > 0
    refuses("give model=", lambda: quantize_checkpoint(source, tmp_path / "dry.safetensors", recipe, dry_run=True))


def test_one_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float weights, one block and what is outside of blocks."""
    blocks = 5
    source = saved(Model(blocks), tmp_path / "float")
    with parameters_on_meta():
        model = Model(blocks)
    peaks: list[int] = []
    load = Streamed._load

    def watched(self: Streamed, parameter: torch.nn.Parameter) -> None:
        load(self, parameter)
        peaks.append(sum(p.untyped_storage().nbytes() for p in self.parameters.values()))

    monkeypatch.setattr(Streamed, "_load", watched)
    quantize_checkpoint(source, tmp_path / "q.safetensors", gptq(INT3, batches(2)), model=model)
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    outside = sum(size for name, size in sizes.items() if not name.startswith("blocks"))
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0"))
    few = 4 * len(sizes)  # what is not loaded takes an element each
    assert outside + block <= max(peaks) <= outside + block + few


@pytest.mark.slow
def test_it_may_die_at_any_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = gptq(INT3, batches(1))
    source = saved(made(), tmp_path / "float")
    reads, dies_at = 0, -1
    read = hf_folder.FolderSource.tensor

    def counted(self: Any, name: str) -> torch.Tensor:
        nonlocal reads
        reads += 1
        if reads == dies_at:
            raise ZeroDivisionError
        return read(self, name)

    monkeypatch.setattr(hf_folder.FolderSource, "tensor", counted)
    (tmp_path / "whole").mkdir()
    quantize_checkpoint(source, tmp_path / "whole" / "q.safetensors", recipe, model=on_meta())
    total, chance, died = reads, random.Random(0), 0
    assert total > 40
    wanted = (tmp_path / "whole" / "q.safetensors").read_bytes()
    for attempt in range(3):
        folder = tmp_path / f"{attempt}"
        folder.mkdir()
        while not (folder / "q.safetensors").exists():
            reads, dies_at = 0, chance.randrange(1, total)
            try:
                quantize_checkpoint(source, folder / "q.safetensors", recipe, model=on_meta())
            except ZeroDivisionError:
                died += 1
        assert (folder / "q.safetensors").read_bytes() == wanted
        assert [path.name for path in folder.iterdir()] == ["q.safetensors"]
    assert died >= 5
    # Other data: begun anew.
    reads, dies_at = 0, total * 2 // 3
    target = tmp_path / "r.safetensors"
    with pytest.raises(ZeroDivisionError):
        quantize_checkpoint(source, target, gptq(INT3, batches(1, seed=3)), model=on_meta())
    assert (tmp_path / ".r.safetensors.calibration").exists()
    quantize_checkpoint(source, target, recipe, model=on_meta())
    assert target.read_bytes() == wanted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    from tests.cli.tiny import save_llama
    from tests.integrations.transformers.tiny_models import build

    root = tmp_path_factory.mktemp("models")
    build("mixtral").to(torch.bfloat16).save_pretrained(root / "mixtral")
    return {"llama": save_llama(root / "llama"), "mixtral": root / "mixtral"}


def tokens() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 60, (2, 16), generator=generator)} for _ in range(3)]


@pytest.mark.parametrize("format", fast_part.slow_but(["transformers"], ["transformers", "compressed-tensors"]))
@pytest.mark.parametrize("name", fast_part.slow_but(["mixtral"], ["llama", "mixtral"]))
def test_folders_of_transformers(name: str, format: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The experts of Mixtral are one parameter in the model, and a matrix each in the folder."""
    from transformers import AutoModelForCausalLM

    data = tokens()
    recipe = gptq(INT4, data)
    report = quantize_checkpoint(folders[name], tmp_path / "q", recipe, format=format)
    assert all(row.calibration is not None for row in report.quantized)
    assert all(row.calibration.tokens for row in report.quantized if row.calibration)
    wanted = AutoModelForCausalLM.from_pretrained(folders[name])
    asked = {"lm_head": None, r".*\.experts\.(gate_up_proj|down_proj)": recipe, r".*": recipe}
    if name == "llama":
        asked = {"lm_head": None, r".*": recipe}
    if format == "compressed-tensors":
        asked = dict(qtorch.recipes_for_vllm(wanted, asked))
    quantize_(wanted, asked)
    loaded = load_quantized(copy.deepcopy(wanted), tmp_path / "q")
    assert_same(bits(loaded), bits(wanted))
    assert sum(isinstance(p, qtorch.dtypes.QuantizedTensor) for p in loaded.parameters()) > 5


@pytest.mark.parametrize(("blocks", "words"), [
    (None, "transformers cannot build the model; give model="),
    (2, r"the model has no parameter blocks\.2"),
    (4, r"blocks\.3.* on the meta device"),
])  # fmt: skip
def test_what_is_refused(blocks: int | None, words: str, tmp_path: Path) -> None:
    source, model = saved(made(), tmp_path / "float"), None
    if blocks is not None:
        with parameters_on_meta():
            model = Model(blocks)
    refuses(words, lambda: quantize_checkpoint(source, tmp_path / "q.safetensors", gptq(INT3, batches()), model=model))
    assert not (tmp_path / "q.safetensors").exists()
