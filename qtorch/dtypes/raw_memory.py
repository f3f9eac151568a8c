"""Errors for direct access to the memory of a quantized tensor, which only its inner tensors have.

Code that reads or writes memory without an operator (NumPy, DLPack, pointers) would get an invalid address. It gets an
error that says what to do instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from .dispatch import FUNCTIONS, implements_function

READERS: dict[str, Any] = {
    name: getattr(Tensor, name)
    for name in (
        "__array__",
        "__dlpack__",
        "__dlpack_device__",
        "apply_",
        "data_ptr",
        "map2_",
        "map_",
        "numpy",
        "storage",
        "tolist",
    )
}
"""Methods that return or use the memory of a tensor."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{name}: a {type(tensor).__name__} has no memory of its own; .dequantize() gives a float tensor, "
            "qtorch.save_quantized saves quantized tensors, and .inner_tensors has the codes and scales"
        )

    return refuse


FUNCTIONS.update({method: _refusal(name) for name, method in READERS.items()})


@implements_function(Tensor.untyped_storage)
def untyped_storage(tensor: Tensor) -> Any:
    """The storage without memory (`base.without_memory`), for torch itself, which describes storages when it traces.

    Raises:
        TypeError: the caller is not torch.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) == "qtorch":
        frame = frame.f_back
    if _package(frame) != "torch":
        _refusal("untyped_storage")(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


FUNCTIONS[torch.Tensor.__cuda_array_interface__.__get__] = _refusal("__cuda_array_interface__")
