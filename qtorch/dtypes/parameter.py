"""Quantized tensors as parameters: assignment to `requires_grad` and `data`.

A frozen weight stays frozen: `requires_grad_()` warns and has no effect, so that `nn.Parameter`,
`load_state_dict(assign=True)` and `model.requires_grad_()` work on models with quantized weights.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .base import QuantizedTensor
from .caller import calling_package
from .dispatch import implements_function


@implements_function(Tensor.requires_grad_)
def requires_grad_(tensor: QuantizedTensor, requires_grad: bool = True) -> QuantizedTensor:
    """`Tensor.requires_grad_`, without effect on a frozen weight."""
    with torch._C.DisableTorchFunctionSubclass():
        # No warning for a tensor that `nn.Parameter` is wrapping: requires_grad=True is its default.
        if requires_grad and not tensor.trains:
            if isinstance(tensor, nn.Parameter):
                _warn_frozen()
            requires_grad = False
        return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


@implements_function(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    requires_grad_(tensor, requires_grad)


def _warn_frozen() -> None:
    warnings.warn(
        "qtorch: requires_grad has no effect, a frozen quantized weight stays frozen; call quantize_ with a recipe of "
        "qtorch.training to train it in low precision, or dequantize_(model) first",
        stacklevel=5,
    )


def _warn_cast(old: torch.dtype, new: torch.dtype) -> None:
    """Say what `peft.prepare_model_for_kbit_training` does to a model whose quantization it does not know."""
    warnings.warn(
        f"qtorch: PEFT casts this quantized model from {old} to {new}, and prepare_model_for_kbit_training leaves "
        "gradient checkpointing off; call qtorch.integrations.peft.prepare_for_adapters(model) in its place",
        stacklevel=4,
    )


@implements_function(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(tensor: QuantizedTensor, data: Any) -> None:
    """``tensor.data = data``: take the inner tensors of a tensor of the same class; quantize others as `copy_` does.

    Raises:
        TypeError: `data` is not a tensor.
        ValueError: `data` has another shape.
    """
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
            _warn_cast(tensor.scheme.dtype, new.scheme.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.scheme = new.scheme
        tensor.fast_linear = tensor.fast_grouped = tensor.fast_conv = tensor.matrices = None
        for name in new.tensor_names(new.scheme):
            setattr(tensor, name, getattr(new, name))
