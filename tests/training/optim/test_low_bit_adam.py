"""Adam with moments in codes: it trains as Adam does, holds what it says in memory, and takes what Adam takes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from qtorch import quantize_
from qtorch.dtypes.blocked_tensor import BlockedTensor
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.training import MasterWeight, int8_mixed_precision_training, int8_weight_only_quantized_training
from qtorch.training.optim import Adam8bit, AdamFp8, AdamW8bit, AdamWFp8, _AdamW
from tests.refusals import refuses
from tests.training.small_model import ALL, QUANTIZED, cosine, loss_of, make_model, parameters_of, train

GAPS = {"8bit": 0.01, "4bit": 0.05, "Fp8": 0.03, "_AdamW": 1e-5}
"""Most relative distance of the loss from torch's."""


def gap_of(name: str) -> float:
    return next(gap for end, gap in GAPS.items() if name.endswith(end))


def torch_twin(name: str) -> type[torch.optim.Optimizer]:
    return torch.optim.AdamW if "W" in name else torch.optim.Adam


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_trains_as_torch_does(name: str, amsgrad: bool) -> None:
    losses = []
    for cls in (ALL[name], torch_twin(name)):
        model = make_model()
        optimizer = cls(model.parameters(), lr=1e-2, weight_decay=1e-2, amsgrad=amsgrad)
        losses.append(train(model, optimizer, range(40), cosine(optimizer, 40)))
    assert abs(losses[0] / losses[1] - 1) <= gap_of(name)
    assert losses[0] != losses[1] or name == "_AdamW"


