"""Calibration in the order of the model, and what it is estimated to need."""

import copy
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import AffineQuantizedTensor, quantize_
from qtorch.calibration import AutoRound, auto, calibrated, gptq, observed
from qtorch.calibration.rounding import FloatTarget, Gptq, Grid
from tests.calibration import test_resume
from tests.calibration.test_resume import bits
from tests.refusals import refuses

INT3 = qtorch.intx_weight_only("int3", group_size=16)
IDS = torch.ones(2, 3, dtype=torch.long)


class Block(nn.Module):
    """Two layers with one input, one behind them, and a residual."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 64), nn.Linear(width, 64)
        self.down = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(test_resume.Model):
    block = Block

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 9, 16, generator=generator) for _ in range(count)]


def inputs_of(model: nn.Module, name: str, data: list[Tensor]) -> list[Tensor]:
    """The inputs of a module, as rows, of each batch."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    for x in data:
        model(x)
    hook.remove()
    return seen


def by_hand(model: Model, data: list[Tensor], target: FloatTarget | None) -> Model:
    """The same, layer by layer, with the whole model run for each of them."""
    floats, model = copy.deepcopy(model), copy.deepcopy(model)
    names = ["front", *(f"blocks.{i}.{n}" for i in range(3) for n in ("gate", "up", "down")), "head"]
    spec = INT3.linear_spec()
    done: dict[str, nn.Parameter] = {}
    for name in names:
        seen = {kind: inputs_of(which, name, data) for kind, which in (("ours", model), ("float", floats))}
        rows = sum(len(part) for part in seen["ours"])
        h = sum(part.t() @ part for part in seen["ours"]) / rows
        g = sum(a.t() @ b for a, b in zip(seen["float"], seen["ours"], strict=True)) / rows
        d = None
        if name.endswith("down"):
            block = name.removesuffix(".down")
            pairs = zip(inputs_of(floats, block, data), inputs_of(model, block, data), strict=True)
            errors = [a - b for a, b in pairs]
            d = sum(a.t() @ b for a, b in zip(errors, seen["ours"], strict=True)) / rows
        weight = floats.get_submodule(name).weight.detach()
        goal = weight if target is None else target.of(weight, h, g, d)
        grid = Grid.of(goal, spec.weight, weight.dtype)
        Gptq().round(goal, h, grid)
        done[name] = nn.Parameter(grid.quantized(spec), False)
        # gate and up have one input, so both are rounded with the statistics from before
        if not name.endswith("gate"):
            for ready, parameter in done.items():
                model.get_submodule(ready).weight = parameter
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "target", [None, FloatTarget(residual=False), FloatTarget()], ids=["gptq", "float target", "residual"]
)
def test_each_weight_meets_the_inputs_of_the_quantized_model(target: FloatTarget | None) -> None:
    model, data = Model(), batches()
    ours, hand = copy.deepcopy(model), by_hand(model, data, target)
    report = quantize_(ours, calibrated(INT3, data, target=target))
    for name, parameter in ours.named_parameters():
        if name.endswith("weight"):
            assert isinstance(parameter, AffineQuantizedTensor)
            assert torch.equal(parameter.dequantize(), hand.get_parameter(name).dequantize()), name
    assert len(report.quantized) == 11
    for layer in report.quantized:
        assert layer.calibration.tokens == 3 * 4 * 9
        assert 0 < layer.calibration.error < layer.calibration.nearest_error


def loss_of(model: nn.Module, reference: nn.Module) -> float:
    x = torch.cat(batches(8, seed=7))
    with torch.no_grad():
        return float((model(x) - reference(x)).square().mean())


