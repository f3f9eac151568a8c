"""_AdamW: AdamW with moments in fp32, whatever the dtype of the parameter."""

from __future__ import annotations

from torch import Tensor

from .base import LowBitAdam, Params


class _AdamW(LowBitAdam):
    """AdamW in fp32, with one rounding of the parameter a step. Arguments are those of `LowBitAdam`.

    For bf16 models: their moments keep their precision, and `bf16_stochastic_round` that of their updates.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bf16_stochastic_round: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            block_size=256,
            bf16_stochastic_round=bf16_stochastic_round,
            optim_bits=32,
        )