@pytest.mark.parametrize("name", ALL)
def test_copies_and_fused_steps(name: str) -> None:
    model = make_model()
    optimizer = ALL[name](model.parameters())
    with record_kernels() as ran:
        train(model, optimizer, range(1))
    library = compiled_library.library()
    expected = "adam_step.torch" if library is None else f"adam_step.{library.instruction_set}"
    assert [kernel for kernel in ran if kernel.startswith("adam_step")] == [expected] * 4
    # Deep copies and pickles, as torch's optimizers allow them; torch's plain pickles hold no float8.
    model = make_model()
    optimizer = ALL[name](model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    both = copy.deepcopy((model, optimizer))
    is_float8 = name.endswith("Fp8")
    reloaded = both if is_float8 else pickle.loads(pickle.dumps((model, optimizer)))
    both = copy.deepcopy(both) if is_float8 else both
    results = []
    for m, o in ((model, optimizer), both, reloaded):
        train(m, o, range(2, 4))
        results.append(parameters_of(m))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("name", QUANTIZED)
def test_without_a_compiler(name: str, torch_kernels: None) -> None:
    """The same numbers."""
    results = []
    for build in (None, True):
        model = make_model()
        optimizer = QUANTIZED[name](model.parameters(), lr=1e-2, betas=(0.9, 0.99))
        for step in range(3):
            # Gradients of one kind: those of the model depend on the kernels of torch alone.
            loss_of(model, step).backward()
            if build is None:
                optimizer.step()
            else:
                found = compiled_library._best()
                if isinstance(found, str):
                    pytest.skip(found)
                with compiled_library.use(found.instruction_set):
                    optimizer.step()
            optimizer.zero_grad()
        results.append(parameters_of(model))
    assert all(map(torch.equal, *results))
    weight = nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.eye(64)
    optimizer = AdamW8bit([weight])
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"].dequantize() > 0, weight.grad > 0)


BYTES = {"8bit": 2.03, "4bit": 1.06, "Fp8": 2.03}


@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_a_parameter(name: str) -> None:
    weight = nn.Parameter(torch.randn(1024, 1024))
    weight.grad = torch.randn(1024, 1024)
    optimizer = QUANTIZED[name]([weight])
    optimizer.step()
    storages = {}
    for state in optimizer.state[weight].values():
        for tensor in state.inner_tensors.values() if isinstance(state, BlockedTensor) else [state]:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    expected = next(size for end, size in BYTES.items() if name.endswith(end))
    assert round(sum(storages.values()) / weight.numel(), 2) == expected


def test_small_states_and_learning_rates() -> None:
    sizes = {(4095,): False, (4096,): True, (4097,): True, (64, 63): False, (65, 64): True, (3, 40, 40): True}
    for shape, quantized in sizes.items():
        for dtype in (torch.float32, torch.bfloat16):
            weight = nn.Parameter(torch.randn(shape).to(dtype))
            weight.grad = torch.randn(shape).to(dtype)
            optimizer = AdamW8bit([weight])
            optimizer.step()
            states = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
            assert all(isinstance(state, BlockedTensor) == quantized for state in states), shape
            assert all(state.dtype == torch.float32 and state.shape == shape for state in states)
    # A float, a tensor, and one that a scheduler changes give one result.
    results = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
        model = make_model()
        optimizer = AdamW8bit(model.parameters(), lr=lr)
        train(model, optimizer, range(6), cosine(optimizer, 6))
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        results.append(parameters_of(model))
    assert all(map(torch.equal, *results))
    refuses("a tensor lr has one element", lambda: AdamW8bit(model.parameters(), lr=torch.ones(2)))


def test_bits_of_groups() -> None:
    weights = [nn.Parameter(torch.randn(64, 80)) for _ in range(4)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "optim_bits": 32}]
    groups += [
        {"params": [weights[2]], "optim_bits": 4},
        {"params": [weights[3]], "optim_bits": "fp8", "block_size": 40},
    ]
    optimizer = AdamW8bit(groups)
    for weight in weights:
        weight.grad = torch.randn(64, 80)
    optimizer.step()
    states = [optimizer.state[weight]["exp_avg"] for weight in weights]
    specs = [str(s.scheme.weight.dtype) if isinstance(s, BlockedTensor) else "fp32" for s in states]
    assert specs == ["uint8", "fp32", "uint4", "float8_e4m3fn"]
    assert [states[0].scheme.block, states[3].scheme.block] == [80, 40]
    with pytest.raises(ValueError, match="optim_bits is 32, 8, 4, 'fp8', got 16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "optim_bits": 16})
    assert len(optimizer.param_groups) == 4


MOVES = {"8bit": 0.2, "Fp8": 0.05, "_AdamW": 1e-3}


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8", "_AdamW", "AdamW4bit"])
def test_outliers_leave_others_alone(name: str) -> None:
    """Weights whose gradient is a part of their block's largest move as in Adam: .02 in 20 steps; without one, not."""
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = ALL[name]([weight], lr=1e-3, weight_decay=0)
    for _ in range(20):
        weight.grad = torch.zeros(64, 128)
        weight.grad[:, :3] = torch.tensor([1, 1e-2, 1e-4])
        optimizer.step()
    moved = -weight.detach()[0, :4]
    assert moved[3] == 0
    if name == "AdamW4bit":  # such weights move too little, never too far
        assert moved[0] == pytest.approx(0.02, rel=0.05)
        assert 0 < moved[2] < moved[1] < 0.02
    else:
        assert ((moved[:3] / 0.02 - 1).abs() <= MOVES[name.removeprefix("AdamW") or name]).all(), moved


def test_compiled_steps() -> None:
    """A compiled training step gives what an eager one does, and the learning rate is no reason to compile again."""
    from torch._dynamo.testing import CompileCounter

    results = []
    for compiled in (False, True):
        model = make_model()
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        scheduler = cosine(optimizer, 6)
        counter = CompileCounter()
        step = torch.compile(optimizer.step, backend=counter) if compiled else optimizer.step
        for number in range(6):
            loss_of(model, number).backward()
            step()
            optimizer.zero_grad()
            scheduler.step()
        assert counter.frame_count == 0
        results.append(parameters_of(model))
    assert all(map(torch.equal, *results))


def test_closures_and_weight_decay() -> None:
    model = make_model()
    optimizer = Adam8bit(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    embedding = nn.Embedding(100, 64, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    refuses("SparseAdam", lambda: Adam8bit(embedding.parameters()).step(), RuntimeError)
    # It is 1e-3 of the weight a step, a quarter of what bf16 resolves: torch loses all of it.
    norms = []
    for make in (
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: AdamW8bit(p, lr=1e-2, weight_decay=0.1, bf16_stochastic_round=True),
    ):
        weight = nn.Parameter(torch.full((64, 64), 0.7).bfloat16())
        optimizer = make([weight])
        for _ in range(100):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        norms.append(weight.detach().float().mean().item())
    assert norms[0] == pytest.approx(0.7, rel=3e-3)
    assert norms[1] == pytest.approx(0.7 * (1 - 1e-3) ** 100, rel=3e-3)


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}, {"block_size": 0}],
    ids=str,
)
def test_arguments(arguments: dict[str, float]) -> None:
    refuses(next(iter(arguments)), lambda: AdamW8bit([nn.Parameter(torch.ones(4))], **arguments))
    with pytest.raises(TypeError, match="AdamW8bit got an unexpected keyword argument 'rank'"):
        AdamW8bit([nn.Parameter(torch.ones(4))], rank=2)
    refuses(r"in torch\.float64", lambda: AdamW8bit([nn.Parameter(torch.ones(4, dtype=torch.float64))]))


