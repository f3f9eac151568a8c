"""Float target: the weight whose output, on the inputs of the quantized model, is nearest to the float model's output.

With X the inputs of a layer in the float model, X~ those in the model as quantized so far, and G = X^T X~, H = X~^T X~,

    |X W^T - X~ Q^T|^2 = |X~ (W* - Q)^T|^2 + constant,    W* = W G H^-1 = W + W (G - H) H^-1

so any algorithm that rounds W* with H rounds against the outputs of the float model. H is damped.

Where the output of the layer is added to a residual stream, R in the float model and R~ in the quantized one, it can
make up for what the stream lacks, too: W* gains (R - R~)^T X~ H^-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from .quadratic import factor


@jsonable
@dataclass(frozen=True)
class FloatTarget:
    """Round against the outputs of the float model.

    Args:
        strength: 0 keeps the weight, 1 is W*; between them the correction is scaled.
        damping: of H, relative to the mean of its diagonal.
        residual: make up for the error of the residual stream, in layers that write into it.

    Raises:
        ValueError: `strength` is not in [0, 1], or `damping` is negative.
    """

    strength: float = 1.0
    damping: float = 0.01
    residual: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1 or self.damping < 0:
            raise ValueError(f"float_target: strength lies in [0, 1] and damping is 0 or more, got {self}")

    def of(self, weight: Tensor, moment: Tensor, cross: Tensor, residual: Tensor | None = None) -> Tensor:
        """W + strength * (W (G - H) + D) H^-1, (N, K) fp32.

        Args:
            weight: W (N, K).
            moment: H = E[x~ x~^T], (K, K).
            cross: G = E[x x~^T], (K, K).
            residual: D = E[(r - r~) x~^T], (N, K).
        """
        weight = weight.float()
        correction = weight @ (cross.float() - moment.float())
        if residual is not None and self.residual:
            correction += residual.float()
        lower, _ = factor(moment, self.damping)
        return weight + self.strength * torch.cholesky_solve(correction.t(), lower).t()


float_target = FloatTarget
