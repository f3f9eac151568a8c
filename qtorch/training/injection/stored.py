"""StoredOperands: operands that depend on parameters alone, as codes, by the key of what they are made of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import AffineQuantizedTensor, PackedLayout
from ...dtypes.linear import multiply as multiply_served
from ...model.install import QuantizationState
from ...primitives import LinearSpec, QuantSpec
from ...primitives.jsonable import to_json
from ...primitives.layouts.packed import can_pack_bits
from ..engine.contraction import contraction, multiply, operands_of
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import Operand, quantize_operand
from ..recipes.scheduled import ScheduledContraction
from ..weights.base import of_codes
from .mode import Constant


class StoredOperands(QuantizationState):
    """Parameters of three kinds, by their first letter: ``w``, a whole weight with the spec of its input, which the
    kernels for inference multiply; ``l`` and ``r``, an operand of the engine on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def publish(self) -> None:
        """Make parameters of what was frozen."""
        for key, tensor in self.made.items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        self.made = {}

    def freeze(
        self,
        lhs: Tensor,
        rhs: Tensor,
        spec: TrainingSpec,
        state: ScheduledContraction | None,
        of_lhs: Constant | None,
        of_rhs: Constant | None,
    ) -> tuple[Tensor, tuple[bool, bool]]:
        """The product, and which of its operands have been stored."""
        gemm = spec.output
        a, b = operands_of(lhs, rhs, "output", gemm, state)
        y = multiply(a, b, gemm, lhs.dtype)
        alone = gemm.mid_alpha is None and gemm.fold is None
        stored = [constant is not None and operand.spec is not None and alone
                  for constant, operand in ((of_lhs, a), (of_rhs, b))]  # fmt: skip
        if stored[1] and not stored[0] and (whole := self._whole(b, rhs, spec, state)) is not None:
            assert of_rhs is not None
            self.made[_key("w", of_rhs, spec)] = whole
            return y, (False, True)
        for side, constant, operand, is_stored in zip("lr", (of_lhs, of_rhs), (a, b), stored, strict=True):
            if is_stored:
                assert constant is not None
                self.made[_key(side, constant, spec)] = _as_tensor(operand, lhs.dtype)
        return y, (stored[0], stored[1])

    def _whole(
        self, operand: Operand, rhs: Tensor, spec: TrainingSpec, state: ScheduledContraction | None
    ) -> Tensor | None:
        """The weight for inference; None where the engine has to multiply: a static input, padded blocks."""
        linear, static = spec.linear_spec, state is not None and "output.lhs" in state.schedule.static
        if linear is None or static or operand.values.shape != rhs.shape or not _serves(spec):
            return None
        operand = operand.in_blocks()
        assert operand.scale is not None
        return of_codes(operand.values, operand.scale, operand.zero_point, linear, rhs.dtype)

    def multiply(
        self,
        site: str,
        lhs: Tensor,
        rhs: Tensor,
        spec: TrainingSpec,
        state: ScheduledContraction | None,
        of_lhs: Constant | None,
        of_rhs: Constant | None,
    ) -> Tensor:
        """The product with what is stored."""
        if of_rhs is not None and (whole := self._found("w", of_rhs, spec)) is not None:
            return multiply_served(lhs, whole)
        a, b = self._operand("l", lhs, of_lhs, spec), self._operand("r", rhs, of_rhs, spec)
        for side, operand, stored in (("left", lhs, a), ("right", rhs, b)):
            if operand.is_meta and stored is None:
                raise ValueError(
                    f"{site}: the {side} operand was dropped by convert, and no codes are stored for this expression "
                    "of the parameters; call the model that was converted, with the same code"
                )
        if a is None and b is None:
            return contraction(lhs, rhs, spec, state)
        gemm = spec.output
        left, right = (max(1, s.granularity.pattern(2)[1]) if s is not None else 1 for s in (gemm.lhs, gemm.rhs))
        if a is None:
            a = quantize_operand(lhs, gemm.lhs, right, True, "output.lhs", state)
        if b is None:
            b = quantize_operand(rhs, gemm.rhs, left, False, "output.rhs", state)
        return multiply(a, b, gemm, rhs.dtype if lhs.is_meta else lhs.dtype)

    def _operand(self, side: str, operand: Tensor, constant: Constant | None, spec: TrainingSpec) -> Operand | None:
        found = None if constant is None else self._found(side, constant, spec)
        if found is None:
            return None
        codes, scale, zero_point = found.plain()
        return Operand(codes, operand.shape[0], scale, zero_point, found.scheme.weight)

    def _found(self, kind: str, constant: Constant, spec: TrainingSpec) -> Any:
        return self._parameters.get(_key(kind, constant, spec))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in self._parameters and isinstance(value, AffineQuantizedTensor):
                self.register_parameter(name, nn.Parameter(torch.clone(value), requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _key(kind: str, constant: Constant, spec: TrainingSpec) -> str:
    text = json.dumps([kind, constant.key, to_json(spec.output)])
    return kind + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:20]


def _serves(spec: TrainingSpec) -> bool:
    """Whether the kernels for inference compute what the engine does: they have accumulators of their own."""
    return spec.output.accumulator_dtype is None and spec.output.output_dtype is None


def _as_tensor(operand: Operand, dtype: torch.dtype) -> Tensor:
    operand = operand.in_blocks()
    spec = operand.spec
    assert isinstance(spec, QuantSpec)
    assert operand.scale is not None
    layout = PackedLayout() if can_pack_bits(spec.dtype) and spec.dtype.bits < 8 else None
    linear = LinearSpec(spec.to_nearest(), layout=layout)
    return AffineQuantizedTensor.from_plain(operand.values, operand.scale, operand.zero_point, linear, dtype)
