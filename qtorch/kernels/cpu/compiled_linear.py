"""A weight and the compiled function that multiplies with it: all that a call needs besides its input.

Where the weights of a model stream through the caches, they evict the Python code that layers run, which then takes
five to ten times as long as in a loop. So from the second call of a layer on, `F.linear` calls `CompiledLinear.linear`
at once, which checks the input and little else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import ways
from .compiled_library import TYPES, library, threads
from .memory import address, empty
from .structs import pack, struct_of
from .ways import WAYS
from .weight import CompiledWeight, fits, has_short_groups

Numerics = tuple[float, ...]

FEW_ROWS = 64
"""The way is cached for up to this many rows, not for every length of a prompt."""

PLAIN = (Tensor, nn.Parameter)
"""Types of a bias that kernels read directly."""


def where_finite(y: Tensor, x: Tensor, product: Callable[[], Tensor], share: int = 1) -> Tensor:
    """`y` (M * share, N), with rows of `product()` for those that are not finite although the row of x (M, K) is:
    scales that are multiplied last, or first, may make what lies between infinite."""
    rows = torch.isfinite(x).all(1, keepdim=True).repeat_interleave(share, 0) & ~torch.isfinite(y).all(1, keepdim=True)
    return torch.where(rows, product(), y) if bool(rows.any()) else y


class CompiledLinear(CompiledWeight):
    """y (M, N) for inputs x (M, K) of one dtype; one subclass per compiled function.

    A subclass has the function's `name` in `Library`, and `call`, the struct that the function takes after the weight:
    `x`, `y`, the values of `numerics`, `way` and `threads`.

    Attributes:
        source, dtype: dtypes of x and y.
        compiled: the library, None if it is missing or does not accept the weight.
        numerics: fields of the struct that say how x is quantized.
    """

    __slots__ = (
        "_call",
        "_key",
        "_n",
        "_pack",
        "_row",
        "_types",
        "_ways",
        "_weight",
        "compiled",
        "dtype",
        "numerics",
        "source",
    )

    name: ClassVar[str]
    call: ClassVar[type]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are the dtypes of x and y, the name of x in `ways`, and numerics."""
        super().__init__(codes, scale, zero_point, *about)
        n, k, _, packed, _, _, self.source, self.dtype, kind, self.numerics = about
        self.compiled = library() if self.fields else None
        if self.compiled is not None:
            self._call, self._weight = getattr(self.compiled, self.name), pack(self.fields)
        self._pack = struct_of(self.call).pack
        self._types = TYPES[self.source], TYPES[self.dtype]
        self._n, self._row = n, (k,)
        self._key = ways.key_of(kind, packed, scale.shape[1] > 1, n * k, has_short_groups(self.fields))
        self._ways: dict[int, str] = {}

    def way(self, rows: int) -> str:
        """The way for this many rows."""
        way = self._ways.get(rows)
        if way is None:
            way = self.find_way(rows)
            if rows <= FEW_ROWS:
                self._ways[rows] = way
        return way

    def find_way(self, rows: int) -> str:
        """The way for this many rows, looked up."""
        return self.choose(rows)

    def choose(self, rows: int, suffix: str = "") -> str:
        """As `ways` has it for this kind of weight, with a suffix to its name; "torch" if nothing is compiled."""
        compiled = self.compiled
        return "torch" if compiled is None else ways.choose(compiled.instruction_set, self._key + suffix, rows)

    def run(
        self,
        x: Tensor,
        stride: int,
        rows: int,
        shape: tuple[int, ...],
        bias: Tensor | None,
        way: str,
        numerics: Numerics,
    ) -> tuple[Tensor, bool]:
        """y in this shape, from x whose rows are `stride` elements apart, by one of `ways.WAYS`; and whether all of it
        is finite."""
        y = empty(shape, self.dtype)
        x_type, y_type = self._types
        # By position, in the order of the struct's fields: making the named tuple would take four times as long.
        of_call = self._pack(
            address(x),
            x_type,
            stride,
            rows,
            address(y),
            y_type,
            self._n,
            address(bias),
            *numerics,
            WAYS[way],
            threads(),
        )
        return y, not self._call(self._weight + of_call)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor | None:
        """`F.linear` of x (..., K) with the weight that this was made from; None if one compiled call cannot do it."""
        shape = x.shape
        if (
            x.dtype is not self.dtype
            or shape[-1:] != self._row
            or not x.is_cpu
            or not x.is_contiguous()
            or not self.is_of(weight.qdata, weight.scale, weight.zero_point)
            or not (bias is None or (type(bias) in PLAIN and fits(bias, self.dtype, self._n)))
        ):
            return None
        k = shape[-1]
        rows = x.numel() // k
        way = self.way(rows)
        if way not in WAYS:
            return None
        y, finite = self.run(x, k, rows, (*shape[:-1], self._n), bias, way, self.numerics)
        return y if finite else None

    @classmethod
    def prepare(cls, weight: Any) -> None:
        """Let the next `F.linear` with this weight call `linear` of what the last one made at once."""
        made = cls.made_of(weight.qdata)
        # Only under autocast may the dtype of the input differ from that of the weight.
        if made is not None and made.source is made.dtype is weight.scheme.dtype:
            vars(weight)["fast_linear"] = made.linear
