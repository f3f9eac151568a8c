"""The memory of a quantized tensor as such: it has none of its own, only its inner tensors have.

What reads or writes memory behind the back of operators (NumPy, DLPack, pointers) would meet an address with nothing
behind it. Here it is an error that says what to do. `untyped_storage` gives an object, which compilers describe; to use
it is an error of torch's own (see `base.without_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .base import FUNCTIONS

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
"""Methods that hand out or use the memory of a tensor."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{name}: a {type(tensor).__name__} has no memory of its own; .dequantize() gives a float tensor, "
            "qtorch.save_quantized writes quantized ones, and .inner_tensors has their codes and scales"
        )

    return refuse


FUNCTIONS.update({method: _refusal(name) for name, method in READERS.items()})
FUNCTIONS[torch.Tensor.__cuda_array_interface__.__get__] = _refusal("__cuda_array_interface__")
