"""Errors for direct access to the memory of a quantized tensor, which only its inner tensors have.

Code that reads or writes memory without an operator (NumPy, DLPack, pointers) would get an invalid address. It gets an
error that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from .base import QuantizedTensor
from .caller import calling_package
from .dispatch import FUNCTIONS, implements_function

READERS: dict[str, Any] = {
    name: getattr(Tensor, name)
    for name in (
        "__array__",
        "__dlpack__",
        "__dlpack_device__",
        "apply_",
        "map2_",
        "map_",
        "numpy",
        "storage",
        "tolist",
    )
}
"""Methods that return or use the memory of a tensor."""


HINTS = {
    "accelerate": "; to keep weights on disk, call qtorch.integrations.accelerate.disk_offload or dispatch_model in "
    "place of accelerate's",
}
"""Package that calls -> what to write instead."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{name}: a {type(tensor).__name__} has no memory of its own; .dequantize() gives a float tensor, "
            "qtorch.save_quantized saves quantized tensors, and .inner_tensors has the codes and scales"
            + HINTS.get(calling_package(), "")
        )

    return refuse


FUNCTIONS.update({method: _refusal(name) for name, method in READERS.items()})

IDENTIFIERS = frozenset({"accelerate", "peft"})
"""Packages that compare addresses to find out which parameters are one (tied weights), and read nothing from them."""


@implements_function(Tensor.data_ptr)
def data_ptr(tensor: QuantizedTensor) -> int:
    """The address of the first inner tensor, for `IDENTIFIERS`: equal for tied weights, 0 on the meta device.

    Raises:
        TypeError: the caller is another package.
    """
    if calling_package() not in IDENTIFIERS:
        _refusal("data_ptr")(tensor)
    return next(iter(tensor.inner_tensors.values())).data_ptr()


@dataclass(frozen=True)
class _Identity:
    """What stands for the storage of a quantized tensor; see `untyped_storage`."""

    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


@implements_function(Tensor.untyped_storage)
def untyped_storage(tensor: QuantizedTensor) -> Any:
    """The storage without memory (`base.make_wrapper`), for torch itself, which describes storages when it traces.

    `IDENTIFIERS` get what they compare: the address of `data_ptr`, and the number of bytes.

    Raises:
        TypeError: the caller is another package.
    """
    caller = calling_package()
    if caller in IDENTIFIERS:
        return _Identity(next(iter(tensor.inner_tensors.values())).data_ptr(), tensor.nbytes)
    if caller != "torch":
        _refusal("untyped_storage")(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


FUNCTIONS[torch.Tensor.__cuda_array_interface__.__get__] = _refusal("__cuda_array_interface__")
