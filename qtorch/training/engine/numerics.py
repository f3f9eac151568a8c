"""Specs of operands, and of all three matmuls of a contraction, by a few words."""

from typing import Any

import torch

from ...primitives import Granularity, Noise, PerRow, QuantSpec, Rounding, ZeroPointDomain, qdtype
from .gemm_spec import GemmSpec, TrainingSpec


def int8(granularity: Granularity = PerRow(), rounding: Rounding = Rounding.NEAREST_EVEN) -> QuantSpec:
    """Symmetric int8 in [-127, 127], as in the inference recipes, so that a trained weight can be served as it is."""
    return integer(8, granularity, rounding)


def integer(
    bits: int, granularity: Granularity = PerRow(), rounding: Rounding = Rounding.NEAREST_EVEN, *,
    preserve_zero: bool = True, preserve_max_val: bool = True, noise: Noise | None = None,
) -> QuantSpec:  # fmt: skip
    """Symmetric codes of 1 to 22 bits; scale = absmax / bound (AQT, `int_numerics.IntSymmetric`).

        preserve_zero   preserve_max_val   codes                        bound
        True            True               integers, without -2^(b-1)   2^(b-1) - 1
        True            False              integers, without -2^(b-1)   2^(b-1) - 1/2
        False           True               half-integers                2^(b-1) - 1/2
        False           False              half-integers                2^(b-1)

    Up to 8 bits products sum integers; beyond, and of half-integers, they are computed in fp32.

    Args:
        preserve_zero: 0.0 is a code; otherwise codes lie on halves, and one bit is the sign.
        preserve_max_val: the largest magnitude is the value of the outermost code, instead of the edge of its bucket.
        noise: of stochastic rounding.

    Raises:
        ValueError: another number of bits; one bit with a zero.
    """
    if not 1 <= bits <= 22:
        raise ValueError(f"symmetric codes have 1 to 22 bits, got {bits}")
    options: Any = {"rounding": rounding, "preserve_max_val": preserve_max_val, "noise": noise}
    if not preserve_zero:
        return QuantSpec(qdtype(f"midrise{bits}"), granularity, zero_point_domain=ZeroPointDomain.NONE, **options)
    if bits == 1:
        raise ValueError("one bit has no zero: integer(1, preserve_zero=False) is the sign")
    # int8 leaves quant_max at its default, as the recipes for inference do, so that the specs are equal.
    return QuantSpec(qdtype(f"int{bits}"), granularity, quant_min=1 - 2 ** (bits - 1), **options)


def float8(dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity = PerRow()) -> QuantSpec:
    """float8 codes, the largest at absmax."""
    return QuantSpec(qdtype(dtype), granularity, zero_point_domain=ZeroPointDomain.NONE)


def fully_quantized(
    fwd_bits: int | None = 8, bwd_bits: int | None = 8, granularity: Granularity = PerRow(), *,
    grad_weight: bool = True, stochastic_rounding: bool = False, preserve_max_val: bool = True,
) -> TrainingSpec:  # fmt: skip
    """Integers for all three matmuls.

    Args:
        fwd_bits: of both operands of the forward, 1 to 22, 1 being the sign; None for full precision.
        bwd_bits: of all operands of the backward.
        granularity: of every operand, as it enters its matmul.
        grad_weight: quantize the gradient of the weight too.
        stochastic_rounding: round the gradients that come in stochastically.
        preserve_max_val: see `integer`; AQT's own `fully_quantized` has False.
    """

    def side(bits: int | None, rounding: Rounding = Rounding.NEAREST_EVEN) -> QuantSpec | None:
        if bits is None:
            return None
        return integer(bits, granularity, rounding, preserve_zero=bits > 1, preserve_max_val=preserve_max_val)

    rounding = Rounding.STOCHASTIC if stochastic_rounding else Rounding.NEAREST_EVEN
    backward = GemmSpec(side(bwd_bits, rounding), side(bwd_bits))
    return TrainingSpec(GemmSpec(side(fwd_bits), side(fwd_bits)), backward, backward if grad_weight else GemmSpec())


def fully_quantized_float8(
    granularity: Granularity = PerRow(),
    forward: torch.dtype = torch.float8_e4m3fn,
    gradient: torch.dtype = torch.float8_e5m2,
    *,
    grad_weight: bool = True,
) -> TrainingSpec:
    """float8 for all three matmuls: `forward` for weights and activations, `gradient` for gradients that come in."""
    values, gradients = float8(forward, granularity), float8(gradient, granularity)
    backward = GemmSpec(gradients, values)
    return TrainingSpec(GemmSpec(values, values), backward, backward if grad_weight else GemmSpec())
