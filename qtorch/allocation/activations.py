"""The error that quantizing the inputs of a weight causes: E[e e^T], e = x - quantized x, as a statistic.

With an error D = W - Q of the weight, the output W x becomes Q (x - e), so its error is D x + Q e, whose second moment
is d_n H d_n^T + q_n E[e e^T] q_n^T for output n, with x and e taken as uncorrelated.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..primitives import QuantSpec
from ..recipe import WeightRecipe
from ..statistics import SecondMoment


def activation_error(recipe: WeightRecipe) -> type[SecondMoment] | None:
    """The statistic of a recipe that quantizes activations, one class for each way; None if it does not."""
    spec = recipe.linear_spec()
    if spec.activation is None:
        return None
    scale = recipe.act_scale(torch.device("cpu")) if spec.static else None
    return _statistic(spec.activation, None if scale is None else float(scale))


@functools.cache
def _statistic(spec: QuantSpec, scale: float | None) -> type[SecondMoment]:
    class ActivationError(SecondMoment):
        """E[e e^T], (K, K), of the errors of inputs that are quantized by one spec."""

        def of(self, rows: Tensor) -> Tensor:
            return super().of(rows - _quantized(rows, spec, scale))

    return ActivationError


def _quantized(rows: Tensor, spec: QuantSpec, scale: float | None) -> Tensor:
    if scale is None:
        return spec.fake_quantize(rows)
    scales = torch.full(spec.scale_shape(rows.shape), scale, device=rows.device, dtype=torch.float32)
    return spec.dequantize(spec.quantize(rows, scales, None), scales, None)
