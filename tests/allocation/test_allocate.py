"""allocate as a whole: what it returns goes into quantize_, composes with calibration, is saved, and is better."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor, int4_weight_only, int8_weight_only, intx_weight_only, quantize_
from qtorch.calibration import allocate, auto, gptq
from qtorch.calibration.allocation import Allocation
from qtorch.calibration.allocation import allocation as allocation_file
from qtorch.calibration.data import Data
from tests.refusals import refuses

INT = {bits: intx_weight_only(f"int{bits}", 16) for bits in (2, 3, 4)}
CANDIDATES = list(INT.values())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next of 24 tokens."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 24, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def table() -> Tensor:
    """The distribution of the next token after each."""
    return (3 * torch.randn(24, 24, generator=torch.Generator().manual_seed(5))).softmax(-1)


def batch(seed: int, rows: int = 8, length: int = 25) -> Tensor:
    """Sequences of a Markov chain."""
    generator, chances = torch.Generator().manual_seed(seed), table()
    ids = [torch.randint(24, (rows,), generator=generator)]
    while len(ids) < length:
        ids.append(torch.multinomial(chances[ids[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(ids, 1)


@pytest.fixture(scope="module")
def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(70):
        ids = batch(step)
        loss = nn.functional.cross_entropy(model(ids[:, :-1])["logits"].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return [batch(1000 + seed) for seed in range(5)]


@torch.no_grad()
def divergence(model: Model, recipes: Any) -> tuple[float, int]:
    """KL to the float model on other sequences, and the bytes of the quantized weights."""
    quantized = copy.deepcopy(model)
    report = quantize_(quantized, recipes)
    ids = torch.cat([batch(2000 + seed) for seed in range(5)])
    p, q = (each(ids)["logits"].log_softmax(-1) for each in (model, quantized))
    return float((p.exp() * (p - q)).sum(-1).mean()), report.bytes_after


def first_and_last_at_4(model: Model, middle: int) -> dict[str, Any]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ends = [name for name in names if name.startswith(("blocks.0.", "blocks.2.")) or name == "head"]
    return {name: INT[4 if name in ends else middle] for name in names}


def test_it_is_better_than_uniform_and_its_scores_add_up_to_the_divergence(trained: Model, data: list[Tensor]) -> None:
    uniform, size = divergence(trained, INT[3])
    allocation = allocate(trained, CANDIDATES, size, data)
    found, bytes_after = divergence(trained, allocation)
    assert bytes_after == allocation.nbytes <= size
    assert 0 < found < 0.8 * uniform
    for middle in (2, 3):
        ends, size = divergence(trained, first_and_last_at_4(trained, middle))
        found, bytes_after = divergence(trained, allocate(trained, CANDIDATES, size, data))
        assert bytes_after <= size
        assert 0 < found < ends
    for bits in (3, 4):
        allocation = allocate(trained, [INT[bits]], "9 bits", data)
        measured, _ = divergence(trained, allocation)
        assert 0.4 * measured < allocation.score < 2.5 * measured
        assert allocation.measure == "divergence of a row of outputs"


def test_runs_are_equal_and_swaps_bring_the_model_nearer(trained: Model, data: list[Tensor]) -> None:
    before = dict(trained.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    first, second = (allocate(trained, CANDIDATES, "4 bits", iter(data), refine=4) for _ in range(2))
    assert dict(first) == dict(second)
    assert first.rows == second.rows
    after = dict(trained.named_parameters())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in after.values())
    held_out = [batch(3000 + seed) for seed in range(2)]
    plain = allocate(trained, CANDIDATES, "4.6 bits", data, gradients=False)
    refined = allocate(trained, CANDIDATES, "4.6 bits", data, gradients=False, refine=12, held_out=held_out)
    assert refined.nbytes <= refined.limit
    assert 0 < refined.swaps["kept"] <= refined.swaps["tried"] <= 12
    assert refined.swaps["after"] < refined.swaps["before"]
    quantized = [copy.deepcopy(trained) for _ in range(2)]
    measured = []
    for model, allocation in zip(quantized, (plain, refined)):
        quantize_(model, allocation)
        with torch.no_grad():
            p, q = (torch.cat([each(x)["logits"] for x in held_out]).log_softmax(-1) for each in (trained, model))
        measured.append(float((p.exp() * (p - q)).sum(-1).mean()))
    assert measured == pytest.approx([refined.swaps["before"], refined.swaps["after"]], rel=1e-3)
    assert "swaps kept" in str(refined)


def test_errors_and_what_it_returns(trained: Model, data: list[Tensor]) -> None:
    before = dict(trained.named_parameters())
    calls: list[Tensor] = []
    stop = 0

    def failing(model: nn.Module, ids: Tensor) -> Any:
        calls.append(ids)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return model(ids)

    for stop in (0, 3, 12, 25):  # noqa: B007
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            allocate(trained, CANDIDATES, "4 bits", data, forward=failing, refine=50)
        assert all(parameter is before[name] for name, parameter in trained.named_parameters())
        assert all(parameter.requires_grad for parameter in trained.parameters())
    allocation = allocate(trained, [*CANDIDATES, None], "5 bits", Data(data))
    names = [name for name, module in trained.named_modules() if isinstance(module, nn.Linear)]
    assert list(allocation) == names
    assert all(recipe is None or recipe in CANDIDATES for recipe in allocation.values())
    assert allocation["head"] == dict(allocation)["head"]
    assert len(allocation) == 7
    assert "missing" not in allocation
    assert "head" in str(allocation)
    assert allocation.bits <= 5
    costs, scores = zip(*allocation.curve)
    assert list(costs) == sorted(costs)
    assert list(scores) == sorted(scores, reverse=True)
    best = min(score for cost, score in allocation.curve if cost <= allocation.limit)
    assert allocation.score == pytest.approx(best, rel=1e-9)
    assert scores[-1] == 0
    assert set(allocation.uniform) == {str(recipe) for recipe in CANDIDATES} | {"floating point"}


@pytest.mark.slow
def test_it_composes_with_calibration(trained: Model, data: list[Tensor]) -> None:
    allocation = allocate(trained, CANDIDATES, "4 bits", data)
    plain, size = divergence(trained, allocation)
    for wrap in (gptq, auto):
        calibrated = allocation.map(lambda recipe, wrap=wrap: wrap(recipe, data))
        found, bytes_after = divergence(trained, calibrated)
        assert bytes_after == size
        assert 0 < found < plain
    scored = allocate(trained, CANDIDATES, "4 bits", data, rounding=gptq())
    assert scored.score < allocation.score


def test_tied_weights_and_files(trained: Model, data: list[Tensor], tmp_path: Any) -> None:
    model = Model(1)
    model.head.weight = model.embed.weight
    names = {r".*head": [INT[4], INT[3]], r".*\.up": CANDIDATES, ".*": None}
    allocation = allocate(model, names, "5.2 bits", [torch.randint(24, (4, 8))])
    assert list(allocation) == ["head", "blocks.0.up"]
    assert allocation.rows[0].also == ("embed.weight",)
    report = quantize_(model, allocation)
    assert report.bytes_after == allocation.nbytes
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, AffineQuantizedTensor)
    allocation = allocate(trained, [*CANDIDATES, None], "4 bits", data, refine=2)
    folder = allocation.save(tmp_path / "a" / "b", png=False)
    assert sorted(path.name for path in folder.iterdir()) == ["allocation.json"]
    for loaded in (Allocation.load(folder), Allocation.load(folder / "allocation.json")):
        assert dict(loaded) == dict(allocation)
        assert (loaded.rows, loaded.curve) == (allocation.rows, allocation.curve)
        assert str(loaded) == str(allocation)
    mapped = allocation.map(lambda recipe: auto(recipe, data)).save(tmp_path / "mapped", png=False)
    refuses(r"the recipe of .* cannot be read; save the allocation before \.map", lambda: Allocation.load(mapped))
    refuses("not the data of an allocation", lambda: Allocation.from_json(json.loads("{}")))
    with pytest.raises(FileNotFoundError):
        Allocation.load(tmp_path / "nowhere")


def test_candidates_and_weights_that_are_left_out_are_said() -> None:
    model = nn.Sequential(nn.Linear(48, 8), nn.Linear(8, 64))
    recipes = [int4_weight_only(32), int8_weight_only()]
    allocation = allocate(model, recipes, "13 bits")
    assert set(allocation.values()) == {int8_weight_only()}
    text = str(allocation)
    assert "0: int4_weight_only(group_size=32) does not fit: block_size (1, 32) does not divide" in text
    assert not allocation.uniform.get(str(recipes[0]))
    with pytest.raises(ValueError, match=r"no candidate fits some weights; add None .*: 0: int4_weight_only"):
        allocate(model, recipes[:1], "13 bits")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model, data = Two(), [torch.randn(4, 16)]
    allocation = allocate(model, CANDIDATES, "5 bits", data)
    assert allocation["b"] == INT[2]
    assert "b: the outputs that were looked at do not depend on it; forward= or loss=" in str(allocation)
    both = allocate(model, CANDIDATES, "5 bits", data, forward=lambda model, x: torch.cat(model(x), -1))
    assert "do not depend" not in str(both)
    assert both.score > allocation.score


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"candidates": int8_weight_only()}, TypeError, r"candidates is a list of recipes, got .*\[int8_weight_only\(\)\]"),
    ({"candidates": [int8_weight_only]}, TypeError, "a candidate is a recipe for inference"),
    ({"candidates": []}, ValueError, "there is no candidate"),
    ({"candidates": [gptq(INT[4], [])]}, ValueError, r"takes no data of its own.*allocation\.map\(lambda recipe"),
    ({"candidates": {"nothing": CANDIDATES}}, ValueError, "matches no linear layer"),
    ({"filter_fn": lambda module, name: False}, ValueError, "for no weight of the model"),
    ({"data": []}, ValueError, "at least one batch"),
    ({"data": None, "refine": 1}, ValueError, "refine is measured on data; give data="),
    ({"data": [batch(0)], "refine": 1}, ValueError, "give held_out=, or data of two"),
    ({"loss": "logit"}, ValueError, 'loss is "logits" or a function'),
    ({"forward": lambda model, ids: {"ids": ids}}, TypeError, "holds no tensor in floating point"),
    ({"model": {}}, TypeError, "allocate: takes a model"),
])  # fmt: skip
def test_errors(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        allocate(**{"model": Model(1), "candidates": CANDIDATES, "budget": "8 bits", "data": [batch(0)]} | given)


def test_without_matplotlib(trained: Model, data: list[Tensor], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(allocation_file, "has_matplotlib", lambda: False)
        allocation = allocate(nn.Sequential(nn.Linear(32, 32)), CANDIDATES, "4 bits")
        folder = allocation.save(tmp_path / "plain")
        assert sorted(path.name for path in folder.iterdir()) == ["allocation.json"]
        with pytest.raises(ImportError, match="png=True takes matplotlib: pip install matplotlib"):
            allocation.save(tmp_path / "never", png=True)
        assert not (tmp_path / "never").exists()
    pytest.importorskip("matplotlib")
    folder = allocate(trained, [*CANDIDATES, None], "4 bits", data).save(tmp_path / "drawn")
    assert sorted(path.name for path in folder.iterdir()) == ["allocation.json", "curve.png"]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    # Everything in floating point has no error to draw.
    allocate(nn.Sequential(nn.Linear(32, 32)), [None], "32 bits").save(tmp_path, png=True)
