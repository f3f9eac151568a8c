"""Training under torch.compile: whole graphs, the numbers of eager mode, and no graph anew for a batch or a step."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from qtorch import PerBlock, PerGroup, PerTensor, compute_error, int8_static_activation_int8_weight, quantize_, training
from qtorch.kernels import record_kernels
from qtorch.recipes.base import Recipe
from qtorch.training import lsq, mixed_precision_training, qat, scheduled_qat
from tests import every_recipe
from tests.attack import training_recipes

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = [pytest.mark.usefixtures("torch_kernels"), pytest.mark.filterwarnings("ignore:(?s)qtorch")]

SCHEDULE = training.QuantizationSchedule(2, 5, ("output.lhs", "output.rhs"), ema_updates=3)
WITH_STEPS: dict[str, Recipe] = {
    "lsq": lsq(activation_offset=True, start_step=2, freeze_step=4),
    "lsq of int4": lsq(recipe=every_recipe.make("int8_dynamic_activation_int4_weight")),
    "scheduled qat": scheduled_qat(int8_static_activation_int8_weight(0.03), 2, 4, "moving_average"),
    "schedule": training.scheduled_training(training.fully_quantized(8, 8, PerTensor()), SCHEDULE),
}
REGISTERED = {name: training_recipes.make(name) for name in training_recipes.NAMES}
GROUPS = mixed_precision_training(training.fully_quantized(granularity=PerGroup(32)))
RECIPES: dict[str, Recipe] = {
    **REGISTERED,
    "int8, two products": training.int8_mixed_precision_training(
        training.Int8MixedPrecisionTrainingConfig(grad_weight=False)
    ),
    "nvfp4, with noise": training.nvfp4_training(),
    "nvfp4, MS-EDEN": training.nvfp4_training(ms_eden=True),
    "mxfp4, with noise": training.mxfp4_training(),
    "float8 tensorwise": training.float8_training("tensorwise"),
    "float8 blocks": training.float8_training(PerBlock((32, 32))),
    "groups": GROUPS,
    **{f"qat of {name}": qat(every_recipe.make(name, 32)) for name in every_recipe.OF_QAT},
    "lsq of weights alone": lsq(activation_bits=None),
    "lsq of a convolution": lsq(),
    "lsq of a convolution, dynamic": lsq(recipe=every_recipe.make("int8_dynamic_activation_int8_weight")),
}
QUICK = ("bitnet_training", "qat of int8_dynamic_activation_int4_weight", "lsq of a convolution, dynamic")
QUICK += ("scheduled_training", "lsq of weights alone")


def some_slow(cases: Iterable[str], quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in cases]


def mlp(recipe: Recipe | None) -> nn.Sequential:
    """Three shapes, none square: a square hides what Inductor does to a tensor beside its transpose."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 96), nn.Linear(96, 32, bias=False))
    if recipe is not None:
        quantize_(model, recipe)
    model(torch.randn(8, 64))  # starts ranges that are learned
    return model


def results(model: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters of `model`, which `run` compiles."""
    torch.manual_seed(0)  # noise is that of both
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_alike(model: nn.Module, other: nn.Module, compiled: nn.Module, x: Tensor, least: float) -> None:
    for module in (model, other):
        module.zero_grad()
    for wanted, got in zip(results(model, model, x), results(other, compiled, x), strict=True):
        # The gradient of an adapter is zero at first.
        assert torch.equal(wanted, got) or compute_error(wanted, got) > least


@pytest.mark.parametrize("name", some_slow(RECIPES, QUICK))
def test_one_graph_for_every_batch(name: str) -> None:
    model, shape = mlp(RECIPES[name]), (64,)
    if "convolution" in name:
        model, shape = nn.Sequential(nn.Conv2d(16, 8, 2, padding=1), nn.Flatten()), (16, 6, 5)
        quantize_(model, {"0": RECIPES[name]})
        model(torch.randn(4, *shape))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend="aot_eager")
    first = 170 if "EDEN" in name else 70  # dynamo takes the number of blocks of 128 for a constant where it is one
    for batch in (first, first - 25, first + 63, 256):  # 256: nothing completes a block
        with torch._dynamo.config.patch(error_on_recompile=batch != first):
            assert_alike(model, other, compiled, torch.randn(batch, *shape), 90)


QATS = [f"qat of {name}" for name in ("int8_dynamic_activation_int4_weight", "nf4_weight_only")]
QATS.append("qat of int8_static_activation_int8_weight")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REGISTERED, "groups", "nvfp4, with noise", *QATS])
@torch._inductor.config.patch(fallback_random=True)
def test_inductor(name: str) -> None:
    model = mlp(RECIPES[name])
    other = copy.deepcopy(model)
    with record_kernels() as ran:
        # A code may round the other way after a fused multiplication.
        least = 25 if name in QATS else 40
        assert_alike(model, other, torch.compile(other, fullgraph=True), torch.randn(64, 64), least)
    counts = {"int8_mixed_precision_training": 9, "switchback_training": 6, "bitnet_training": 3}
    assert ran.count("int_matmul") >= 2 * counts.get(name, 0), "no products in the graph"


WITH_BACKWARD = {"float": None, **REGISTERED, **{name: every_recipe.make(name, 32) for name in every_recipe.NAMES}}


@pytest.mark.parametrize("name", some_slow(WITH_BACKWARD, ("float", "int8_weight_only", "qat", "bitnet_training")))
def test_compiled_autograd(name: str) -> None:
    """The forward and the backward in one graph, which a hook of modules, or tensors flattened there, would break."""

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().sum().backward()

    model, x = mlp(WITH_BACKWARD[name]), torch.randn(64, 64)
    other, found = copy.deepcopy(model), []
    for run, each in ((step, model), (torch.compile(step, backend="aot_eager"), other)):
        mine = x.clone().requires_grad_()
        with torch.random.fork_rng(), torch._dynamo.config.patch(compiled_autograd=True):
            run(each, mine)
        found.append([mine.grad, *(p.grad for p in each.parameters())])
    assert all(p is q is None or torch.equal(p, q) or compute_error(p, q) > 90 for p, q in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some_slow(WITH_STEPS, ("scheduled qat",)))
def test_no_graph_for_a_step(name: str, backend: str) -> None:
    """The first batch may start the activations: one graph for it, one for all others. Static operands break graphs."""
    whole = name != "schedule"
    eager = nn.Sequential(nn.Linear(64, 32))
    quantize_(eager, WITH_STEPS[name])
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=whole, backend=backend)
    optimizers = [torch.optim.SGD(training.parameter_groups(model, 1e-3)) for model in (eager, compiled)]
    counts = []
    torch._dynamo.utils.counters.clear()
    for _ in range(7):
        x = torch.randn(64, 64)
        losses = [model(x).square().mean() for model in (eager, run)]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert not whole or 1 <= counts[-1] == counts[1] <= 2
    for (key, ours), theirs in zip(compiled.state_dict().items(), eager.state_dict().values()):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-3, atol=1e-4, msg=key)
