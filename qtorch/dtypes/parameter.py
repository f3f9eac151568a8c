"""Quantized tensors as parameters: assignment to `requires_grad` and `data`.

A frozen weight stays frozen: to ask for its gradient, by `requires_grad_()`, `requires_grad = True` or the same of a
module, is an error. `nn.Parameter` and `load_state_dict(assign=True)`, which pass on a default or the flag of a float
parameter, make frozen parameters.
"""

import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .base import QuantizedTensor
from .dispatch import FUNCTIONS, calling_frame, calling_package, implements_function

HOW_TO_TRAIN = (
    "quantize_(model, qat(recipe)) of the float model, see dequantize_, trains it for that recipe, "
    "int8_weight_only_quantized_training() trains codes, and adapters (LoRA) train beside a frozen weight"
)

FROZEN: set[int] = set()
"""Ids of the parameters that took the place of trainable ones, and that nobody has frozen since, as PEFT does. An
optimizer that gets one of them warns: whoever made it expects to train it. (A weak reference would forbid `.to`.)"""

OPTIMIZERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers of this process."""

_PASS_A_FLAG_ON = (nn.Parameter.__new__.__code__, nn.Module._load_from_state_dict.__code__)
"""Code that sets `requires_grad` to its default, or to that of a float parameter: no request to train."""


@implements_function(Tensor.requires_grad_)
def requires_grad_(tensor: QuantizedTensor, requires_grad: bool = True) -> QuantizedTensor:
    """`Tensor.requires_grad_`."""
    if requires_grad and not tensor.trains:
        if getattr(calling_frame(), "f_code", None) not in _PASS_A_FLAG_ON:
            raise ValueError(f"requires_grad: a frozen quantized weight has no gradient ({tensor!r}); {HOW_TO_TRAIN}")
        requires_grad = False
    elif not requires_grad:
        FROZEN.discard(id(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


@implements_function(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    requires_grad_(tensor, requires_grad)


@implements_function(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(tensor: QuantizedTensor, data: Any) -> None:
    """``tensor.data = data``: take the inner tensors of a tensor of the same class; quantize others as `copy_` does."""
    if not isinstance(data, Tensor):
        raise TypeError(f".data takes a tensor, got a {type(data).__name__}")
    if tuple(data.shape) != tuple(tensor.shape):
        raise ValueError(
            f".data of a {type(tensor).__name__} of shape {tuple(tensor.shape)} takes a tensor of that shape, got "
            f"{tuple(data.shape)}"
        )
    with torch.no_grad():
        if type(data) is type(tensor):
            new = data.detach()
        else:
            new = tensor.detach().clone()
            new.copy_(data)
        assert isinstance(new, QuantizedTensor)
        if new.scheme.dtype != tensor.scheme.dtype and calling_package() == "peft":
            warnings.warn(
                f"qtorch: PEFT casts this quantized model from {tensor.scheme.dtype} to {new.scheme.dtype}, and "
                "prepare_model_for_kbit_training leaves gradient checkpointing off; call "
                "qtorch.integrations.peft.prepare_for_adapters(model) in its place",
                stacklevel=3,
            )
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.fast_linear = tensor.fast_grouped = tensor.fast_conv = tensor.matrices = None
        vars(tensor).update({name: vars(new)[name] for name in ("scheme", *new.tensor_names(new.scheme))})


# Errors for direct access to the memory of a quantized tensor, which only its inner tensors have.
# Code that reads or writes memory without an operator (NumPy, DLPack, pointers) would get an invalid address. It gets
# an error that says what to do instead.

_METHODS = ("__array__", "__dlpack__", "__dlpack_device__", "apply_", "map2_", "map_", "numpy", "storage", "tolist")
READERS: dict[str, Any] = {name: getattr(Tensor, name) for name in _METHODS}
"""Methods that return or use the memory of a tensor."""

HINTS = {
    "accelerate": "; to keep weights on disk, call qtorch.integrations.accelerate.disk_offload or dispatch_model in "
    "place of accelerate's"
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
    """The address of the first inner tensor, for `IDENTIFIERS`: equal for tied weights, 0 on the meta device."""
    if calling_package() not in IDENTIFIERS:
        _refusal("data_ptr")(tensor)
    return next(iter(tensor.inner_tensors.values())).data_ptr()


@implements_function(Tensor.untyped_storage)
def untyped_storage(tensor: QuantizedTensor) -> Any:
    """The storage without memory (`base.make_wrapper`), for torch itself, which describes storages when it traces.
    `IDENTIFIERS` get what they compare: the address of `data_ptr`, and the number of bytes."""
    caller = calling_package()
    if caller in IDENTIFIERS:
        address, size = next(iter(tensor.inner_tensors.values())).data_ptr(), tensor.nbytes
        return SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size)
    if caller != "torch":
        _refusal("untyped_storage")(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


FUNCTIONS[torch.Tensor.__cuda_array_interface__.__get__] = _refusal("__cuda_array_interface__")
