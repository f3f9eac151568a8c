"""One rank of `test_two_processes`: gradients averaged in int8, against the exact means."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qtorch import quantize_
from qtorch.integrations.ddp_comm_hooks import Int8GradientState, int8_gradient_hook
from qtorch.training import int8_mixed_precision_training
from tests.distributed.processes import worker
from tests.refusals import refuses
from tests.training.small_model import make_model, parameters_of, train

STEPS, BLOCKS, BYTES = 16, 67, 260


def hooked(model: torch.nn.Module, **options: Any) -> tuple[Any, Int8GradientState]:
    """A replica, whose one bucket DDP divides into several after a step, and the state of its hook."""
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = Int8GradientState(model.parameters(), **options)
    replica.register_comm_hook(state, int8_gradient_hook)
    return replica, state


def gradients(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Those of all parameters, each padded to blocks of 256."""
    model.zero_grad()
    model(x).square().mean().backward()
    flat = [parameter.grad.flatten().float() for parameter in model.parameters()]
    return torch.cat([torch.nn.functional.pad(gradient, (0, -len(gradient) % 256)) for gradient in flat])


def of_both(tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor.new_empty(2 * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(parts, tensor)
    return parts.unflatten(0, (2, -1))


def check_sums(dtype: torch.dtype, quantized: bool = False, feedback: bool = True) -> None:
    """With feedback, what is lost of a sum over steps is what is lost of one, half a step of 127; else it adds up."""
    model, x = make_model(dtype), torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    if quantized:
        quantize_(model, int8_mixed_precision_training())
    exact = of_both(gradients(model, x.to(dtype))).mean(0)
    replica, state = hooked(model, error_feedback=feedback)
    steps = torch.stack([gradients(replica, x.to(dtype)) for _ in range(STEPS)])
    assert torch.equal(*of_both(steps)), "the ranks have the same bits"
    errors = (steps.cumsum(0) - exact * torch.arange(1, STEPS + 1)[:, None]).norm(dim=1) / exact.norm()
    assert 4e-3 < errors[0] < 1.5e-2
    assert bool(state.error.any()) is feedback
    if not feedback:
        assert errors[-1].item() == pytest.approx(STEPS * errors[0].item(), rel=1e-3)
    elif dtype is torch.float32:
        assert 0.5 * errors[0] < errors[-1] < 1.5 * errors[0]
        left = of_both(state.error).mean(0).flatten()  # what no step has sent, to the rounding of fp32
        torch.testing.assert_close(steps.sum(0) + left, STEPS * exact, rtol=0, atol=1e-6)


def check_bytes_and_lost_values() -> None:
    (replica, state), x, sent = hooked(make_model()), torch.randn(8, 64), []

    def counted(call: Any) -> Any:
        return lambda out, own, **options: (sent.append(own.nbytes), call(out, own, **options))[1]

    calls = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
    for buckets in (1, 2):
        sent.clear()
        with mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in calls}):
            gradients(replica, x)
        # A message to the owners, padded to an even number of blocks, and one of what a rank owns.
        assert len(sent) == 2 * buckets
        assert 1.5 * BLOCKS * BYTES <= sum(sent) <= 1.5 * (BLOCKS + buckets) * BYTES
    x[0, 0] = float("nan") if dist.get_rank() else 1.0
    assert gradients(replica, x)[-256:-192].isnan().all()
    assert state.error.isfinite().all()
    assert gradients(replica, torch.randn(8, 64)).isfinite().all()


def check_that_a_run_goes_on() -> None:
    def run(steps: range, saved: Any = None) -> tuple[list[torch.Tensor], Any]:
        model = make_model()
        replica, state = hooked(model)
        parts = (model, torch.optim.AdamW(model.parameters(), 1e-2), state)
        for part, value in zip(parts, saved or ()):
            part.load_state_dict(value)
        train(replica, parts[1], steps)
        return parameters_of(model), [part.state_dict() for part in parts]

    (whole, _), (half, saved) = run(range(8)), run(range(4))
    assert all(map(torch.equal, whole, run(range(4, 8), saved)[0]))
    assert not any(map(torch.equal, whole, half))
    assert not all(map(torch.equal, whole, run(range(4, 8), saved[:2])[0])), "the errors are part of a run"


def main() -> None:
    for case in ((torch.float32,), (torch.bfloat16,), (torch.float32, True), (torch.float32, False, False)):
        check_sums(*case)
    check_bytes_and_lost_values()
    check_that_a_run_goes_on()
    refuses("block_size is 1 or more", lambda: Int8GradientState([], block_size=0))
    saved = {"error": torch.zeros(1, 256)}
    refuses("same parameters and block_size", lambda: Int8GradientState([]).load_state_dict(saved))
    replica = DistributedDataParallel(make_model())
    replica.register_comm_hook(Int8GradientState([]), int8_gradient_hook)
    refuses("was not made with", lambda: gradients(replica, torch.randn(8, 64)))


if __name__ == "__main__":
    worker(main)
