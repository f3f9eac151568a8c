"""Tables of the torch functions and aten operators that quantized tensors implement, filled by decorators."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..kernels.registry import fresh
from ..primitives.tracing import F, is_compiling, run_on_constants, transforms_active

ATEN: dict[Any, Callable[..., Any]] = {}
"""aten overload -> handler(func, args, kwargs)."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""torch function or method -> replacement of the same signature."""

TRACED_VIEWS: dict[Any, Callable[..., Any]] = {}
"""torch function -> what runs in its place on a frozen weight while torch.export traces; see `views`."""

OTHER_VIEWS = {Tensor.movedim, Tensor.permute, Tensor.flatten, torch.movedim, torch.permute, torch.flatten}
"""Views that weights in training have beside those."""

LEFT_OUT = 'a layer whose weight a model uses so stays in floating point by {"its name": None, ".*": recipe}'
"""What to do about an operation that quantized weights do not have."""


def _decorator(table: dict[Any, Callable[..., Any]]) -> Callable[..., Callable[[F], F]]:
    """A decorator that enters a function into a table, under all keys that it is given."""

    def implements(*keys: Any) -> Callable[[F], F]:
        def decorate(function: F) -> F:
            table.update(dict.fromkeys(keys, function))
            return function

        return decorate

    return implements


implements_aten = _decorator(ATEN)
implements_function = _decorator(FUNCTIONS)
implements_traced_view = _decorator(TRACED_VIEWS)


def run(handler: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The replacement of a torch function, whose result callers change in place as that of the function; what they give
    as `out` is a view where they made it one."""
    result = handler(*args, **kwargs)
    if type(result) is Tensor and (is_compiling() or result._is_view()) and "out" not in kwargs:
        return fresh(result)
    return result


def run_below(kind: type, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A torch function of a quantized tensor of class `kind` that has no replacement, as the aten operators that it
    calls."""
    if is_compiling() and (func in TRACED_VIEWS or func in OTHER_VIEWS):
        tensor = args[0]
        # torch.export runs the model under modes of its own (strict=False), which know the inner tensors of parameters
        # and no wrapper that is made of them on the way.
        by_modes = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if by_modes and tensor.trains:
            raise NotImplementedError(
                f"torch.export cannot follow a view of a weight in training, here a {kind.__name__}; "
                "quantize_(model, convert()) first, or torch.export.export(..., strict=True)"
            )
        if func in TRACED_VIEWS and (by_modes or tensor.scheme.layout.traces_views):
            return TRACED_VIEWS[func](*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if transforms_active() and all(isinstance(arg, kind) or not isinstance(arg, Tensor | list) for arg in args):
            return run_on_constants(func, args, kwargs)  # a view, for example: a quantized tensor again
        return func(*args, **kwargs)


def autocasts(device: str) -> bool:
    """Whether autocast casts inputs on this type of device for products: they and the bias, nothing inside a kernel."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which inputs on this type of device are not cast."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def cast_for_product(
    product: Callable[..., Tensor], input: Tensor, weight: Any, bias: Tensor | None, *arguments: Any
) -> Tensor:
    """`product(input, weight, bias, *arguments)`. Under autocast, input and bias are cast unless in fp64, the weight is
    not, and the product runs without autocast: what it computes in fp32, such as sums of integers, stays in fp32."""
    device = input.device.type
    if not autocasts(device) or input.dtype is torch.float64:
        return product(input, weight, bias, *arguments)
    input = input.to(torch.get_autocast_dtype(device))
    bias = None if bias is None else bias.to(input.dtype)
    with torch.autocast(device, enabled=False):
        return product(input, weight, bias, *arguments)


def calling_frame() -> FrameType | None:
    """The innermost call that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "qtorch":
        frame = frame.f_back
    return frame


def calling_package() -> str:
    """The name of the package whose code has called this one; empty if there is none."""
    frame = calling_frame()
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