@pytest.mark.slow
def test_each_algorithm_brings_the_output_nearer() -> None:
    model, data = Model(), batches(20)
    losses = []
    for recipe in (INT3, gptq(INT3, data), auto(INT3, data)):
        quantized = copy.deepcopy(model)
        quantize_(quantized, recipe)
        losses.append(loss_of(quantized, model))
    assert 0 < losses[2] < losses[1] < losses[0]


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = Model()
    before = dict(model.named_parameters())

    def failing(model: nn.Module, batch: Any) -> Any:
        if batch is data[-1] and isinstance(model.front.weight, AffineQuantizedTensor):
            raise RuntimeError("no more")
        return model(batch)

    data = batches()
    refuses("no more", lambda: quantize_(model, gptq(INT3, data, forward=failing)), RuntimeError)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.training


def test_padding_and_experts() -> None:
    model, data = Model(), batches()
    padded = []
    for x in data:
        mask = torch.cat([torch.ones(4, 9), torch.zeros(4, 5)], 1).long()
        padded.append({"x": torch.cat([x, 100 * torch.randn(4, 5, 16)], 1), "attention_mask": mask})
    codes = []
    for given in (data, padded, [{"x": torch.cat(data)}]):
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, gptq(INT3, given))
        assert {layer.calibration.tokens for layer in report.quantized if layer.calibration} == {3 * 4 * 9}
        codes.append(torch.cat([p.dequantize().flatten() for p in quantized.parameters() if p.dim() == 2]))
    for other in codes[1:]:
        # Sums in another order may move a code over a border.
        assert (codes[0] == other).float().mean() > 0.98
    for observer in ("min_max", "moving_average", "mse"):
        scales = []
        for given in (data, padded):
            quantized = copy.deepcopy(model)
            quantize_(quantized, observed(qtorch.int8_static_activation_int8_weight(), given, observer=observer))
            scales.append(torch.stack([p.act_scale.squeeze() for p in quantized.parameters() if p.dim() == 2]))
        torch.testing.assert_close(scales[0], scales[1], rtol=1e-4, atol=0)
    estimate = quantize_(Experts(), {"weight": gptq(INT3, [torch.randn(8, 32)])}, dry_run=True).estimate
    assert (estimate.statistics_bytes, estimate.blocks, estimate.stream_bytes) == (3 * 4 * 32 * 32, 0, 0)
    report = quantize_(Model(), gptq(INT3, batches()), dry_run=True)
    assert "calibration on 3 batches in 3 blocks: about " in str(report)
    assert report.to_json()["estimate"]["blocks"] == 3
    assert all(row.calibration is None and row.bytes_after < row.bytes_before for row in report.quantized)
    assert quantize_(Model(), INT3, dry_run=True).estimate is None
    refuses("at least one batch", lambda: quantize_(Model(), gptq(INT3, []), dry_run=True))


class Skips(Model):
    """Leaves out blocks, as early exits and experts without tokens do. Flat: without a list that shows its blocks."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.every = tuple(self.blocks)
        if flat:
            del self.blocks
            for index, block in enumerate(self.every):
                self.add_module(f"block{index}", block)

    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Tensor:
        x = self.front(x)
        for index, block in enumerate(self.every):
            x = x if index in skipped else block(x)
        return self.head(x)


@pytest.mark.parametrize(
    "make", [partial(gptq, INT3), partial(auto, INT3), partial(calibrated, INT3, learn=AutoRound(2))]
)
def test_batches_that_do_not_reach_all_blocks(make: Callable[..., Any], tmp_path: Path) -> None:
    data = list(zip(batches(6), [(), (0,), (2,), (0, 1), (0, 1, 2), (1, 2)], strict=True))
    found = []
    for flat in (False, True):
        torch.manual_seed(0)
        model = Skips(flat)
        report = quantize_(model, make(data), resume=None if flat else tmp_path)
        weights = [block.up.weight.dequantize() for block in model.every] + [model.head.weight.dequantize()]
        found.append([[row.calibration.tokens for row in report.quantized], weights])
    assert sorted(found[0][0]) == sorted(found[1][0]) == 9 * [108] + 2 * [216]
    if "AutoRound" not in str(make):
        torch.testing.assert_close(found[0][1], found[1][1])


class Looped(nn.Module):
    """One layer three times, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


