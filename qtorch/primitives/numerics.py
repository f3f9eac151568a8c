"""Numerics: the part of `QuantSpec` that scale rules and double quantization need; it breaks their import cycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from .affine import MappingType, ZeroPointDomain
from .granularity import Block, Granularity
from .qdtype import QDType

N = TypeVar("N", bound="Numerics")


class Numerics(Protocol):
    """Protocol of the part of `QuantSpec` that does not depend on how ranges are chosen; see there."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def dtype(self) -> QDType: ...

    @property
    def granularity(self) -> Granularity: ...

    @property
    def mapping(self) -> MappingType: ...

    @property
    def zero_point_domain(self) -> ZeroPointDomain: ...

    @property
    def code_range(self) -> tuple[float, float]: ...

    @property
    def has_zero_point(self) -> bool: ...

    @property
    def scale_spec(self) -> Numerics | None: ...

    def block_size(self, shape: Sequence[int]) -> Block: ...

    def choose_qparams(self, input: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def choose_qparams_from_range(
        self, min_val: Tensor, max_val: Tensor, input_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]: ...

    def quantize(self, input: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor: ...

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor: ...

    def with_granularity(self: N, granularity: Granularity) -> N: ...

    def to_nearest(self: N) -> N: ...
