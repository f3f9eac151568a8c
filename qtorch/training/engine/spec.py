"""GemmSpec and TrainingSpec: how the three matmuls of a contraction that trains are quantized.

    output       y[m, n]  = sum_k x[m, k] w[n, k]      lhs x     rhs w       contracts k, the features
    grad_input   dx[m, k] = sum_n g[m, n] w[n, k]      lhs g     rhs w.T     contracts n, the output features
    grad_weight  dw[n, k] = sum_m g[m, n] x[m, k]      lhs g.T   rhs x.T     contracts m, the tokens

A granularity refers to the operand as it enters its matmul: a matrix (kept axis, contracted axis). So `PerRow()` is a
scale per kept index, whichever axis of the tensor that is. The backward contracts other axes and cannot use the scales
of the forward, except with `reuse_forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...dtypes import PackedLayout
from ...layouts.packed import can_pack_bits
from ...primitives import Granularity, LinearSpec, PerRow, PerTensor, QuantSpec, Rounding, ZeroPointDomain, qdtype
from ...primitives.jsonable import jsonable
from .scale_gradient import check_scale_gradient


@jsonable
@dataclass(frozen=True)
class GemmSpec:
    """How one matmul is quantized: c[a, b] = sum_c lhs[a, c] rhs[b, c].

    Args:
        lhs, rhs: specs of the operands, None for full precision. A power-of-two scale is ``scale_dtype=float8_e8m0fnu``
            there, stochastic rounding ``rounding=Rounding.STOCHASTIC``.
        reuse_forward: for a backward matmul: rhs is the forward's operand as the forward quantized it, transposed,
            instead of quantized again. Where its scales vary along the contracted axis, they are multiplied into the
            other operand before that is quantized. `rhs` stays None.
        accumulator_dtype: None means int32 for integers and fp32 for floating-point codes; with a float dtype, operands
            are dequantized first and multiplied in it.
        output_dtype: None means that of the input, or of the weight for its gradient.

    Raises:
        ValueError: a scale that varies along the contracted axis, which no accumulator can honour; `reuse_forward`
            with a `rhs`.
    """

    lhs: QuantSpec | None = None
    rhs: QuantSpec | None = None
    reuse_forward: bool = False
    accumulator_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.reuse_forward and self.rhs is not None:
            raise ValueError("GemmSpec: reuse_forward takes rhs from the forward; leave rhs out")
        for name in ("accumulator_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"GemmSpec: {name} is a floating-point dtype or None, got {dtype}")
        if self.lhs is not None and self.rhs is not None and self.accumulator_dtype is None:
            for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)):
                check_contracted_axis(spec, name)
            if not (self.lhs.dtype.is_floating_point or self.rhs.dtype.is_floating_point):
                _check_integers(self.lhs, self.rhs)

    def __str__(self) -> str:
        rhs = "forward's" if self.reuse_forward else self.rhs
        return f"{self.lhs} x {rhs}" if self.is_quantized else "full precision"

    @property
    def is_quantized(self) -> bool:
        return self.lhs is not None or self.rhs is not None or self.reuse_forward


@jsonable
@dataclass(frozen=True)
class TrainingSpec:
    """The three matmuls of a contraction; see the top of the file.

    Args:
        scale_gradient: the scales of the forward's operands pass gradients on to the elements they are chosen from
            (see `scale_gradient`); otherwise they count as constants.

    Raises:
        ValueError: `output` reuses a forward; a backward matmul reuses an operand that the forward does not quantize,
            or whose scales it cannot honour; `scale_gradient` of scales that have none, or of operands not kept.
    """

    output: GemmSpec = GemmSpec()
    grad_input: GemmSpec = GemmSpec()
    grad_weight: GemmSpec = GemmSpec()
    scale_gradient: bool = False

    def __post_init__(self) -> None:
        if self.output.reuse_forward:
            raise ValueError("TrainingSpec: output is the forward itself; it has nothing to reuse")
        for name, gemm, operand, axis in (
            ("grad_input", self.grad_input, self.output.rhs, "n, the output features"),
            ("grad_weight", self.grad_weight, self.output.lhs, "m, the tokens"),
        ):
            if gemm.reuse_forward:
                if operand is None:
                    raise ValueError(
                        f"TrainingSpec: {name} reuses an operand that the forward leaves in full precision"
                    )
                if self.scale_gradient:
                    raise ValueError(f"TrainingSpec: scale_gradient needs the values that {name} has only codes of")
                if gemm.lhs is not None and gemm.accumulator_dtype is None:
                    _check_reuse(operand, gemm.lhs, name, axis)
        for spec in (self.output.lhs, self.output.rhs):
            if self.scale_gradient and spec is not None:
                check_scale_gradient(spec)

    def __str__(self) -> str:
        return f"output {self.output}; grad_input {self.grad_input}; grad_weight {self.grad_weight}"

    @property
    def linear_spec(self) -> LinearSpec | None:
        """The spec for inference after training, None where the forward is in full precision: weights keep their codes,
        at their true size, and activations are quantized as in training.

        A weight with a single scale keeps it once for each row, which is what integer kernels read; a rounding that was
        stochastic is to nearest.
        """
        weight, activation = self.output.rhs, self.output.lhs
        if weight is None:
            return None
        if activation is not None and isinstance(weight.granularity, PerTensor) and not weight.dtype.is_floating_point:
            weight = weight.with_granularity(PerRow())
        layout = PackedLayout() if can_pack_bits(weight.dtype) and weight.dtype.bits < 8 else None
        return LinearSpec(weight.to_nearest(), None if activation is None else activation.to_nearest(), layout=layout)


def check_contracted_axis(spec: QuantSpec, operand: str, axis: str = "the contracted axis") -> None:
    """Raise `ValueError` where `spec` gives every index of the contracted axis (the last) a scale of its own."""
    if spec.granularity.pattern(2)[1] == 1:
        raise ValueError(
            f"{operand} has a scale for each index of {axis} ({spec.granularity}), and a sum along it cannot honour "
            "that; share the scale along the last axis of the operand, by PerRow(), PerTensor() or blocks"
        )


def _check_integers(lhs: QuantSpec, rhs: QuantSpec) -> None:
    if lhs.dtype.storage != torch.int8:
        raise ValueError(f"GemmSpec: lhs of an integer product has signed codes, got {lhs.dtype}")
    a, b = (spec.granularity.pattern(2)[1] for spec in (lhs, rhs))
    if a == -1:
        return
    if lhs.has_zero_point or rhs.has_zero_point:
        raise ValueError(f"GemmSpec: where lhs has blocks, both operands are symmetric, got {lhs} and {rhs}")
    if b != -1 and a % b and b % a:
        raise ValueError(f"GemmSpec: of blocks along the contracted axis one divides the other, got {a} and {b}")


def _check_reuse(spec: QuantSpec, lhs: QuantSpec, name: str, axis: str) -> None:
    kept, contracted = spec.granularity.pattern(2)
    block = lhs.granularity.pattern(2)[1]
    if block > 0 and kept % block:
        raise ValueError(
            f"TrainingSpec: {name} contracts {axis}, in blocks of {block} in lhs, which do not divide those of the "
            f"forward's operand ({spec.granularity})"
        )
    if kept == 1 and contracted != -1:
        raise ValueError(
            f"TrainingSpec: {name} contracts {axis}, along which the scales of the forward's operand vary, and "
            f"differently for each block ({spec.granularity}); reuse_forward takes PerRow(), PerTensor() or 2-d blocks"
        )
    if spec.has_zero_point:
        raise ValueError(f"TrainingSpec: {name} can reuse symmetric operands only, the forward's is {spec}")


def int8(granularity: Granularity = PerRow(), rounding: Rounding = Rounding.NEAREST_EVEN) -> QuantSpec:
    """Symmetric int8 in [-127, 127], as in the inference recipes, so that a trained weight can be served as it is."""
    return integer(8, granularity, rounding)


def integer(bits: int, granularity: Granularity = PerRow(), rounding: Rounding = Rounding.NEAREST_EVEN) -> QuantSpec:
    """Symmetric signed integers of 2 to 8 bits without the lowest code."""
    if not 2 <= bits <= 8:
        raise ValueError(f"integers for matmuls have 2 to 8 bits, got {bits}")
    highest = 2 ** (bits - 1) - 1
    # int8 leaves quant_max at its default, as the recipes for inference do, so that the specs are equal.
    return QuantSpec(qdtype(f"int{bits}"), granularity, quant_min=-highest, rounding=rounding)


def float8(dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity = PerRow()) -> QuantSpec:
    """float8 codes, the largest at absmax."""
    return QuantSpec(qdtype(dtype), granularity, zero_point_domain=ZeroPointDomain.NONE)


def fully_quantized(
    fwd_bits: int | None = 8,
    bwd_bits: int | None = 8,
    granularity: Granularity = PerRow(),
    *,
    grad_weight: bool = True,
    stochastic_rounding: bool = False,
) -> TrainingSpec:
    """Integers for all three matmuls.

    Args:
        fwd_bits: of both operands of the forward, 2 to 8; None for full precision.
        bwd_bits: of all operands of the backward.
        granularity: of every operand, as it enters its matmul.
        grad_weight: quantize the gradient of the weight too.
        stochastic_rounding: round the gradients that come in stochastically.
    """

    def side(bits: int | None, rounding: Rounding = Rounding.NEAREST_EVEN) -> QuantSpec | None:
        return None if bits is None else integer(bits, granularity, rounding)

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