def test_weight_decay_joins_the_update() -> None:
    """Rounded to nearest, decay counts where updates move weights: the weight is rounded once a step, not twice."""
    means = []
    for make in (
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.99), weight_decay=0.1),
        lambda p: AdamW8bit(p, lr=1e-2, betas=(0.0, 0.99), weight_decay=0.1),
        lambda p: AdamW8bit(p, lr=1e-2, betas=(0.0, 0.99), weight_decay=0.1),
    ):
        torch.manual_seed(0)
        is_exact = len(means) == 2
        weight = nn.Parameter(torch.full((64, 64), 0.7).to(torch.float32 if is_exact else torch.bfloat16))
        optimizer = make([weight])
        for _ in range(100):
            weight.grad = torch.randn(64, 64).to(weight.dtype)
            optimizer.step()
        means.append(weight.detach().float().mean().item())
    lost, kept, exact = means
    assert abs(kept - exact) < 0.2 * abs(lost - exact)


@pytest.mark.parametrize("name", ["AdamW8bit", "_AdamW"])
def test_stochastic_rounding_is_a_function_of_the_step(name: str) -> None:
    results = []
    for seed in (1, 2):
        model = make_model(torch.bfloat16)
        optimizer = ALL[name](model.parameters(), lr=1e-2, bf16_stochastic_round=True)
        for step in range(3):
            torch.manual_seed(seed)
            train(model, optimizer, range(step, step + 1))
        results.append(parameters_of(model))
    assert all(map(torch.equal, *results))


def test_weights_in_training() -> None:
    """Weights that hold floats or codes are updated in place, and their versions count it."""
    for recipe in (int8_mixed_precision_training(), int8_weight_only_quantized_training()):
        model = make_model()
        quantize_(model, recipe)
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        first = train(model, optimizer, range(1))
        weight = model[0].weight
        before = weight._version
        last = train(model, optimizer, range(1, 40), cosine(optimizer, 40))
        assert last < 0.6 * first
        assert weight._version > before
        assert isinstance(optimizer.state[weight]["exp_avg"], BlockedTensor)
        if isinstance(weight, MasterWeight):
            assert type(weight.master) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype: torch.dtype) -> None:
    """A parameter in channels-last order is updated as one in row-major order."""
    start, grad = torch.randn(40, 16, 3, 3).to(dtype), torch.randn(40, 16, 3, 3).to(dtype)
    results = []
    for order in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(start.clone().to(memory_format=order))
        optimizer = AdamWFp8([weight], lr=1e-2, bf16_stochastic_round=True)
        for _ in range(3):
            weight.grad = grad.to(memory_format=order)
            optimizer.step()
        assert weight.is_contiguous(memory_format=order)
        results.append(weight.detach())
    assert torch.equal(*results)


def test_fp32_steps_and_other_dtypes() -> None:
    """To the rounding of fp32."""
    results = []
    for cls in (_AdamW, torch.optim.AdamW):
        model = make_model()
        train(model, cls(model.parameters(), lr=1e-2), range(5))
        results.append(parameters_of(model))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    weight = nn.Parameter(torch.ones(64, 80))
    weight.grad = torch.ones(64, 80)
    empty = nn.Parameter(torch.ones(0, 8))
    empty.grad = torch.ones(0, 8)
    unused = nn.Parameter(torch.ones(3))
    optimizer = AdamFp8([weight, empty, unused])
    optimizer.step()
    assert (weight < 1).all()
    assert len(optimizer.state[unused]) == 0
