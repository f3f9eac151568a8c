"""A calibration that is interrupted continues after the last block that is done, and gives the same bits."""

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch.calibration import Nearest, auto, calibrated, gptq
from qtorch.calibration.engine import progress as progress_of
from qtorch.checkpoint import save_load
from qtorch.dtypes import QuantizedTensor
from tests.fast_part import slow_but

INT3 = qtorch.intx_weight_only("int3", group_size=16)


class Block(nn.Module):
    """Returns a structure, as blocks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor, scale: float) -> Any:
        return x + scale * self.down(functional.silu(self.up(x))), None, {"x": x.t(), "name": "block", "scale": scale}


class Model(nn.Module):
    """A layer in front, blocks, and a head that is tied to nothing."""

    block: type[nn.Module] = Block

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.front = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.front(x), 1.0
        for block in self.blocks:
            x, _, rest = block(x, scale)
            x, scale = x + rest["x"].t(), rest["scale"] * 0.5
        return self.head(x)


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batches(count: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(21, 16, generator=generator) for _ in range(count)]


def bits(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        inner = parameter.inner_tensors if isinstance(parameter, QuantizedTensor) else {"": parameter.detach()}
        found |= {f"{name} {part}": tensor for part, tensor in inner.items()}
    return found


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class Dies(Exception):
    pass


@pytest.mark.parametrize("make", slow_but([gptq], [gptq, auto]))
def test_an_interrupted_calibration_gives_the_same_bits(make: Any, tmp_path: Path) -> None:
    data = batches()
    calls = 0

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == dies_at:
            raise Dies
        return model(batch)

    recipe = make(INT3, data, forward=counted)
    dies_at = -1
    plain, whole = made(), made()
    qtorch.quantize_(plain, recipe)
    calls = 0
    qtorch.quantize_(whole, recipe, resume=tmp_path / "whole")
    assert_same(bits(whole), bits(plain))
    total, chance, died = calls, random.Random(0), 0
    for attempt in range(2 if make is auto else 4):
        while True:
            model = made()
            before = bits(model)
            calls, dies_at = 0, chance.randrange(1, 1 + total // 2)
            try:
                report = qtorch.quantize_(model, recipe, resume=tmp_path / f"{attempt}")
            except Dies:
                died += 1
                assert_same(bits(model), before)
                continue
            break
        assert_same(bits(model), bits(plain))
        assert all(row.calibration is not None and row.calibration.tokens == 84 for row in report.quantized)
    assert died >= (2 if make is auto else 5)
    # What is finished is not calibrated again: one run finds the order of the weights, and one for each block what it
    # depends on.
    calls, dies_at, model = 0, -1, made()
    qtorch.quantize_(model, recipe, resume=tmp_path / "0")
    assert calls <= 1 + 2 * 3
    assert_same(bits(model), bits(plain))
    assert {path.name for path in (tmp_path / "0").iterdir()} == {
        "lock",
        "journal.json",
        *(f"unit-0000{i}.safetensors" for i in range(5)),
    }


@pytest.mark.parametrize("step", slow_but([11], [11, 1]))
def test_it_may_die_at_any_file_operation(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each journal, each file of weights and each file of outputs."""
    recipe = calibrated(INT3, batches(1), rounding=Nearest())
    plain = made()
    qtorch.quantize_(plain, recipe)
    count, dies_at = 0, -1

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == dies_at:
                raise Dies
            result = function(*args, **kwargs)
            count += 1
            if count == dies_at:
                raise Dies
            return result

        return call

    monkeypatch.setattr(progress_of, "write_journal", watched(progress_of.write_journal))
    monkeypatch.setattr(save_load, "save_quantized", watched(save_load.save_quantized))
    monkeypatch.setattr(progress_of.OnDisk, "write", watched(progress_of.OnDisk.write))
    monkeypatch.setattr(progress_of.OnDisk, "drop", watched(progress_of.OnDisk.drop))
    qtorch.quantize_(made(), recipe, resume=tmp_path / "whole")
    total = count
    assert total > 40
    for dies_at in range(1, total + 1, step):
        count, model = 0, made()
        with pytest.raises(Dies):
            qtorch.quantize_(model, recipe, resume=tmp_path / f"{dies_at}")
        count = total
        qtorch.quantize_(model, recipe, resume=tmp_path / f"{dies_at}")
        assert_same(bits(model), bits(plain))


def test_what_is_kept_and_refused(tmp_path: Path) -> None:
    folder, data = tmp_path / "kept", batches()
    qtorch.quantize_(made(), gptq(INT3, data), resume=folder)
    for model, recipe, part in (
        (made(1), gptq(INT3, data), "weights"),
        (made(), gptq(INT3, batches(seed=1)), "data"),
        (made(), gptq(INT3, data[:2]), "data"),
        (made(), gptq(INT3, data, damping=0.1), "recipe"),
        (made(), gptq(INT3, data, forward=lambda model, batch: model(2 * batch)), "data"),
    ):
        before = bits(model)
        with pytest.raises(ValueError, match=f"differs in its {part};"):
            qtorch.quantize_(model, recipe, resume=folder)
        assert_same(bits(model), before)
    qtorch.quantize_(made(), gptq(INT3, copy.deepcopy(data)), resume=folder)
    data = batches()
    with pytest.raises(ValueError, match="resume= is for recipes that calibrate"):
        qtorch.quantize_(made(), INT3, resume=tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        qtorch.quantize_(made(), gptq(INT3, data), resume=tmp_path / "nowhere" / "kept")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.txt\)"):
        qtorch.quantize_(made(), gptq(INT3, data), resume=tmp_path / "others")
    with pytest.raises(ValueError, match="a batch holds a object"):
        qtorch.quantize_(made(), gptq(INT3, [object()], forward=lambda m, _: m(data[0])), resume=tmp_path / "new")

    class Odd(Block):
        def forward(self, x: Tensor, scale: float) -> Any:
            return (*super().forward(x, scale)[:2], {"x": x.t(), "scale": scale, "what": object()})

    model = made()
    model.blocks = nn.ModuleList(Odd() for _ in range(2))
    with pytest.raises(ValueError, match="a block returns a object, which cannot be kept on disk"):
        qtorch.quantize_(model, gptq(INT3, data), resume=tmp_path / "new")
