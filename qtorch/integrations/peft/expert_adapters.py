"""LoRA on bare quantized parameters (`target_parameters`), such as fused experts (E, N, K).

PEFT computes W + B A for all experts in each forward, and autograd would keep that float tensor for the backward. Here
the module sees an `AdaptedParameter` in its place, which has no W + B A, but the products with it:

    x (W + B A)^T = x W^T + (x A^T) B^T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class AdaptedParameter:
    """`base + left @ right`, not computed: a stand-in for a quantized parameter (..., M, N) in products, with the
    factors of adapters (..., M, R) and (..., R, N)."""

    base: Any
    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.base.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def transpose(self, first: int, second: int) -> AdaptedParameter:
        if {first % self.ndim, second % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            raise NotImplementedError(f"transpose({first}, {second}): an adapted parameter exchanges its last two axes")
        return AdaptedParameter(self.base.transpose(-2, -1), self.right.mT, self.left.mT)

    def t(self) -> AdaptedParameter:
        return self.transpose(0, 1)

    @property
    def mT(self) -> AdaptedParameter:
        return self.transpose(-2, -1)

    @property
    def T(self) -> AdaptedParameter:
        return self.t()

    def __getitem__(self, key: Any) -> AdaptedParameter:
        single = isinstance(key, int) or (isinstance(key, Tensor) and key.dim() == 0 and key.dtype is not torch.bool)
        if self.ndim != 3 or not (single or isinstance(key, slice)):
            raise NotImplementedError(
                f"an adapted parameter of shape {tuple(self.shape)} is taken apart along its first axis of three, by a "
                f"number or a slice, got {key!r}"
            )
        key = int(key) if single else key
        return AdaptedParameter(self.base[key], self.left[key], self.right[key])

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.base @ other + self.left @ (self.right @ other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return other @ self.base + (other @ self.left) @ self.right

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **(kwargs or {}))
        raise NotImplementedError(
            f"{getattr(func, '__qualname__', func)} of a quantized parameter with LoRA on it (target_parameters): only "
            "products with it are there; dequantize_ the module that has it if it computes anything else"
        )


def adapted_parameter(layer: Any, adapters: list[str]) -> AdaptedParameter:
    """The parameter of a `ParamWrapper` with all of `adapters`."""
    base = layer.get_param()
    lefts, rights = [], []
    for name in adapters:
        if base.dim() == 2:
            left, right, scaling = layer.lora_B[name].weight, layer.lora_A[name].weight, layer.scaling[name]
        else:
            left, right, scaling = delta_factors(layer, name)
        lefts.append((left * scaling).to(base.dtype))
        rights.append(right.to(base.dtype))
    return AdaptedParameter(base, torch.cat(lefts, -1), torch.cat(rights, -2))


def is_swapped(layer: Any) -> bool:
    """Whether a `ParamWrapper` sees experts as (experts, outputs, inputs); 0.18 never does."""
    return bool(getattr(layer, "_did_swap_in_out_features", False))


def delta_factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """`ParamWrapper.get_delta_factors`, which 0.21 added: (left, right, scaling), left (E, M, R), right (E, R, N)."""
    if hasattr(layer, "get_delta_factors"):
        left, right, scaling = layer.get_delta_factors(adapter)
        return left, right, scaling
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
    left, right = (b, a) if is_swapped(layer) else (a.mT, b.mT)
    dtype = layer.get_param().dtype
    return left.to(dtype), right.to(dtype), layer.scaling[adapter]


def _linear(input: Tensor, weight: AdaptedParameter, bias: Tensor | None = None) -> Tensor:
    low = functional.linear(input, weight.right)
    return functional.linear(input, weight.base, bias) + functional.linear(low, weight.left)


def _product(first: Any, second: Any) -> Any:
    return first @ second if isinstance(first, AdaptedParameter) else second.__rmatmul__(first)


def _grouped(
    mat_a: Tensor, mat_b: AdaptedParameter, *, offs: Tensor, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`grouped_mm` of rows (S, M), sorted by expert, and an adapted parameter (E, M, N)."""
    y = torch._grouped_mm(mat_a, mat_b.base, offs=offs, bias=bias)
    parts, start = [], 0
    for e, stop in enumerate(offs.tolist()):
        if stop > start:
            parts.append((mat_a[start:stop] @ mat_b.left[e]) @ mat_b.right[e])
        start = stop
    y = y + torch.cat([*parts, mat_a.new_zeros(mat_a.shape[0] - start, y.shape[1])])
    return y if out_dtype is None else y.to(out_dtype)


PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    **dict.fromkeys(PRODUCTS, _product),
    Tensor.__rmatmul__: lambda second, first: _product(first, second),
    torch._grouped_mm: _grouped,
    getattr(functional, "grouped_mm", torch._grouped_mm): _grouped,
}
"""Function of torch -> what it is with an adapted parameter."""
