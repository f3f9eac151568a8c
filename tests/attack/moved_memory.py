"""Inner tensors that a caller changes after the weight was made; a case is (weight, tensor, change, calls before)."""

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qtorch.dtypes import MatrixWeight, QuantizedTensor
from qtorch.kernels.linear import reference
from tests.attack.battery import close
from tests.attack.sources import SOURCES, source
from tests.movement.reasons import CLEAR

Change = Callable[[QuantizedTensor, str, Tensor], object]
"""Of (the weight, the name of an inner tensor, that tensor)."""


CHANGES: dict[str, Change] = {
    "resize to nothing": lambda weight, name, inner: inner.resize_(0),
    "resize to one row": lambda weight, name, inner: inner.resize_(1, *inner.shape[1:]),
    "resize to more": lambda weight, name, inner: inner.resize_(inner.shape[0] * 8, *inner.shape[1:]),
    "set to one element": lambda weight, name, inner: inner.set_(inner.new_zeros(1)),
    "transpose in place": lambda weight, name, inner: inner.t_(),
    "unsqueeze in place": lambda weight, name, inner: inner.unsqueeze_(0),
    "assign data": lambda weight, name, inner: setattr(inner, "data", inner[:1].clone()),
    "free": lambda weight, name, inner: inner.untyped_storage().resize_(0),
    "assign an equal one": lambda weight, name, inner: setattr(weight, name, inner.clone()),
    "assign other numbers": lambda weight, name, inner: setattr(weight, name, inner.flip(0).contiguous()),
    "write other numbers": lambda weight, name, inner: inner.copy_(inner.flip(0)),
}

SOUND = {"assign an equal one", "assign other numbers", "write other numbers"}
"""After these every operation works, with the new numbers."""

UNREADABLE = {"free"}
"""After these torch's own operators, which say what is right below, cannot be asked: every operation is an error."""


class Case(NamedTuple):
    source: str
    tensor: str
    change: str
    warm: bool

    def __str__(self) -> str:
        when = "after some calls" if self.warm else "before the first call"
        return f"{self.source}: {self.change} of {self.tensor}, {when}"


def _cases() -> list[Case]:
    found = []
    for name in SOURCES:
        weight = source(name)
        if weight is None or "master" in weight.inner_tensors or weight.dim() != 2 or not weight.is_floating_point():
            continue
        if isinstance(weight, MatrixWeight):
            continue  # the reference takes matrices as they are held
        found += [
            Case(name, tensor, change, warm)
            for tensor, change, warm in itertools.product(weight.inner_tensors, CHANGES, (False, True))
            # A static scale, and those of scales, have one element at times.
            if weight.inner_tensors[tensor].dim() == 2 and weight.inner_tensors[tensor].shape[0] > 1
        ]
    return found


CASES = _cases()


def run(seed: int) -> str | None:
    """What is wrong with case `seed`."""
    case = CASES[seed]
    original = source(case.source)
    assert original is not None
    weight = copy.deepcopy(original.detach())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if case.warm:
            for operation in OPERATIONS.values():
                operation(weight, None)
                operation(weight, None)
        try:
            CHANGES[case.change](weight, case.tensor, getattr(weight, case.tensor))
        except (TypeError, ValueError, RuntimeError):
            return None  # the change itself is refused
        for name, operation in OPERATIONS.items():
            for _ in range(2):
                if found := _one(case, weight, operation):
                    return f"{case}: {name}: {found}"
    return None


Operation = Callable[[QuantizedTensor, "Tensor | None"], Tensor]


def _one(case: Case, weight: QuantizedTensor, operation: Operation) -> str | None:
    wanted = None
    if case.change not in UNREADABLE:
        try:
            wanted = operation(weight, torch.empty(0))
        except Exception:
            wanted = None
    try:
        got = operation(weight, None)
    except CLEAR as error:
        if case.change in SOUND:
            return f"{type(error).__name__}: {error}"
        return None if str(error) else f"{type(error).__name__} without a message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if wanted is None:
        return "it gives numbers, though its tensors have none to give"
    try:
        close(got, wanted, "its numbers")
    except AssertionError as error:
        return str(error)
    return None


def _linear(rows: int) -> Operation:
    def run(weight: QuantizedTensor, by_torch: Tensor | None) -> Tensor:
        torch.manual_seed(rows)
        x = torch.randn(rows, weight.scheme.shape[1], dtype=weight.scheme.dtype)
        return torch.nn.functional.linear(x, weight) if by_torch is None else reference.linear(x, weight, None)

    return run


def _embedding(weight: QuantizedTensor, by_torch: Tensor | None) -> Tensor:
    ids = torch.tensor([0, weight.scheme.shape[0] - 1])
    return torch.nn.functional.embedding(ids, weight) if by_torch is None else _floats(weight)[ids]


def _dequantize(weight: QuantizedTensor, by_torch: Tensor | None) -> Tensor:
    return weight.dequantize() if by_torch is None else _floats(weight)


def _floats(weight: QuantizedTensor) -> Tensor:
    floats = weight.scheme.weight.dequantize(*weight.plain(), weight.scheme.dtype)
    assert tuple(floats.shape) == tuple(weight.scheme.shape)
    return floats


OPERATIONS: dict[str, Operation] = {
    **{f"F.linear of {rows} rows": _linear(rows) for rows in (1, 64)},
    "F.embedding": _embedding,
    "dequantize": _dequantize,
}
