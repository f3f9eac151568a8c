"""Inner tensors that a caller changes after the weight was made; a case is (weight, tensor, change, calls before)."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qtorch.dtypes import QuantizedTensor
from qtorch.kernels.linear import reference
from tests.attack.battery import CLEAR, close
from tests.attack.sources import SOURCES, source

Change = Callable[[QuantizedTensor, str], None]


def _resize_to_nothing(weight: QuantizedTensor, name: str) -> None:
    getattr(weight, name).resize_(0)


def _resize_to_one_row(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    inner.resize_(1, *inner.shape[1:])


def _resize_to_more(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    inner.resize_(inner.shape[0] * 8, *inner.shape[1:])


def _set_to_one_element(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    inner.set_(inner.new_zeros(1))


def _transpose_in_place(weight: QuantizedTensor, name: str) -> None:
    getattr(weight, name).t_()


def _squeeze_in_place(weight: QuantizedTensor, name: str) -> None:
    getattr(weight, name).unsqueeze_(0)


def _assign_one_row(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, getattr(weight, name)[:1].clone())


def _assign_another_dtype(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    setattr(weight, name, inner.double() if inner.is_floating_point() else inner.short())


def _assign_one_on_meta(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, getattr(weight, name).to("meta"))


def _assign_text(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, "text")


def _assign_none(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, None)


def _assign_data(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    inner.data = inner[:1].clone()


def _free(weight: QuantizedTensor, name: str) -> None:
    getattr(weight, name).untyped_storage().resize_(0)


def _assign_an_equal_one(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, getattr(weight, name).clone())


def _assign_other_numbers(weight: QuantizedTensor, name: str) -> None:
    setattr(weight, name, getattr(weight, name).flip(0).contiguous())


def _write_other_numbers(weight: QuantizedTensor, name: str) -> None:
    inner = getattr(weight, name)
    inner.copy_(inner.flip(0))


SOUND = {_assign_an_equal_one, _assign_other_numbers, _write_other_numbers}
"""After these every operation works, with the new numbers."""

UNREADABLE = {_free, _assign_text, _assign_none, _assign_one_on_meta}
"""After these torch's own operators, which say what is right below, cannot be asked: every operation is an error."""

CHANGES: list[Change] = [
    _resize_to_nothing,
    _resize_to_one_row,
    _resize_to_more,
    _set_to_one_element,
    _transpose_in_place,
    _squeeze_in_place,
    _assign_one_row,
    _assign_another_dtype,
    _assign_one_on_meta,
    _assign_text,
    _assign_none,
    _assign_data,
    _free,
    _assign_an_equal_one,
    _assign_other_numbers,
    _write_other_numbers,
]


class Case(NamedTuple):
    source: str
    tensor: str
    change: Change
    warm: bool

    def __str__(self) -> str:
        when = "after some calls" if self.warm else "before the first call"
        return f"{self.source}: {self.change.__name__.strip('_')} of {self.tensor}, {when}"


def _cases() -> list[Case]:
    found = []
    for name in SOURCES:
        weight = source(name)
        if weight is None or "master" in weight.inner_tensors or weight.dim() != 2 or not weight.is_floating_point():
            continue
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
            case.change(weight, case.tensor)
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
        if case.change in (_assign_text, _assign_none):
            return None  # Python says it
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
        return functional.linear(x, weight) if by_torch is None else reference.linear(x, weight, None)

    return run


def _embedding(weight: QuantizedTensor, by_torch: Tensor | None) -> Tensor:
    ids = torch.tensor([0, weight.scheme.shape[0] - 1])
    return functional.embedding(ids, weight) if by_torch is None else _floats(weight)[ids]


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


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(CASES[int(argument)])
        print(run(int(argument)) or "sound")
