"""The function mode of an injection: it runs the functions of `functions` by the products of the injection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ...dtypes.autocast import autocasts, without_autocast
from ...dtypes.einsum import Product
from ..engine.conv import GroupProduct
from ..engine.spec import TrainingSpec
from .functions import FUNCTIONS, INLINED
from .sites import CallSite


class Multiplier(Protocol):
    """What the mode asks an injection."""

    def rule_at(self, function: str) -> tuple[CallSite, TrainingSpec | None]:
        """The site of the next call of `function`, and its spec; None for full precision."""

    def multiply(self, site: CallSite, spec: TrainingSpec, lhs: Tensor, rhs: Tensor) -> Tensor:
        """c[a, b] = sum_c lhs[a, c] rhs[b, c], as `spec` says."""


class _Declined(Exception):
    """The only product of a call is in full precision."""


class _Call:
    """The products of one call of a function; see `functions.Call`."""

    def __init__(self, injection: Multiplier) -> None:
        self.injection = injection
        self.full: Product = _in_full

    def product(self, function: str) -> Product:
        site, spec = self.injection.rule_at(function)
        if spec is None:
            if function not in ("scores", "values"):
                raise _Declined
            return _in_full
        return lambda a, b: self.injection.multiply(site, spec, a, b)

    def group_product(self, function: str) -> GroupProduct:
        product = self.product(function)
        return lambda a, b, group: product(a, b)


def _in_full(lhs: Tensor, rhs: Tensor) -> Tensor:
    return torch.mm(lhs, rhs.t())


class InjectionMode(TorchFunctionMode):
    """See the top of the file."""

    def __init__(self, injection: Multiplier) -> None:
        super().__init__()
        self.injection = injection

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INLINED:
            with self:
                return INLINED[func](*args, **kwargs)
        run = FUNCTIONS.get(func)
        if run is not None:
            y = self._run(run, args, kwargs)
            if y is not None:
                return y
        return func(*args, **kwargs)

    def _run(self, run: Callable[..., Tensor | None], args: Any, kwargs: Any) -> Tensor | None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        try:
            if not autocasts(device):
                return run(_Call(self.injection), *args, **kwargs)
            dtype = torch.get_autocast_dtype(device)
            args, kwargs = tree_map(lambda each: _cast(each, dtype), (args, kwargs))
            with without_autocast(device):
                return run(_Call(self.injection), *args, **kwargs)
        except _Declined:
            return None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument: matrices of weights are quantized from their own values."""
    is_weight = isinstance(value, nn.Parameter) and value.dim() > 1
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and not is_weight else value
