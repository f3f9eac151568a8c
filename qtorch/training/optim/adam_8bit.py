"""Adam8bit and AdamW8bit: moments of one byte, the fourth power of equidistant numbers."""

from __future__ import annotations

from torch import Tensor

from .base import LowBitAdam, Params


class Adam8bit(LowBitAdam):
    """Adam with moments of 8 bits: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        optim_bits: int | str = 8,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            block_size=block_size,
            bf16_stochastic_round=bf16_stochastic_round,
            optim_bits=optim_bits,
        )


class AdamW8bit(LowBitAdam):
    """AdamW with moments of 8 bits: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        optim_bits: int | str = 8,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            block_size=block_size,
            bf16_stochastic_round=bf16_stochastic_round,
            optim_bits=optim_bits,
        )
