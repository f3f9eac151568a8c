"""Weights: where the float weights of a model are while it is calibrated: in memory, or in a file, block by block."""

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.tensor_file import places_of
from ..captures import memory_has_moved
from .trace import candidates


class Weights:
    """Weights in memory, where quantized ones `stay`, too; otherwise those of a block that is done are let go."""

    stay = True

    def loaded(self, block: nn.Module | None) -> AbstractContextManager[None]:
        """With the weights of a block in memory."""
        return nullcontext()


class Streamed(Weights):
    """Weights that are read by their names when a block runs, and let go when it has run; a context manager.

    While it is open, the parameters of the model, which is on the meta device, are on the CPU: those outside of blocks
    have their values, those of blocks are NaN, in a few bytes, unless the block runs. `stored` says whether there is a
    value of a name.
    """

    stay = False

    def __init__(self, model: nn.Module, read: Callable[[str], Tensor], stored: Callable[[str], bool]) -> None:
        self.model, self.read = model, read
        places = list(places_of(model))
        self.before = [place for _, place in places]
        self.parameters: dict[str, nn.Parameter] = {}
        self.replaced: dict[int, Tensor] = {}
        for name, (_, _, tensor) in places:
            if id(tensor) in self.replaced or not stored(name):
                continue  # a tied parameter is stored under one of its names
            if isinstance(tensor, nn.Parameter):
                self.parameters[name] = nn.Parameter(_nothing(tensor), requires_grad=False)
                self.replaced[id(tensor)] = self.parameters[name]
            else:
                self.replaced[id(tensor)] = read(name).to(tensor.dtype)
        if missing := [name for name, (_, _, t) in places if t.is_meta and id(t) not in self.replaced]:
            raise ValueError(f"the checkpoint has no {', '.join(missing[:4])}, which the model has on the meta device")
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.users: dict[int, int] = {}
        self.blocks = candidates(model)
        self.handles: list[Any] = []

    def _put(self, replaced: Mapping[int, Tensor]) -> None:
        for module, attribute, tensor in self.before:
            table = module._parameters if attribute in module._parameters else module._buffers
            table[attribute] = replaced.get(id(tensor), tensor)  # type: ignore[assignment]

    def __enter__(self) -> "Streamed":
        self._put(self.replaced)
        inside = {id(parameter) for block in self.blocks for parameter in block.parameters()}
        for parameter in self.parameters.values():
            if id(parameter) not in inside:
                self._load(parameter)
        for block in self.blocks:
            self.handles.append(block.register_forward_pre_hook(self._begins))
            self.handles.append(block.register_forward_hook(self._ends, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        self._put({})

    @contextmanager
    def loaded(self, block: nn.Module | None) -> Iterator[None]:
        mine = [] if block is None else self._of(block)
        self._use(mine)
        try:
            yield
        finally:
            self._leave(mine)

    def _of(self, block: nn.Module) -> list[nn.Parameter]:
        """The float parameters of a block, also where quantized ones are in their place now."""
        prefix = next(name for name, module in self.model.named_modules() if module is block)
        by_name = [parameter for name, parameter in self.parameters.items() if name.startswith(f"{prefix}.")]
        all_of = {id(parameter): parameter for parameter in [*by_name, *block.parameters()]}
        return [parameter for key, parameter in all_of.items() if key in self.names]

    def _begins(self, block: nn.Module, args: Any) -> None:
        if "forward" not in vars(block):  # or else it returns what is kept
            self._use(self._of(block))

    def _ends(self, block: nn.Module, args: Any, output: Any) -> None:
        if "forward" not in vars(block):
            self._leave(self._of(block))

    def _use(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.users.get(id(parameter)):
                self._load(parameter)
            self.users[id(parameter)] = self.users.get(id(parameter), 0) + 1

    def _leave(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self.users[id(parameter)] = max(0, self.users.get(id(parameter), 0) - 1)
            if not self.users[id(parameter)]:
                parameter.data = _nothing(parameter)
        memory_has_moved()
        if (trim := _malloc_trim()) is not None:
            # Give the pages of freed tensors back; else each block leaves some in the heap of the C library.
            trim(0)

    def _load(self, parameter: nn.Parameter) -> None:
        value = self.read(self.names[id(parameter)])
        if value.shape != parameter.shape:
            raise ValueError(f"{self.names[id(parameter)]} has shape {(*value.shape,)}, not {(*parameter.shape,)}")
        parameter.data = value.to(parameter.dtype)
        memory_has_moved()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of the C library of Linux, None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def _nothing(tensor: Tensor) -> Tensor:
    """A tensor of this shape without memory, of NaN if it can be."""
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full((1,) * max(1, tensor.dim()), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
