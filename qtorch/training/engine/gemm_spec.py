"""GemmSpec and TrainingSpec: how the three matmuls of a contraction that trains are quantized.

    output       y[m, n]  = sum_k x[m, k] w[n, k]      lhs x     rhs w       contracts k, the features
    grad_input   dx[m, k] = sum_n g[m, n] w[n, k]      lhs g     rhs w.T     contracts n, the output features
    grad_weight  dw[n, k] = sum_m g[m, n] x[m, k]      lhs g.T   rhs x.T     contracts m, the tokens

A granularity refers to the operand as it enters its matmul: a matrix (kept axis, contracted axis). So `PerRow()` is a
scale per kept index, whichever axis of the tensor that is. The backward contracts other axes and cannot use the scales
of the forward, except with `reuse_forward`.
"""

from typing import ClassVar

import torch

from ...dtypes import PackedLayout
from ...primitives import AbsMaxRule, LinearSpec, MappingType, MinMaxRule, PerGroup, PerRow, PerTensor, QuantSpec
from ...primitives.jsonable import jsonable
from ...primitives.layouts import can_pack_bits


@jsonable
class GemmSpec:
    """How one matmul is quantized: c[a, b] = sum_c lhs[a, c] rhs[b, c].

    Args:
        lhs, rhs: specs of the operands, None for full precision. A power-of-two scale is ``scale_dtype=float8_e8m0fnu``
            there, stochastic rounding ``rounding=Rounding.STOCHASTIC``.
        reuse_forward: for a backward matmul: rhs is the forward's operand as the forward quantized it, transposed,
            instead of quantized again. Where its scales vary along the contracted axis, they are multiplied into the
            other operand before that is quantized. `rhs` stays None.
        accumulator_dtype: None means int32 for integers and fp32 for floating-point codes; with a float dtype, operands
            are dequantized first and multiplied in it. int16 is for sums of integers that it holds exactly: the result
            is that of int32, and an axis that is too long raises an error.
        output_dtype: None means that of the input, or of the weight for its gradient.
        fold: ``"lhs"`` or ``"rhs"``, the operand whose scales, one for each contracted index (``PerAxis(1)``), are
            multiplied into the other operand before that is quantized.
        mid_alpha: (alpha, beta) balances the two operands before they are quantized; see `contraction.balanced`.
        hadamard: size, a power of two, of the random Hadamard transform of the contracted axis that both operands pass
            before they are quantized; see `contraction.transformed`.
        eden: scales of both operands are corrected and rounded stochastically, so that codes rounded to nearest have no
            bias over the transforms; see `contraction.unbiased`.

    Raises:
        ValueError: a scale that varies along the contracted axis, which no accumulator can honour; `reuse_forward`
            with a `rhs`, or with `fold`, `mid_alpha` or `hadamard`, which change what is quantized; `fold` of other
            scales; `hadamard` that is no power of two; `eden` without `hadamard`, or of operands that are not both
            in blocks of a row that divide it, with quantized scales.
    """

    lhs: QuantSpec | None = None
    rhs: QuantSpec | None = None
    reuse_forward: bool = False
    accumulator_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    fold: str | None = None
    mid_alpha: tuple[float, float] | None = None
    hadamard: int | None = None
    eden: bool = False

    # No fields: what follows from them, found once, because it is read on each call, and by compilers that trace it.
    is_int8_by_rows: ClassVar[bool]
    """Whether it is `int8_rows_product` of its operands, that and nothing else."""
    blocks: ClassVar[tuple[int, int]]
    """Sizes of the blocks of lhs and rhs along the contracted axis, 1 where the whole axis is one block."""

    def __post_init__(self) -> None:
        if self.mid_alpha is not None:
            object.__setattr__(self, "mid_alpha", tuple(self.mid_alpha))
        if self.hadamard is not None and (self.hadamard < 2 or self.hadamard & (self.hadamard - 1)):
            raise ValueError(f"GemmSpec: hadamard is a power of two, such as 16, or None, got {self.hadamard}")
        if self.eden and not all(_fits_eden(spec, self.hadamard) for spec in (self.lhs, self.rhs)):
            raise ValueError(
                "GemmSpec: eden takes hadamard, and two operands such as nvfp4_spec(), whose blocks divide it, got "
                f"{self.lhs} x {self.rhs}, hadamard={self.hadamard}"
            )
        if self.reuse_forward and (self.fold is not None or self.changes_operands):
            raise ValueError("GemmSpec: reuse_forward takes rhs as it is; leave out fold, mid_alpha and hadamard")
        if self.reuse_forward and self.rhs is not None:
            raise ValueError("GemmSpec: reuse_forward takes rhs from the forward; leave rhs out")
        if self.output_dtype is not None and not self.output_dtype.is_floating_point:
            raise ValueError(f"GemmSpec: output_dtype is a floating-point dtype or None, got {self.output_dtype}")
        self._check_accumulator()
        self._check_fold()
        if self.lhs is not None and self.rhs is not None and not self.accumulates_floats:
            for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)):
                if name != self.fold and spec.granularity.pattern(2)[1] == 1:
                    raise ValueError(
                        f"{name} has a scale for each index of the contracted axis ({spec.granularity}), and a sum "
                        "along it cannot honour that; share the scale along the last axis of the operand, by PerRow(), "
                        "PerTensor() or blocks"
                    )
            if not (self.lhs.dtype.is_floating_point or self.rhs.dtype.is_floating_point):
                _check_integers(self.lhs, self.rhs)
        sides = (self.lhs, self.rhs)
        plain = self.fold is None and not self.changes_operands and self.accumulator_dtype in (None, torch.int32)
        vars(self).update(
            is_int8_by_rows=plain and all(spec is not None and _is_int8_rowwise(spec) for spec in sides),
            blocks=tuple(1 if spec is None else max(1, spec.granularity.pattern(2)[1]) for spec in sides),
        )

    def __str__(self) -> str:
        rhs = "forward's" if self.reuse_forward else self.rhs
        return f"{self.lhs} x {rhs}" if self.is_quantized else "full precision"

    @property
    def is_quantized(self) -> bool:
        return self.lhs is not None or self.rhs is not None or self.reuse_forward

    @property
    def changes_operands(self) -> bool:
        """Whether operands are changed, together, before they are quantized."""
        return self.mid_alpha is not None or self.hadamard is not None

    @property
    def accumulates_floats(self) -> bool:
        """Whether operands are dequantized before they are multiplied."""
        return self.accumulator_dtype is not None and self.accumulator_dtype.is_floating_point

    def check_sum(self, length: int) -> None:
        """Raise `ValueError` where sums of `length` products of the codes may not fit into an int16 accumulator."""
        if self.accumulator_dtype is not torch.int16:
            return
        assert self.lhs is not None
        largest = max(map(abs, self.lhs.code_range))
        largest *= largest if self.rhs is None else max(map(abs, self.rhs.code_range))
        fits = int((2**15 - 1) // largest)
        if length > fits:
            raise ValueError(
                f"GemmSpec: int16 holds sums of {fits} products of these codes, this one has {length}; use codes of "
                "fewer bits, or leave accumulator_dtype out for int32"
            )

    def _check_accumulator(self) -> None:
        dtype = self.accumulator_dtype
        if dtype is None or dtype.is_floating_point:
            return
        if dtype not in (torch.int16, torch.int32):
            raise ValueError(f"GemmSpec: accumulator_dtype is a float dtype, int32, int16 or None, got {dtype}")
        operands = [self.lhs] if self.reuse_forward else [self.lhs, self.rhs]
        if not all(spec is not None and spec.dtype.is_small_integer for spec in operands):
            raise ValueError(f"GemmSpec: accumulator_dtype={dtype} sums products of integers of at most 8 bits")
        if any(spec is not None and spec.has_zero_point for spec in operands) and dtype is torch.int16:
            raise ValueError("GemmSpec: int16 accumulators are for symmetric codes")

    def _check_fold(self) -> None:
        if self.fold is None:
            return
        spec = {"lhs": self.lhs, "rhs": self.rhs}.get(self.fold)
        if spec is None:
            raise ValueError(f"GemmSpec: fold names an operand that is quantized, 'lhs' or 'rhs', got {self.fold!r}")
        if spec.granularity.pattern(2) != (-1, 1) or spec.has_zero_point or self.accumulates_floats:
            raise ValueError(
                f"GemmSpec: fold takes a symmetric operand with a scale for each contracted index, PerAxis(1), and no "
                f"accumulator in floating point; got {spec}"
            )


@jsonable
class TrainingSpec:
    """The three matmuls of a contraction; see the top of the file.

    Args:
        scale_gradient: the scales of the forward's operands pass gradients on to the elements they are chosen from
            (see `contraction.OperandGradient`); otherwise they count as constants.
        clip_gradient: elements of the forward's operands that lie outside the codes get no gradient. For scales that
            leave some there, such as ``AbsMaxRule(clipping_scale=0.5)``.

    Raises:
        ValueError: `output` reuses a forward; a backward matmul reuses an operand that the forward does not quantize,
            or whose scales it cannot honour; `scale_gradient` of scales that have none, or of operands not kept;
            either of them where the forward folds scales or balances operands.
    """

    output: GemmSpec = GemmSpec()
    grad_input: GemmSpec = GemmSpec()
    grad_weight: GemmSpec = GemmSpec()
    scale_gradient: bool = False
    clip_gradient: bool = False

    def __post_init__(self) -> None:
        changed = self._depends_on_input
        if changed and (self.scale_gradient or self.clip_gradient):
            raise ValueError("TrainingSpec: scale_gradient and clip_gradient need the operands as they come, unfolded")
        if self.output.reuse_forward:
            raise ValueError("TrainingSpec: output is the forward itself; it has nothing to reuse")
        for name, gemm, operand, axis in (
            ("grad_input", self.grad_input, self.output.rhs, "n, the output features"),
            ("grad_weight", self.grad_weight, self.output.lhs, "m, the tokens"),
        ):
            if gemm.reuse_forward:
                if operand is None:
                    raise ValueError(f"TrainingSpec: {name} reuses an operand that the forward does not quantize")
                if self.scale_gradient:
                    raise ValueError(f"TrainingSpec: scale_gradient needs the values that {name} has only codes of")
                if changed:
                    raise ValueError(f"TrainingSpec: {name} cannot reuse an operand that the forward has changed")
                if gemm.lhs is not None and not gemm.accumulates_floats:
                    _check_reuse(operand, gemm.lhs, name, axis)
        for spec in (self.output.lhs, self.output.rhs):
            if self.scale_gradient and spec is not None:
                _check_scale_gradient(spec)

    def __str__(self) -> str:
        return f"output {self.output}; grad_input {self.grad_input}; grad_weight {self.grad_weight}"

    @property
    def operands(self) -> list[QuantSpec]:
        """The specs of all operands that are quantized."""
        sides = (side for gemm in (self.output, self.grad_input, self.grad_weight) for side in (gemm.lhs, gemm.rhs))
        return [spec for spec in sides if spec is not None]

    @property
    def keeps_operands(self) -> bool:
        """Whether the backward needs operands as the forward quantized them."""
        reuses = self.grad_input.reuse_forward or self.grad_weight.reuse_forward
        return reuses or self.scale_gradient or self.clip_gradient

    @property
    def _depends_on_input(self) -> bool:
        return self.output.fold is not None or self.output.changes_operands

    def check_convert(self) -> None:
        """Raise `ValueError` where the forward has no weight of its own that could be frozen."""
        if self._depends_on_input:
            raise ValueError(
                "the weight as the forward multiplies it varies by call (GemmSpec.fold, mid_alpha, hadamard): "
                "there is no weight for inference; train by a spec without these, or quantize the float weights by "
                "calibrated(recipe, batches, transforms=[smooth()]), which moves such factors into the weights"
            )

    @property
    def linear_spec(self) -> LinearSpec | None:
        """The spec for inference after training: weights keep their codes, at their true size, and activations are
        quantized as in training. None where the forward is in full precision, or cannot convert (`check_convert`).

        A weight with a single scale keeps it once for each row, which is what integer kernels read; so does one in
        square blocks with scales of 8 bits (MX, NVFP4), whose formats have blocks of one row. A rounding that was
        stochastic is to nearest.
        """
        weight, activation = self.output.rhs, self.output.lhs
        if weight is None or self._depends_on_input:
            return None
        if activation is not None and isinstance(weight.granularity, PerTensor) and not weight.dtype.is_floating_point:
            weight = weight.with_granularity(PerRow())
        rows, columns = weight.granularity.pattern(2)
        if min(rows, columns) > 1 and (weight.scale_spec or weight.scale_dtype is torch.float8_e8m0fnu):
            weight = weight.with_granularity(PerGroup(columns))
        layout = PackedLayout() if can_pack_bits(weight.dtype) and weight.dtype.bits < 8 else None
        return LinearSpec(weight.to_nearest(), None if activation is None else activation.to_nearest(), layout=layout)


def _check_scale_gradient(spec: QuantSpec) -> None:
    """Raise `ValueError` where the scale of `spec` is no smooth function of a block's absmax."""
    absmax = spec.scale_rule in (MinMaxRule(), AbsMaxRule()) and spec.preserve_max_val
    smooth = absmax and spec.scale_dtype is not torch.float8_e8m0fnu
    if not smooth or spec.mapping is not MappingType.SYMMETRIC or spec.has_zero_point:
        raise ValueError(f"scale_gradient takes symmetric specs whose scale is absmax, got {spec}")


def _fits_eden(spec: QuantSpec | None, hadamard: int | None) -> bool:
    if spec is None or hadamard is None or spec.scale_spec is None or spec.has_zero_point:
        return False
    rows, columns = spec.granularity.pattern(2)
    return rows == 1 and columns > 1 and hadamard % columns == 0


def _is_int8_rowwise(spec: QuantSpec) -> bool:
    is_int8 = type(spec) is QuantSpec and spec.dtype.is_small_integer and spec.dtype.storage is torch.int8
    return is_int8 and spec.granularity.pattern(2) == (1, -1) and not spec.has_zero_point and spec.scale_spec is None


def _check_integers(lhs: QuantSpec, rhs: QuantSpec) -> None:
    if max(lhs.dtype.bits, rhs.dtype.bits) > 8:
        return  # multiplied in fp32
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