@pytest.mark.parametrize(
    "make",
    [partial(gptq, INT3), partial(observed, qtorch.int8_static_activation_int8_weight())],
    ids=["gptq", "observed"],
)
def test_a_looped_and_tied_weight_is_quantized_once_with_all_its_inputs(make: Callable[..., Any]) -> None:
    model = Looped()
    (layer,) = quantize_(model, make([torch.randn(5, 32)])).quantized
    assert layer.also
    assert layer.calibration.tokens == 4 * 5
    assert model.head.weight is model.layer.weight


class Experts(nn.Module):
    """A row to each of `used` experts in turn, as matrices of one parameter; one more gets none."""

    def __init__(self, used: int = 2, inputs: int = 32) -> None:
        super().__init__()
        self.used = used
        self.weight = nn.Parameter(torch.randn(used + 1, 24, inputs))

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 24)
        for expert in range(self.used):
            y[expert :: self.used] = self.product(x[expert :: self.used], expert)
        return y

    def product(self, x: Tensor, expert: int) -> Tensor:
        return nn.functional.linear(x, self.weight[expert])


class ByMatmul(Experts):
    def product(self, x: Tensor, expert: int) -> Tensor:
        return x @ self.weight[expert].t()


class ByGroupedMm(Experts):
    def forward(self, x: Tensor) -> Tensor:
        ends = [len(x) // self.used * (expert + 1) for expert in range(self.used)]
        offsets = torch.tensor([*ends, len(x)], dtype=torch.int32)
        sorted_rows = torch.cat([x[expert :: self.used] for expert in range(self.used)])
        return nn.functional.grouped_mm(sorted_rows, self.weight.transpose(-1, -2), offs=offsets)


@pytest.mark.parametrize("kind", [Experts, ByMatmul, ByGroupedMm])
def test_experts_have_inputs_of_their_own(kind: Callable[[], Experts]) -> None:
    model, x = kind(), torch.randn(80, 32)
    separate = [nn.Linear(32, 24, bias=False) for _ in range(2)]
    for expert, layer in enumerate(separate):
        layer.weight = nn.Parameter(model.weight.detach()[expert].clone())
        quantize_(layer, gptq(INT3, [x[expert::2]]))
    report = quantize_(model, {"weight": gptq(INT3, [x])})
    (layer,) = report.quantized
    assert "1 of 3 experts to nearest" in layer.calibration.method
    for expert, other in enumerate(separate):
        assert torch.equal(model.weight[expert].dequantize(), other.weight.dequantize())
    with pytest.raises(ValueError, match="cannot be calibrated: not used by the data"):
        quantize_(kind(), {"weight": gptq(INT3, [x], strict=True)})


@pytest.mark.parametrize(("call", "words"), [
    (lambda: calibrated(gptq(INT3, []), []), "takes a recipe for inference"),
    (
        lambda: auto(qtorch.int8_dynamic_activation_int8_semi_sparse_weight(), [], learn=AutoRound()),
        "prunes weights, which learn=",
    ),
    (lambda: gptq(INT3), "takes a recipe and batches"),
    (
        lambda: quantize_(Model(1), {"head": gptq(INT3, batches()), "front": gptq(INT3, batches())}),
        "take the same data",
    ),
    (lambda: quantize_(Model(1), gptq(INT3, [])), "at least one batch"),
    (lambda: quantize_(Model(1), gptq(INT3, batches()[0])), r"a list of inputs, got .*float32 \(4, 9, 16\); write \["),
    (lambda: quantize_(Model(1), gptq(INT3, "text")), "a list of inputs, got 'text'"),
    (lambda: quantize_(Model(1), gptq(INT3, [*batches(), torch.ones(1, 0, 16)])), "batch 3 is empty"),
    (
        lambda: quantize_(
            Model(1), gptq(INT3, [{"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 4)}])
        ),
        r"batch 0 has a mask of shape \(2, 4\)",
    ),
    (
        lambda: quantize_(Model(1), gptq(INT3, [{"x": batches()[0], "attention_mask": torch.zeros(4, 9)}])),
        "no token counts",
    ),
])  # fmt: skip
def test_what_cannot_be_calibrated_is_named(call: Callable[[], object], words: str) -> None:
    refuses(words, call)


class Lookup(Model):
    """A model that begins with a table of 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Embedding(8, 32)  # type: ignore[assignment]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_of_the_model_ends_the_calibration_and_names_the_batch() -> None:
    # An IndexError once was taken for the last batch.
    data = [torch.zeros(2, 5, dtype=torch.long), torch.full((3, 5), 8), torch.zeros(2, 5, dtype=torch.long)]
    with pytest.raises(IndexError) as found:
        quantize_(Lookup(), gptq(INT3, data), lambda module, name: isinstance(module, nn.Linear))
    assert "a tensor of int64 (3, 5)" in found.value.__notes__[0]


@pytest.mark.parametrize("bits", ["uint2", "uint3", "uint4"])
def test_few_tokens_never_do_harm(bits: str) -> None:
    recipe = qtorch.uintx_weight_only(bits, group_size=32)

    def inputs(rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        mixed = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, -1.5, 64)
        return torch.randn(rows, 64, generator=generator) @ mixed.t() + 0.1 * torch.randn(rows, 64, generator=generator)

    for tokens, most in [(1, 1.02), (4, 1.0), (16, 0.75), (256, 0.3)]:
        errors = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
            x, wanted = inputs(2048, 100 + seed), model(inputs(2048, 100 + seed))
            error = []
            for asked in (recipe, gptq(recipe, [inputs(tokens, seed)]), auto(recipe, [inputs(tokens, seed)])):
                quantized = copy.deepcopy(model)
                with expected_warning("fewer tokens than they have inputs", asked is not recipe and tokens < 128):
                    quantize_(quantized, asked)
                error.append(float((quantized(x) - wanted).square().sum()))
            errors.append(error)
        nearest, by_gptq, by_auto = torch.tensor(errors).sum(0).tolist()
        assert by_auto < most * nearest, (tokens, by_auto / nearest)
        assert by_auto < by_gptq, (tokens, by_auto / by_gptq)


def expected_warning(words: str, expected: bool) -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match=words) if expected else nullcontext()


def test_memory_and_time_are_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Model(), batches(3)
    before = bits(model)
    estimate = quantize_(model, gptq(INT3, data), dry_run=True).estimate
    assert (estimate.batches, estimate.blocks) == (3, 3)
    # `down` has 64 inputs; gate and up share one moment. `down` is (32, 64).
    assert (estimate.statistics_bytes, estimate.work_bytes) == (4 * 64 * 64, 4 * (2 * 64 * 64 + 5 * 32 * 64))
    assert estimate.stream_bytes == 3 * 3 * (4 * 9 * 32 * 4)
    assert estimate.peak_bytes == estimate.statistics_bytes + estimate.work_bytes + estimate.stream_bytes
    of_both = quantize_(model, auto(INT3, data), dry_run=True).estimate
    assert of_both.statistics_bytes == 2 * estimate.statistics_bytes
    assert of_both.stream_bytes == 2 * estimate.stream_bytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())
    assert model.training
    # By a clock of which each reading is a second later.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    model, data = Model(), batches(3)
    found = quantize_(model, gptq(INT3, data), dry_run=True).estimate

    def rounding(rows: int, columns: int) -> int:
        return 4 * rows * columns**2 + 2 * columns**3

    # `calibrate` reads the clock twice itself, so that the sample, `down`, took three seconds.
    matrices = [(32, 16), *[(64, 32), (64, 32), (32, 64)] * 3, (16, 32)]
    of_rounding = 3 * sum(rounding(*shape) for shape in matrices) / rounding(32, 64)
    of_statistics = 3 * sum(columns**2 for columns in (16, *(32, 64) * 3, 32)) / 64**2
    assert found.seconds == pytest.approx(3 + of_rounding + of_statistics)
