"""The model that the quantize_ tests quantize, and its state to compare."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from qtorch import int8_weight_only
from qtorch.dtypes import QuantizedTensor

INT8 = int8_weight_only()

State = list[tuple[str, object]]


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 96)
        self.down = nn.Linear(96, width, bias=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.down(self.up(x).relu())


def state_of(model: nn.Module) -> State:
    """Every parameter, buffer and hook, by identity."""
    state: State = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, module in model.named_modules():
        state += [(f"{name} {id(key)}", hook) for key, hook in module._forward_hooks.items()]
        state.append((f"{name}.training", module.training))
    return state


def same(before: State, after: State) -> bool:
    return len(before) == len(after) and all(a == c and b is d for (a, b), (c, d) in zip(before, after))


def lines_run(
    action: Callable[[], object], files: Callable[[str], bool], at: int = 0,
    raises: type[BaseException] = KeyboardInterrupt,
) -> int | None:  # fmt: skip
    """Run it with an exception at line `at`, from 1 on, of those in these files, counted as they are run: their number,
    None if it was interrupted."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if not files(frame.f_code.co_filename):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise raises
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except raises:
        return None
    finally:
        sys.settrace(old)
    return seen


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same weights, bit for bit: codes, scales, schemes and floats."""
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, mine in states[0].items():
        theirs = states[1][name]
        assert type(mine) is type(theirs), name
        assert mine.dtype is theirs.dtype, name
        if not isinstance(mine, QuantizedTensor):
            assert torch.equal(mine, theirs), name
            continue
        assert mine.scheme == theirs.scheme, name
        for part, inner in mine.inner_tensors.items():
            assert torch.equal(inner, theirs.inner_tensors[part]), (name, part)
