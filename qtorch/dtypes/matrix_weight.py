"""MatrixWeight: base of quantized weights whose codes are those of a matrix of another shape than the weight itself.

Codes, scales and layout are those of the matrix, so such a weight can have every scheme of a linear layer, and its
inner tensors and its files are those of a linear layer too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..primitives import LinearSpec, QuantSpec, Scheme, is_compiling, jsonable
from ..primitives.layouts import Forms, Plain
from .base import QuantizedTensor, quantized_type

aten = torch.ops.aten

M = TypeVar("M", bound="MatrixWeight")


@jsonable
@dataclass(frozen=True, eq=False)
class MatrixScheme(Scheme):
    """Scheme of a weight whose codes are those of a matrix, `codes_shape`."""

    @property
    def matrix(self) -> Scheme:
        """Scheme of the matrix."""
        return Scheme(self.spec, self.codes_shape, self.dtype)


_TYPE_OF_SCHEME: "dict[type, type[MatrixWeight]]" = {}


class MatrixWeight(QuantizedTensor):
    """A quantized weight that is held as a matrix. Make one with `of` or `from_float`.

    It can be copied, moved and saved like any quantized tensor. A subclass says how weight and matrix are related.
    """

    scheme_type: ClassVar[type] = MatrixScheme
    scheme: Any
    _matrix: QuantizedTensor | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _TYPE_OF_SCHEME[cls.scheme_type] = cls

    @staticmethod
    def to_matrix(weight: Tensor) -> Tensor:
        """The matrix of a float weight."""
        raise NotImplementedError

    @staticmethod
    def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of `to_matrix`, for a weight of this shape."""
        raise NotImplementedError

    @classmethod
    def forms(cls, scheme: MatrixScheme) -> Forms:
        return quantized_type(scheme.weight).forms(scheme.matrix)

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        return quantized_type(scheme.weight).tensor_names(scheme)

    @classmethod
    def of(cls: type[M], matrix: QuantizedTensor, shape: Sequence[int]) -> M:
        """`matrix` as a weight of shape `shape`.

        Raises:
            ValueError: the matrix does not have the shape that such a weight takes.
        """
        return cls.of_matrix(matrix, cls.scheme_type(matrix.scheme.spec, tuple(shape), matrix.scheme.dtype))

    @classmethod
    def of_matrix(cls: type[M], matrix: QuantizedTensor, scheme: Any) -> M:
        """`matrix` as a weight of this scheme, whose spec, with the layout, becomes that of the matrix."""
        if scheme.codes_shape != matrix.scheme.shape:
            raise ValueError(
                f"a matrix of shape {matrix.scheme.shape} does not fit a weight of shape {scheme.shape}, which takes "
                f"{scheme.codes_shape}"
            )
        return cls(matrix.inner_tensors, replace(scheme, spec=matrix.scheme.spec))

    @classmethod
    def from_float(cls: type[M], input: Tensor, spec: Any) -> M:
        """Quantize `input` by the spec of its matrix."""
        weight = spec.weight if isinstance(spec, LinearSpec) else spec
        return cls.of(quantized_type(weight).from_float(cls.to_matrix(input), spec), input.shape)

    @property
    def matrix(self) -> QuantizedTensor:
        """The weight as a matrix that shares its inner tensors: one object while they are the same, for kernels."""
        if is_compiling():
            return self.new_matrix()
        own = vars(self)
        known: Any = own.get("_matrix")
        if known is not None:
            of_known = vars(known)
            if all(of_known[name] is own[name] for name in known.tensor_names(of_known["scheme"])):
                return known
        own["_matrix"] = made = self.new_matrix()
        return made

    def new_matrix(self) -> QuantizedTensor:
        """`matrix`, a new object: what `__torch_dispatch__` returns must not be known to autograd yet."""
        scheme = self.scheme.matrix
        return quantized_type(scheme.weight)(self.inner_tensors, scheme)

    def plain(self) -> Plain:
        return self.matrix.plain()

    def scales(self) -> tuple[Tensor, Tensor | None]:
        return self.matrix.scales()

    def with_plain(self: M, plain: Plain, spec: LinearSpec | None = None) -> M:
        return self._with(self.matrix.with_plain(plain, spec))

    def with_activation(self: M, activation: QuantSpec | None) -> M:
        return self._with(self.matrix.with_activation(activation))

    def quantized_like(self: M, source: Tensor) -> M:
        matrix = source.matrix if isinstance(source, type(self)) else self.to_matrix(source)
        return self._with(self.matrix.quantized_like(matrix))

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self.matrix.canonical()

    @classmethod
    def from_canonical(cls: type[M], codes: Tensor, others: dict[str, Tensor], scheme: Any) -> M:
        return cls.of_matrix(quantized_type(scheme.weight).from_canonical(codes, others, scheme.matrix), scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.from_matrix(self.matrix.dequantize(dtype), self.scheme.shape).contiguous()

    def moved(self: M, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> M:
        return self._with(self.matrix.moved(device, move, dtype))

    def _with(self: M, matrix: QuantizedTensor) -> M:
        return self.of_matrix(matrix, replace(self.scheme, dtype=matrix.scheme.dtype))

    def _pickled(self) -> dict[str, Tensor]:
        return self.matrix._pickled()

    @classmethod
    def _from_pickled(cls: type[M], tensors: dict[str, Tensor], scheme: Any) -> M:
        kind: Any = type(scheme)
        if kind is not cls.scheme_type:
            raise ValueError(f"a {cls.__name__} has a {cls.scheme_type.__name__}, got {scheme!r}")
        return cls.of_matrix(quantized_type(scheme.weight)._from_pickled(tensors, scheme.matrix), scheme)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={self.scheme.shape}, held as {self.matrix!r}{grad})"


def type_of_scheme(scheme: Scheme) -> type[QuantizedTensor]:
    """The class of the tensors that have this scheme."""
    return _TYPE_OF_SCHEME.get(type(scheme)) or quantized_type(scheme.weight)


AS_A_WHOLE = {
    aten.alias.default, aten.as_strided.default, aten.clone.default, aten.constant_pad_nd.default, aten.copy_.default,
    aten.detach.default, aten.empty_like.default, aten.eq.Tensor, aten.equal.default, aten.is_pinned.default,
    aten.new_empty.default, aten.new_zeros.default, aten.zeros_like.default, aten._pin_memory.default,
    aten._to_copy.default,
}  # fmt: skip
"""Operators handled as for any quantized tensor."""
