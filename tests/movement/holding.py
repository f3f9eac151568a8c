"""What must hold after a movement: the same class, the same codes bit for bit, the same results and gradients."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtorch.dtypes import QuantizedTensor
from tests.movement.kinds import Kind

Bits = dict[str, Tensor]


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor consists of."""
    tensor = tensor.detach()
    return dict(tensor.inner_tensors) if isinstance(tensor, QuantizedTensor) else {"": tensor}


def state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def bits(tensor: Tensor) -> Bits:
    """A copy of the bytes of each part."""
    return {name: as_bytes(part).clone() for name, part in parts(tensor).items()}


def through_file(value: Any, weights_only: bool = True) -> Any:
    """What `torch.load` gives of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def as_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(got: Tensor, wanted: Bits | Tensor, what: str) -> None:
    """Assert that all parts of a tensor are those, bit for bit."""
    found, wanted = bits(got), wanted if isinstance(wanted, dict) else bits(wanted)
    assert found.keys() == wanted.keys(), f"{what}: parts {list(found)}, not {list(wanted)}"
    for name, part in found.items():
        assert torch.equal(part, wanted[name]), f"{what}: other numbers in {name or 'it'}"


def same_tensor(got: Tensor, wanted: Tensor, what: str) -> None:
    """Assert that a tensor is another one in all: class, scheme, shape, dtype, `requires_grad` and bits."""
    if isinstance(wanted, QuantizedTensor):
        assert type(got) is type(wanted), f"{what}: a {type(got).__name__}, not a {type(wanted).__name__}"
        assert got.scheme == wanted.scheme, f"{what}: {got.scheme}, not {wanted.scheme}"
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{what}: {got.shape}, {got.dtype}"
    same_bits(got, wanted, what)


def same_module(got: nn.Module, wanted: nn.Module, what: str) -> None:
    """Assert that all parameters and buffers are the same."""
    found, expected = state(got), state(wanted)
    assert found.keys() == expected.keys(), f"{what}: {list(found)}, not {list(expected)}"
    for name, tensor in found.items():
        same_tensor(tensor, expected[name], f"{what}: {name}")
        assert tensor.requires_grad == expected[name].requires_grad, f"{what}: requires_grad of {name}"


def snapshot(module: nn.Module) -> Mapping[str, tuple[type, Bits]]:
    """What `unchanged` compares with."""
    return {name: (type(tensor), bits(tensor)) for name, tensor in state(module).items()}


def unchanged(module: nn.Module, before: Mapping[str, tuple[type, Bits]]) -> None:
    """Assert that a module is what it was, as after an error."""
    found = state(module)
    assert found.keys() == before.keys(), f"after the error: {list(found)}, not {list(before)}"
    for name, (kind, wanted) in before.items():
        assert type(found[name]) is kind, f"after the error {name} is a {type(found[name]).__name__}"
        same_bits(found[name], wanted, f"after the error {name}")


@torch.no_grad()
def output(module: nn.Module, kind: Kind, dtype: torch.dtype | None = None) -> Tensor:
    """In evaluation mode."""
    training = module.training
    x = kind.inputs()
    result: Tensor = module.eval()(x if dtype is None or not x.is_floating_point() else x.to(dtype))
    module.train(training)
    return result


def gradients(module: nn.Module, kind: Kind, x: Tensor | None = None) -> dict[str, Tensor]:
    """Of all parameters that train, for one loss; rounding has the same noise each time. The module stays as it is."""
    torch.manual_seed(11)
    module.zero_grad()
    was = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss = module(kind.inputs() if x is None else x).float().square().mean()
    if loss.requires_grad:
        loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(was[name])
    return found


def same_gradients(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Assert that they are equal bit for bit."""
    assert got.keys() == wanted.keys(), f"{what}: gradients of {list(got)}, not {list(wanted)}"
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), f"{what}: another gradient of {name}"


def equal(got: Tensor, wanted: Tensor, what: str, bound: float = 0.0) -> None:
    """Assert that two results are equal, or differ by a relative error of at most `bound`."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{what}: {got.shape}, {got.dtype}"
    assert bool(wanted.isfinite().all()), f"{what}: not finite"
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    assert error <= bound, f"{what}: relative error {error:.2g}"
