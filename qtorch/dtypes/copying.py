"""Copies and pickles of quantized tensors.

A pickle holds the name of the class, the inner tensors, the scheme as JSON text, and the user's attributes. `rebuild`
validates all of them when it loads.
"""

import copy
import functools
import json
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..primitives import files, from_json, to_json
from ..primitives.layouts.base import Forms, check_inner_tensors, check_plain_tensors

_TYPES: dict[str, Any] = {}


class Copied:
    """Mixin of `QuantizedTensor` for `copy`, `pickle` and `torch.save`; it registers subclasses by name."""

    scheme_type: ClassVar[type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _TYPES[cls.__name__] = cls
        ForkingPickler.register(cls, _sent)

    def __copy__(self: Any) -> Any:
        with torch.no_grad():
            return _finished(self.map_inner(lambda tensor: tensor), *_flags(self), self._extra_state())

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made = self.map_inner(lambda tensor: copy.deepcopy(tensor, memo))
            memo[id(self)] = _finished(made, *_flags(self), copy.deepcopy(self._extra_state(), memo))
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        scheme = json.dumps(to_json(self.scheme))
        tensors = {name: _as_bytes(tensor) for name, tensor in self._pickled().items()}
        return rebuild, (type(self).__name__, tensors, scheme, *_flags(self), self._extra_state())

    def _pickled(self: Any) -> dict[str, Tensor]:
        """The tensors that a pickle holds."""
        tensors: dict[str, Tensor] = self.inner_tensors
        return tensors

    @classmethod
    def _from_pickled(cls: Any, tensors: dict[str, Tensor], scheme: Any) -> Any:
        """Inverse of `_pickled`, which validates tensors from a file."""
        check_inner_tensors(tensors, forms_of(cls, scheme), scheme)
        return cls(tensors, scheme)

    def _extra_state(self) -> dict[str, Any]:
        """Attributes that the user or a framework has set on the tensor."""
        return {name: value for name, value in vars(self).items() if not self._has_own(name)}

    def _has_own(self: Any, name: str) -> bool:
        """Whether an attribute belongs to the class or its inner tensors rather than to the user."""
        return name in {*self.tensor_names(self.scheme), "scheme", "_is_param"} or hasattr(type(self), name)


def _sent(tensor: Any) -> tuple[Any, ...]:
    """How torch.multiprocessing sends a tensor: its inner tensors, whose memory both processes share. It is not packed
    anew, as a file is for another machine."""
    return _received, (type(tensor), tensor.inner_tensors, tensor.scheme, *_flags(tensor), tensor._extra_state())


def _received(cls: Any, tensors: dict[str, Tensor], scheme: Any, *state: Any) -> Any:
    """Inverse of `_sent`."""
    return _finished(cls(tensors, scheme), *state)


def _flags(tensor: Tensor) -> tuple[bool, bool]:
    """(whether it requires a gradient, whether it is a parameter)."""
    return tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def _finished(tensor: Any, requires_grad: bool, is_parameter: bool, state: dict[str, Any]) -> Any:
    """The tensor with these flags and these attributes of the user."""
    made = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
    vars(made).update(state)
    return made


@functools.lru_cache(maxsize=4096)
def forms_of(cls: Any, scheme: Any) -> Forms:
    """`cls.forms(scheme)`, cached."""
    if type(scheme) is not cls.scheme_type:
        raise ValueError(f"a {cls.__name__} has a {cls.scheme_type.__name__}, got {scheme!r}")
    return cls.forms(scheme)


def rebuild(
    type_name: str, tensors: dict[str, Tensor], scheme: str, requires_grad: bool, is_parameter: bool,
    state: dict[str, Any],
) -> Any:  # fmt: skip
    """Rebuild a quantized tensor from a pickle: the inverse of `Copied.__reduce_ex__`, and the only function it calls.

    The scheme is JSON text, so that checkpoints do not depend on where classes live or on the order of their fields.
    The tensors must match the scheme, and `state` may add attributes but not replace those that the tensor has.

    Raises:
        ValueError: the file does not hold a quantized tensor of this version of qtorch.
    """
    cls = _TYPES.get(type_name) if isinstance(type_name, str) else None
    if cls is None:
        raise ValueError(f"the file holds a {type_name}, which this version of qtorch does not know")
    try:
        if not isinstance(requires_grad, bool) or not isinstance(is_parameter, bool):
            raise ValueError(f"flags must be True or False, got {type(requires_grad)} and {type(is_parameter)}")
        if not isinstance(tensors, dict):
            raise ValueError(f"its inner tensors are a dict, got a {type(tensors).__name__}")
        tensors = {name: _of_bytes(tensor) for name, tensor in tensors.items()}
        check_plain_tensors(tensors)
        inner = {name: t.detach() if t is not None and t.requires_grad else t for name, t in tensors.items()}
        result = cls._from_pickled(inner, from_json(files.parse_json(scheme)))
        if requires_grad and not result.dtype.is_floating_point:
            raise ValueError(f"a tensor of {result.dtype} has no gradient")
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError(f"its attributes must be a dict with names, got a {type(state).__name__}")
        if taken := [name for name in state if result._has_own(name)]:
            raise ValueError(f"it would replace {', '.join(taken)}, which a {type_name} has itself")
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"the file holds a {type_name} that is damaged: {error}") from error
    return _finished(result, requires_grad, is_parameter, state)


SMALL_FLOATS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
}
"""Dtypes that Python's pickler cannot read again (torch 2.13): they go as (bytes, name of the dtype)."""


def _as_bytes(tensor: Tensor) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    return (tensor.view(torch.uint8), name) if name in SMALL_FLOATS else tensor


def _of_bytes(stored: Any) -> Any:
    """Inverse of `_as_bytes`; pickles of former versions hold the tensor itself."""
    if not isinstance(stored, tuple):
        return stored
    if len(stored) != 2 or stored[1] not in SMALL_FLOATS or getattr(stored[0], "dtype", None) is not torch.uint8:
        raise ValueError(f"an inner tensor is a tensor, or bytes with the name of a dtype, got {stored!r:.80}")
    return stored[0].view(SMALL_FLOATS[stored[1]])


# Pickles of all versions refer to it by this module.
rebuild.__module__ = f"{__package__}.base"
torch.serialization.add_safe_globals([rebuild])
