"""ConvWeight: the quantized weight of a convolution, (N, C / groups, *kernel), held as the matrix (N, T * C / groups).

Codes, scales and layout are those of the matrix, T being the product of the kernel's sizes, so a convolution can have
every scheme of a linear layer: a scale per output channel, or groups along (kernel position, channel).
`kernels.im2col` defines the order of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..kernels.im2col import from_matrix, to_matrix
from ..primitives.jsonable import jsonable
from .base import QuantizedTensor
from .dispatch import ATEN
from .matrix_weight import AS_A_WHOLE, MatrixScheme, MatrixWeight
from .parts import part_of

aten = torch.ops.aten


@jsonable
@dataclass(frozen=True, eq=False)
class ConvScheme(MatrixScheme):
    """Scheme of a convolution's weight (N, C / groups, *kernel), whose codes are those of a matrix.

    Raises:
        ValueError: the shape does not have 3 to 5 dimensions.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) not in (3, 4, 5):
            raise ValueError(f"the weight of a convolution has 3 to 5 dimensions, got shape {self.shape}")

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return self.shape[0], math.prod(self.shape[1:])


class ConvWeight(MatrixWeight):
    """The quantized weight of a convolution, held as a matrix. Make one with `of` or `from_float`.

    It can be copied, moved and saved like any quantized tensor, and sliced along its first axis, the output channels.
    That of a depthwise one, (N, 1, k), can be squeezed to (N, k), its matrix. Other views raise an error; take them of
    `matrix`.
    """

    scheme_type = ConvScheme
    scheme: ConvScheme

    @staticmethod
    def to_matrix(weight: Tensor) -> Tensor:
        return to_matrix(weight)

    @staticmethod
    def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return from_matrix(matrix, shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in AS_A_WHOLE or func not in ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return _view(func, args, kwargs or {})


def _of_rows(weight: ConvWeight, matrix: QuantizedTensor) -> ConvWeight:
    """`matrix`, rows of that of `weight`, as such a weight."""
    return part_of(weight, ConvWeight.of(matrix, (matrix.scheme.shape[0], *weight.scheme.shape[1:])))


def as_conv_weight(weight: Any) -> Any:
    """A frozen quantized tensor (N, 1, *kernel) as the weight of a depthwise convolution: models view such weights, or
    parameters (N, k), as they need them. Anything else is returned as it is."""
    takes = isinstance(weight, QuantizedTensor) and not weight.trains and not isinstance(weight, ConvWeight)
    if not takes or len(weight.scheme.shape) < 3 or weight.scheme.shape[1] != 1:
        return weight
    shape = weight.scheme.shape
    return ConvWeight.of(weight.reshape(shape[0], math.prod(shape[2:])), shape)


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
        if func is aten.view.default and tuple(args[1]) == shape:
            return aten.alias.default(weight)
        if func is aten.squeeze.dim and len(shape) == 3 and shape[1] == 1 and args[1] % 3 == 1:
            return weight.new_matrix()
        position = AXIS_ARGUMENT.get(func)
        if position is not None and (args[position] if len(args) > position else kwargs.get("dim", 0)) == 0:
            parts = func(weight.matrix, *args[1:], **kwargs)
            result = tree_map_only(QuantizedTensor, lambda m: _of_rows(weight, m), parts)
            return result if isinstance(result, list) else return_and_correct_aliasing(func, args, kwargs, result)
    raise NotImplementedError(
        f"{func} is not implemented for the weight of a convolution, which can be sliced along its first axis only; "
        "call .dequantize() first if you want a float tensor"
    )
