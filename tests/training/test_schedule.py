"""Schedules, of the engine and of QAT: steps, static and observed ranges, freezing, saving, conversion."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import qtorch
from qtorch import PerTensor, compute_error, int8_dynamic_activation_int8_weight, quantize_, training
from qtorch.calibration import delayed_scaling, moving_average, percentile, weighted_stats
from qtorch.training import GemmSpec, QuantizationSchedule, TrainingSpec, convert, integer, lsq, qat, scheduled_qat
from qtorch.training.quantization_aware.schedule import OPERANDS
from tests.refusals import refuses
from tests.training.small_model import fit, mlp

PER_TENSOR = training.fully_quantized(8, 8, PerTensor())


def model_of(recipe: Any, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 8))
    quantize_(model, recipe)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        functional.mse_loss(model(torch.randn(64, 16, generator=generator)), torch.zeros(64, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_floating_point_until_the_start() -> None:
    schedule = QuantizationSchedule(start_step=2)
    model, x = model_of(training.scheduled_training(schedule=schedule)), torch.randn(64, 16)
    optimizer = sgd(model)
    training.advance_with(optimizer, model)
    kernels = []
    for _ in range(4):
        wanted = functional.linear(model[0].weight.detach() @ torch.eye(16), torch.eye(16))
        with qtorch.kernels.record_kernels() as seen:
            y = model[0](x)
        kernels.append(len(seen))
        same = torch.equal(y, functional.linear(x, wanted, model[0].bias))
        assert same is (len(kernels) <= 2)
        y.sum().backward()
        optimizer.step()
    assert kernels[:2] == [0, 0]
    assert min(kernels[2:]) > 0
    assert model[0].contraction_state.step == 4
    model.eval()
    model[0].contraction_state.steps = 0
    assert not torch.equal(model[0](x), functional.linear(x, model[0].weight, model[0].bias)), "quantized in eval mode"


def test_passes_and_accumulation() -> None:
    model = model_of(training.scheduled_training(schedule=QuantizationSchedule(start_step=3)))
    for _ in range(5):
        model(torch.randn(4, 16))
    model.eval()(torch.randn(4, 16))
    assert model[0].contraction_state.step == 5
    optimizer = sgd(model)
    handle = training.advance_with(optimizer, model)
    model.train()(torch.randn(4, 16))
    assert model[0].contraction_state.step == 5
    optimizer.step()
    assert model[0].contraction_state.step == 6
    handle.remove()
    optimizer.step()
    assert model[0].contraction_state.step == 6
    # Two passes for each step count once.
    model = model_of(training.scheduled_training(schedule=QuantizationSchedule(start_step=1)))
    optimizer = sgd(model)
    training.advance_with(optimizer, model)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert model[0].contraction_state.step == 1


WITH_RANGES = (
    training.scheduled_training(PER_TENSOR, QuantizationSchedule(1, 3, static=OPERANDS, ema_updates=2)),
    qat(qtorch.int8_static_activation_int8_weight(), start_step=1, freeze_step=3, observer=moving_average(0.1)),
)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [*WITH_RANGES, lsq(4, 8)], ids=lambda recipe: recipe.name)
def test_activations_that_are_computed_again(recipe: Any, reentrant: bool) -> None:
    """They have the ranges and the step of their forward, and leave both as they are."""
    model = model_of(recipe)
    other = copy.deepcopy(model)
    for _ in range(5):
        x = torch.randn(64, 16, requires_grad=True)
        model(x).square().mean().backward()
        checkpoint(other, x, use_reentrant=reentrant).square().mean().backward()
        found = [[*of.state_dict().values(), *(p.grad for p in of.parameters())] for of in (model, other)]
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("static", [(name,) for name in OPERANDS] + [OPERANDS], ids=lambda names: "+".join(names)[:40])
def test_static_operands(static: tuple[str, ...]) -> None:
    """Ranges follow the data by the moving average, freeze, and dynamic operands are those of each call."""
    schedule = QuantizationSchedule(freeze_step=3, static=static, ema_updates=2)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    quantize_(model, training.scheduled_training(PER_TENSOR, schedule))
    seen: dict[str, list[float]] = {name: [] for name in OPERANDS}
    bounds: dict[str, list[float]] = {name: [] for name in static}
    layer = model[0]
    for step in range(5):
        x, g = torch.randn(300, 16).mul_(step + 1).requires_grad_(), torch.randn(300, 8).mul_(step + 1)
        model(x).backward(g)
        for name, values in zip(OPERANDS, (x, layer.weight, g, layer.weight, g, x), strict=True):
            seen[name].append(values.abs().max().item())
        for name in static:
            kept = layer.contraction_state.ranges[name.replace(".", "_")]
            bounds[name].append(max(-kept.min_val.item(), kept.max_val.item()))
    for name in static:
        assert bounds[name][0] == pytest.approx(seen[name][0])
        assert bounds[name][3] == bounds[name][2] == bounds[name][4]
        growing = name not in ("output.rhs", "grad_input.rhs")
        assert bounds[name][0] < bounds[name][1] < seen[name][1] if growing else True
    assert len(layer.contraction_state.ranges) == len(static)


STATIC = QuantizationSchedule(freeze_step=6, static=("output.lhs", "output.rhs"), ema_updates=4)


@pytest.mark.parametrize("module", ["linear", "conv"])
def test_a_static_layer_converts(module: str) -> None:
    """What is trained is served: static scales of the input travel with the weight."""
    spec = TrainingSpec(GemmSpec(integer(8, PerTensor()), integer(8)))
    layer: Any = nn.Linear(32, 16) if module == "linear" else nn.Conv2d(8, 16, 3, stride=2, padding=1)
    model = nn.Sequential(layer)
    keys = [name for name, _ in model.named_parameters()]
    recipe = training.scheduled_training(spec, STATIC)
    quantize_(model, {r"0\.weight": recipe} if module == "conv" else recipe)
    assert [name for name, _ in model.named_parameters()] == keys
    shape = (40, 32) if module == "linear" else (3, 8, 9, 9)
    optimizer = sgd(model)
    for _ in range(4):
        model(torch.randn(shape)).square().sum().mul(1e-4).backward()
        optimizer.step()
    x = torch.randn(shape)
    with torch.no_grad():
        trained = model.eval()(x)
        quantize_(model, training.convert())
        served = model(x)
    assert type(model[0]) in (nn.Linear, nn.Conv2d)
    assert torch.equal(trained, served)
    assert "static" in str(model[0].weight.scheme.spec)
    assert (
        20 < compute_error(functional.linear(x, model[0].weight.dequantize(), model[0].bias), served) < 60
        if (module == "linear")
        else True
    )


def test_saved_with_the_model() -> None:
    """State dict, pickle and copy have step and ranges; training resumes exactly."""
    recipe = training.scheduled_training(
        PER_TENSOR, QuantizationSchedule(2, 7, ("output.lhs", "grad_input.lhs"), delayed_scaling(4))
    )
    whole, part = model_of(recipe), model_of(recipe)
    for model, counts in ((whole, [9]), (part, [4])):
        optimizer = sgd(model)
        training.advance_with(optimizer, model)
        for count in counts:
            steps(model, optimizer, count)
    resumed = model_of(recipe)
    resumed.load_state_dict(part.state_dict())
    again = sgd(resumed)
    again.load_state_dict(optimizer.state_dict())
    assert resumed[0].contraction_state.steps == 4
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in (other, part)), strict=True))
    training.advance_with(again, resumed)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        torch.randn(64, 16, generator=generator)
    for _ in range(5):
        functional.mse_loss(resumed(torch.randn(64, 16, generator=generator)), torch.zeros(64, 8)).backward()
        again.step()
        again.zero_grad()
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_same_schedule_for_qat() -> None:
    schedule = QuantizationSchedule(start_step=2, freeze_step=5, static=("output.lhs",), ema_updates=4)
    recipe = qat(qtorch.int8_static_activation_int8_weight(), schedule=schedule)
    assert qtorch.primitives.from_json(qtorch.primitives.to_json(recipe)) == recipe
    model = model_of(recipe)
    optimizer = sgd(model)
    training.advance_with(optimizer, model)
    layer, x = model[0], torch.randn(64, 16)
    ranges = []
    for step in range(8):
        y = layer(x)
        assert torch.equal(y, functional.linear(x, layer.weight, layer.bias)) is (step < 2)
        model(torch.randn(64, 16) * (step + 1)).sum().backward()
        ranges.append(layer.input_quantizer.converted_qparams(x, layer.frozen)[0].item())
        optimizer.step()
        optimizer.zero_grad()
    assert layer.schedule.step == 8
    assert ranges[0] != ranges[3]
    assert ranges[5] == ranges[6] == ranges[7]
    dynamic = qat(int8_dynamic_activation_int8_weight(), schedule=QuantizationSchedule(start_step=1))
    assert model_of(dynamic)[0].schedule.start_step == 1


# --- observers ---
def follow(observer: Any, batches: list[Tensor]) -> list[float]:
    """The bound of each batch, of one scale for the tensor."""
    layer = nn.Linear(batches[0].shape[1], 4)
    schedule = QuantizationSchedule(static=("output.lhs",), observer=observer)
    model = nn.Sequential(layer)
    quantize_(model, training.scheduled_training(TrainingSpec(GemmSpec(integer(8, PerTensor()), integer(8))), schedule))
    bounds = []
    for batch in batches:
        model(batch)
        bounds.append(model[0].contraction_state.ranges["output_lhs"].max_val.item())
    return bounds


def test_delayed_scaling_and_weighted_stats() -> None:
    batches = [torch.randn(8, 16) for _ in range(6)]
    largest = [batch.abs().max().item() for batch in batches]
    wanted = [largest[0], *(max(largest[max(0, i - 3) : i]) for i in range(1, 6))]
    assert follow(delayed_scaling(3), batches) == pytest.approx(wanted)
    batches[2][0, 0] = torch.inf  # the row is left out, and the history stays
    assert all(bound < 10 for bound in follow(delayed_scaling(3), batches))
    batches = [torch.relu(torch.randn(8, 16)) for _ in range(4)]
    rate = 1 / 5
    sums = None
    wanted = []
    for batch in batches:
        x = batch.double()
        new = torch.stack([(x != 0).sum().double(), x.abs().sum(), (x.abs() ** 3).sum(), x.abs().max()])
        sums = new if sums is None else sums + rate * (new - sums)
        wanted.append((0.5 * sums[1] / sums[0] + 2 * (sums[2] / sums[0]) ** (1 / 3) + 0.25 * sums[3] + 0.1).item())
    observer = weighted_stats(l1=0.5, lp=2, max_dev=0.25, constant=0.1, p=3, updates=5)
    assert follow(observer, batches) == pytest.approx(wanted, rel=1e-5)
    assert follow(weighted_stats(updates=1), batches) == pytest.approx([b.abs().max().item() for b in batches])
    spec = TrainingSpec(GemmSpec(integer(8, PerTensor()), integer(8)))
    model = model_of(training.scheduled_training(spec, STATIC))
    refuses(r"the range of output\.lhs is not known: train first", lambda: quantize_(model, training.convert()))
    refuses("no scale yet", lambda: model.eval()(torch.randn(2, 16)))


def test_observers_of_aqt_calibrate() -> None:
    """The mean of the largest magnitudes of batches, and the two above, from data before training."""
    from qtorch.calibration import calibrated

    batches = [torch.randn(8, 16) for _ in range(4)]
    largest = [b.abs().max().item() for b in batches]
    for observer, wanted in (
        (delayed_scaling(2), max(largest[2:])),
        (weighted_stats(max_dev=1, updates=1), largest[-1]),
        (moving_average(1.0), largest[-1]),
    ):
        model = nn.Sequential(nn.Linear(16, 4))
        quantize_(model, calibrated(qtorch.int8_static_activation_int8_weight(), batches, observer=observer))
        scale = model[0].weight.act_scale.item()
        low, high = model[0].weight.scheme.activation.code_range
        assert wanted / 128 * 0.99 < scale < 2 * wanted / (high - low) * 1.01


ERRORS = {
    "names \\['output'\\]; operands are": lambda: QuantizationSchedule(static=("output",)),
    "ema_updates is at least 1": lambda: QuantizationSchedule(ema_updates=0),
    "does not follow batches": lambda: QuantizationSchedule(observer=percentile()),
    "scales would never be in use": lambda: QuantizationSchedule(5, 5),
    "the spec does not quantize it": lambda: training.scheduled_training(
        TrainingSpec(GemmSpec(integer(8), integer(8))), QuantizationSchedule(static=("grad_input.lhs",))
    ),
    "has a scale for each token": lambda: training.scheduled_training(
        training.fully_quantized(), QuantizationSchedule(static=("output.lhs",))
    ),
    "leave these out": lambda: qat(
        qtorch.int8_static_activation_int8_weight(), start_step=1, schedule=QuantizationSchedule()
    ),
    "has no static activation": lambda: qat(
        int8_dynamic_activation_int8_weight(), schedule=QuantizationSchedule(static=("output.lhs",))
    ),
    "have no schedule": lambda: training.advance_with(sgd(nn.Linear(2, 2)), nn.Linear(2, 2)),
    "exactly these; this is one of Embedding": lambda: quantize_(
        nn.Sequential(nn.Embedding(4, 4)), {r"0\.weight": training.scheduled_training()}
    ),
    "coefficients are not negative": lambda: weighted_stats(max_dev=0),
    "history is at least 1": lambda: delayed_scaling(0),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    refuses(message, lambda: ERRORS[message]())


# --- layers with fake quantization ---
W8A8 = qtorch.int8_static_activation_int8_weight(0.03)
STATIC_FLOAT8 = qtorch.float8_static_activation_float8_weight(0.01)

# Recipe, whether it sums integers.
RECIPES = [
    (scheduled_qat(qtorch.int8_dynamic_activation_int4_weight(), 2, 5), True),
    (scheduled_qat(qtorch.int4_weight_only(group_size=32), 2, 5), False),
    (scheduled_qat(W8A8, 2, 5), True),
    (scheduled_qat(W8A8, 2, 5, "moving_average"), True),
    (scheduled_qat(W8A8, observer="min_max"), True),
    (scheduled_qat(STATIC_FLOAT8, 2, 5, "moving_average"), False),
    (scheduled_qat(qtorch.float8_dynamic_activation_float8_weight(), 2, 5), False),
    (scheduled_qat(qtorch.mxfp4_weight_only(), 2, 5), False),
    (scheduled_qat(qtorch.nvfp4_weight_only(), 2), False),
    (lsq(start_step=2, freeze_step=5), True),
    (lsq(weights="clip", activation_offset=True, start_step=2, freeze_step=5), True),
]


@pytest.mark.filterwarnings("ignore:qtorch")
@pytest.mark.parametrize(("recipe", "integers"), RECIPES, ids=[f"{i} {case[0]}" for i, case in enumerate(RECIPES)])
def test_float_then_fake_quantized_then_frozen(recipe, integers: bool) -> None:
    floats = mlp()
    model = copy.deepcopy(floats)
    quantize_(model, recipe)
    ours, theirs = fit(model, 3), fit(floats, 3)
    start = recipe.start_step
    assert ours[:start] == theirs[:start]
    assert all(a != b for a, b in zip(ours[start:], theirs[start:]))
    fit(model, 2)
    layer, x = model[0], torch.randn(9, 64)
    frozen = None if layer.schedule is None else layer.schedule.frozen
    scale = layer.weight_quantizer.converted_qparams(layer.weight, frozen)[0]
    weight = layer.weight.detach().clone()
    fit(model, 2, seed=1)
    assert not torch.equal(layer.weight, weight)
    again = layer.weight_quantizer.converted_qparams(layer.weight, frozen)[0]
    assert torch.equal(scale, again) or recipe.freeze_step is None
    model.eval()
    with torch.no_grad():
        wanted = model(x)
    quantize_(model, convert())
    assert type(model[0]) is nn.Linear
    served = model[0].weight.dense_scale()
    assert torch.equal(served, again)
    got = model(x)
    assert torch.equal(got, wanted) if integers else compute_error(wanted, got) > 70
    assert 10 < compute_error(layer.weight.dequantize(), weight) < 60


def test_eval_mode_and_what_is_refused() -> None:
    model, x = mlp(), torch.randn(9, 64)
    quantize_(model, scheduled_qat(qtorch.int8_dynamic_activation_int4_weight(), start_step=100))
    floats = model(x)
    assert model[0].schedule.step == 1
    wanted = model.eval()(x)
    assert model[0].schedule.step == 1
    assert 10 < compute_error(floats, wanted) < 40
    quantize_(model, convert())
    assert torch.equal(model(x), wanted)
    for arguments, message in (
        ((qtorch.int8_weight_only(), -1), "start_step is -1"),
        ((qtorch.int8_weight_only(), 5, 5), "freeze_step is 5, start_step 5"),
        ((qtorch.int8_weight_only(), 0, None, "moving_average"), "no static activations to observe"),
        ((W8A8, 0, None, "mean"), "observer is an observer such as"),
        ((qtorch.nf4_weight_only(),), "CodebookSpec"),
        ((qtorch.nvfp4_weight_only(), 0, 3), "cannot freeze"),
        ((qtorch.int8_dynamic_activation_int8_semi_sparse_weight(),), "prunes its weights"),
    ):
        refuses(message, lambda arguments=arguments: scheduled_qat(*arguments))
    for takes in (scheduled_qat, qat, lambda recipe: lsq(recipe=recipe)):
        for recipe in ("int8", lsq()):
            refuses("takes an inference recipe", lambda takes=takes, recipe=recipe: takes(recipe), TypeError)


def test_ranges_that_follow_and_held_ones() -> None:
    batches = [torch.full((2, 64), value) for value in (1.0, 3.0, 2.0)]
    for observer, wanted in ((moving_average(0.5), 2.0), ("min_max", 3.0)):
        layer = nn.Linear(64, 32)
        quantize_(layer, scheduled_qat(W8A8, observer=observer))
        for x in batches:
            layer(x)
        assert layer.input_quantizer.max_val.item() == wanted
        quantize_(layer, convert())
        torch.testing.assert_close(layer.weight.act_scale.item(), wanted / 127)
    layer = nn.Linear(64, 32)
    quantize_(layer, scheduled_qat(W8A8, observer="moving_average"))
    refuses("no input has been seen", lambda: quantize_(layer, convert()))
    refuses("no scale yet: train on a batch, or call", lambda: layer.eval()(batches[0]))
    assert training.calibrate(layer, batches) == 1
    # Weights .99^2, .99, 1.
    torch.testing.assert_close(layer.input_quantizer.max_val.item(), (0.9801 + 2.97 + 2) / 2.9701)
    quantize_(layer, convert())
    layer = nn.Linear(64, 32)
    quantize_(layer, scheduled_qat(qtorch.int8_dynamic_activation_int4_weight(), freeze_step=1))
    x = torch.randn(16, 64)
    layer(x).sum().backward()
    assert layer.weight.grad.count_nonzero() == layer.weight.numel()
    layer.weight.grad = None
    with torch.no_grad():
        layer.weight[1, 1] = 3.0
    layer(x).sum().backward()
    assert layer.weight.grad[1, 1] == 0
    assert layer.weight.grad.count_nonzero() > 1500
