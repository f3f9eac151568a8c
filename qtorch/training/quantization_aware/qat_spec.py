"""QATSpec: fake quantization without state. Scales are chosen from the values of each call, as in inference; a static
scale is given by the recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.ops.block_mm import pad_to_blocks
from ...kernels.ops.quantize import quantize_rows, quantize_static, without_lost_rows
from ...primitives import LinearSpec, PerAxis, QuantSpec
from ...primitives.jsonable import jsonable
from ...recipes.base import WeightRecipe
from ..weights.base import TrainingWeight, floats_of
from .converted import sums_integers
from .fake_quantize import FakeQuantized, Scaled, clips, fake_quantize, straight_through_rounding


@jsonable
@dataclass(frozen=True)
class QATSpec:
    """How a weight is fake-quantized in training, and what it converts to; a `Quantization` of its layer.

    Args:
        recipe: for inference; see `qat`.
        compute_dtype: see `qat`.
        transposed: this describes a view of a weight whose last two axes are exchanged.
        partial: this describes a view that lacks a part of the weight on which its codes depend.
    """

    recipe: WeightRecipe
    compute_dtype: torch.dtype | None = None
    transposed: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        # Made once: it is read on each call, and by compilers that trace it.
        object.__setattr__(self, "_linear_spec", self.recipe.linear_spec())
        if getattr(self.linear_spec.weight, "rotation", 0):
            raise ValueError(f"qat: {self.recipe} rotates blocks, which is not trained; leave rotated=True out")

    @property
    def linear_spec(self) -> LinearSpec:
        return self._linear_spec  # type: ignore[attr-defined]

    @property
    def sums_integers(self) -> bool:
        """Whether layers add up products of codes, and not of what they stand for."""
        return self.compute_dtype is None and sums_integers(self.linear_spec)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """fp32 for fake-quantized activations, as in the kernels that dequantize them."""
        widens = self.compute_dtype is None and self.linear_spec.activation is not None
        return torch.float32 if widens and not self.sums_integers else None

    @property
    def precedes_windows(self) -> bool:
        spec = self.linear_spec
        return spec.activation is None or (not spec.static and spec.activation.granularity == PerAxis(0))

    @property
    def rows_are_independent(self) -> bool:
        """Whether the codes of a row depend on that row alone."""
        weight = self.linear_spec.weight
        return weight.granularity.pattern(2)[0] == 1 and weight.scale_spec is None

    def of_whole(self) -> QATSpec:
        """The spec of the weight that this one is a view of."""
        return replace(self, transposed=False, partial=False)

    def quantize_weight(self, matrix: Tensor) -> FakeQuantized:
        return self._quantize_weight(matrix, self.product_dtype, self.sums_integers)

    def weight_values(self, weight: Tensor) -> Tensor:
        """`weight`, plain or in training, fake-quantized; differentiable."""
        return self._quantize_weight(weight, None, multiplied=False).values

    def _quantize_weight(self, weight: Tensor, dtype: torch.dtype | None, multiplied: bool) -> FakeQuantized:
        if self.transposed:
            whole = self.of_whole()._quantize_weight(weight.transpose(-2, -1), dtype, multiplied)
            w = None if whole.codes is None else whole.codes.transposed(weight.shape[-2])
            return FakeQuantized(whole.values.transpose(-2, -1), w)
        if self.recipe.prunes:
            weight = self.recipe.prune(floats_of(weight))
        spec = self.linear_spec.weight
        with torch.no_grad():
            values = weight.floats() if isinstance(weight, TrainingWeight) else weight
            scale, other = self._joined("output.rhs", values, spec) or spec.choose_qparams(values)
            codes = None if self.compute_dtype else spec.quantize(values, scale, other)
        return self._fake_quantize(weight, values, Scaled(spec, scale, other, codes), clips(spec), dtype, multiplied)

    def quantize_input(self, rows: Tensor) -> FakeQuantized:
        spec = self.linear_spec.activation
        if spec is None:
            return FakeQuantized(rows)
        count, length = rows.shape
        padded = pad_to_blocks(rows, spec.granularity)
        with torch.no_grad():
            scaled = self._scale_input(padded, spec)
        leaves_some = self.linear_spec.static or clips(spec)
        x_hat, codes, _ = self._fake_quantize(
            padded, padded, scaled, leaves_some, self.product_dtype, self.sums_integers
        )
        return FakeQuantized(x_hat[:count, :length], None if codes is None else codes._replace(kept=count), scaled)

    def _scale_input(self, rows: Tensor, spec: QuantSpec) -> Scaled:
        given = self.recipe.act_scale(rows.device)
        if given is None and (joined := self._joined("output.lhs", rows, spec)) is not None:
            if self.compute_dtype is not None:
                return Scaled(spec, *joined)
            codes, scale, zero_point = quantize_static(rows, spec, *joined)
            return Scaled(spec, scale, zero_point, codes)
        if self.compute_dtype is not None:
            scale, zero_point = spec.choose_qparams(without_lost_rows(rows, spec)) if given is None else (given, None)
            return Scaled(spec, scale, zero_point)
        quantized = quantize_rows(rows, spec) if given is None else quantize_static(rows, spec, given, None)
        codes, scale, zero_point = quantized
        return Scaled(spec, scale, zero_point, codes)

    def _joined(self, operand: str, x: Tensor, spec: Any) -> tuple[Tensor, Tensor | None] | None:
        """Scale and zero point of an operand that `x` is only a part of; see `split`."""
        return None

    def _fake_quantize(
        self,
        input: Tensor,
        values: Tensor,
        scaled: Scaled,
        leaves_some: bool,
        dtype: torch.dtype | None,
        multiplied: bool,
    ) -> FakeQuantized:
        """Args: leaves_some: elements outside the range of the codes get no gradient."""

        def x_hat() -> Tensor:
            mask = (lambda unclipped: unclipped) if leaves_some else None
            compute = self.compute_dtype or torch.float32
            return straight_through_rounding(input, values, scaled, mask, dtype, compute)

        return fake_quantize(values, scaled, x_hat, multiplied)

    def __str__(self) -> str:
        views = [name for name in ("transposed", "partial") if getattr(self, name)]
        return " ".join([f"qat({self.recipe})", *views])
