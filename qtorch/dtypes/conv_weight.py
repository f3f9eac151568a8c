"""ConvWeight: the quantized weight of a convolution, (N, C / groups, *kernel), held as the matrix (N, T * C / groups).

Codes, scales and layout are those of the matrix, T being the product of the kernel's sizes, so a convolution can have
every scheme of a linear layer: a scale per output channel, or groups along (kernel position, channel).
`kernels.im2col` defines the order of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..kernels.im2col import from_matrix, to_matrix
from ..layouts import Layout
from ..layouts.inner_tensors import Forms
from ..primitives.jsonable import jsonable
from ..primitives.scheme import Scheme
from ..primitives.spec import LinearSpec, QuantSpec
from .base import QuantizedTensor, quantized_type
from .dispatch import ATEN

aten = torch.ops.aten


@jsonable
@dataclass(frozen=True, eq=False)
class ConvScheme(Scheme):
    """Scheme of a convolution's weight (N, C / groups, *kernel), whose codes are those of a matrix.

    Raises:
        ValueError: the shape does not have 3 to 5 dimensions.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) not in (3, 4, 5):
            raise ValueError(f"the weight of a convolution has 3 to 5 dimensions, got shape {self.shape}")

    @property
    def matrix(self) -> Scheme:
        """Scheme of the matrix."""
        return Scheme(self.spec, self.codes_shape, self.dtype)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return self.shape[0], math.prod(self.shape[1:])


class ConvWeight(QuantizedTensor):
    """The quantized weight of a convolution, held as a matrix. Make one with `of` or `from_float`.

    It can be copied, moved and saved like any quantized tensor, and sliced along its first axis, the output channels.
    Other views raise an error; take them of `matrix`.
    """

    scheme_type = ConvScheme
    scheme: ConvScheme

    @classmethod
    def forms(cls, scheme: ConvScheme) -> Forms:
        return quantized_type(scheme.weight).forms(scheme.matrix)

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        return quantized_type(scheme.weight).tensor_names(scheme)

    @classmethod
    def of(cls, matrix: QuantizedTensor, shape: Sequence[int]) -> ConvWeight:
        """`matrix` (N, K) as a weight of shape (N, ...) with K elements per output channel."""
        scheme = ConvScheme(matrix.scheme.spec, tuple(shape), matrix.scheme.dtype)
        if scheme.codes_shape != matrix.scheme.shape:
            raise ValueError(
                f"a matrix of shape {matrix.scheme.shape} does not fit a weight of shape {scheme.shape}, which takes "
                f"{scheme.codes_shape}"
            )
        return cls(matrix.inner_tensors, scheme)

    @classmethod
    def from_float(cls, input: Tensor, spec: Any) -> ConvWeight:
        """Quantize `input` (N, ...) by the spec of its matrix."""
        weight = spec.weight if isinstance(spec, LinearSpec) else spec
        return cls.of(quantized_type(weight).from_float(to_matrix(input), spec), input.shape)

    @property
    def matrix(self) -> QuantizedTensor:
        """The weight as a matrix (N, K) that shares its inner tensors."""
        scheme = self.scheme.matrix
        return quantized_type(scheme.weight)(self.inner_tensors, scheme)

    def plain(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero point or table) of the matrix."""
        return self.matrix.plain()

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """The scales of the matrix."""
        return self.matrix.scales()

    def with_plain(self, plain: tuple[Tensor, Tensor, Tensor | None], spec: LinearSpec | None = None) -> ConvWeight:
        """A weight of the same shape with these codes and scales of the matrix."""
        return self._with(self.matrix.with_plain(plain, spec))

    def with_activation(self, activation: QuantSpec | None) -> ConvWeight:
        """The same weight, with its input windows quantized by `activation`."""
        return self._with(self.matrix.with_activation(activation))

    def quantized_like(self, source: Tensor) -> ConvWeight:
        """`source`, of the same shape, quantized with the spec, scale dtype and layout of this tensor."""
        matrix = source.matrix if isinstance(source, ConvWeight) else to_matrix(source)
        return self._with(self.matrix.quantized_like(matrix))

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(codes of the matrix, the other tensors by name) as they are saved."""
        return self.matrix.canonical()

    @classmethod
    def from_canonical(cls, codes: Tensor, others: dict[str, Tensor], scheme: Scheme) -> ConvWeight:
        """Inverse of `canonical`."""
        assert isinstance(scheme, ConvScheme)
        return cls.of(quantized_type(scheme.weight).from_canonical(codes, others, scheme.matrix), scheme.shape)

    def to_layout(self, layout: Layout) -> ConvWeight:
        """The same numbers in another layout."""
        return self._with(self.matrix.to_layout(layout))  # type: ignore[attr-defined]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain float tensor (N, C / groups, *kernel), in the logical dtype unless `dtype` is given."""
        return from_matrix(self.matrix.dequantize(dtype), self.scheme.shape).contiguous()

    def moved(self, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> ConvWeight:
        return self._with(self.matrix.moved(device, move, dtype))

    def _with(self, matrix: QuantizedTensor) -> ConvWeight:
        return type(self).of(matrix, self.scheme.shape)

    def _pickled(self) -> dict[str, Tensor]:
        return self.matrix._pickled()

    @classmethod
    def _from_pickled(cls, tensors: dict[str, Tensor], scheme: Scheme) -> ConvWeight:
        if not isinstance(scheme, ConvScheme):
            raise ValueError(f"a ConvWeight has a ConvScheme, got {scheme!r}")
        return cls.of(quantized_type(scheme.weight)._from_pickled(tensors, scheme.matrix), scheme.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in AS_A_WHOLE or func not in ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return _view(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ConvWeight(shape={self.scheme.shape}, held as {self.matrix!r}{grad})"


AS_A_WHOLE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.eq.Tensor,
    aten.equal.default,
    aten.is_pinned.default,
    aten.zeros_like.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}
"""Operators handled as for any quantized tensor."""

AXIS_ARGUMENT = {
    aten.index_select.default: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
"""Position of the axis among the arguments of the operators that slice along one."""


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    if isinstance(weight, ConvWeight):
        shape = weight.scheme.shape
        position = AXIS_ARGUMENT.get(func)
        if position is not None and (args[position] if len(args) > position else kwargs.get("dim", 0)) == 0:
            parts = func(weight.matrix, *args[1:], **kwargs)
            result = tree_map_only(QuantizedTensor, lambda m: ConvWeight.of(m, (m.scheme.shape[0], *shape[1:])), parts)
            return result if isinstance(result, list) else return_and_correct_aliasing(func, args, kwargs, result)
    raise NotImplementedError(
        f"{func} is not implemented for the weight of a convolution, which can be sliced along its first axis only; "
        "call .dequantize() first if you want a float tensor"
    )
