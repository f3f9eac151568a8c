"""Registration of external implementations of `F.linear` for an `AffineQuantizedTensor`, with torchao 0.6's names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .affine import AffineQuantizedTensor

Condition = Callable[[Tensor, AffineQuantizedTensor, Tensor | None], bool]
Implementation = Callable[[Tensor, AffineQuantizedTensor, Tensor | None], Tensor]

dispatches: dict[Condition, Implementation] = {}
"""In the order of registration."""


def register_aqt_quantized_linear_dispatch(dispatch_condition: Condition, impl: Implementation) -> None:
    """Call `impl(input, weight, bias)` for `F.linear` whenever `dispatch_condition(input, weight, bias)` is true.

    Conditions are tested before the kernel registry, in the order of registration. Prefer to register a kernel for a
    scheme (`qtorch.kernels.register`): it is looked up once instead of on each call, and `explain` shows it.
    """
    dispatches[dispatch_condition] = impl


def deregister_aqt_quantized_linear_dispatch(dispatch_condition: Condition) -> None:
    """Undo `register_aqt_quantized_linear_dispatch`.

    Raises:
        ValueError: that condition is not registered.
    """
    if dispatches.pop(dispatch_condition, None) is None:
        raise ValueError("deregister_aqt_quantized_linear_dispatch: this dispatch condition is not registered")
