"""StoredOperands: operands that depend on parameters alone, as codes, by the key of what they are made of."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import AffineQuantizedTensor, PackedLayout
from ...dtypes.linear import multiply as multiply_served
from ...model.install import QuantizationState
from ...primitives import LinearSpec, QuantSpec, to_json
from ...primitives.layouts import can_pack_bits
from ..engine.contraction import contraction, operands_of
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import ContractionState, Operand, multiply, quantize_operand
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
        self, operands: tuple[Tensor, Tensor], constants: tuple[Constant | None, Constant | None], spec: TrainingSpec,
        state: ContractionState,
    ) -> tuple[Tensor, tuple[bool, bool]]:  # fmt: skip
        """The product, and which of its operands have been stored."""
        gemm, (lhs, rhs), (of_lhs, of_rhs) = spec.output, operands, constants
        a, b = operands_of(lhs, rhs, "output", gemm, state)
        y = multiply(a, b, gemm, lhs.dtype)
        alone = gemm.fold is None and not gemm.changes_operands
        stores_a = alone and of_lhs is not None and a.spec is not None
        stores_b = alone and of_rhs is not None and b.spec is not None
        if stores_b and not stores_a and (whole := self._whole(b, rhs, spec, state)) is not None:
            assert of_rhs is not None
            self.made[_key("w", of_rhs, spec)] = whole
            return y, (False, True)
        for side, constant, operand, stores in (("l", of_lhs, a, stores_a), ("r", of_rhs, b, stores_b)):
            if stores:
                assert constant is not None
                self.made[_key(side, constant, spec)] = _as_tensor(operand, lhs.dtype)
        return y, (stores_a, stores_b)

    def _whole(self, operand: Operand, rhs: Tensor, spec: TrainingSpec, state: ContractionState) -> Tensor | None:
        """The weight for inference; None where the engine has to multiply: a static input, padded blocks, or
        accumulators of its own."""
        linear, gemm = spec.linear_spec, spec.output
        if gemm.accumulator_dtype is not None or gemm.output_dtype is not None or "output.lhs" in state.static:
            return None
        if linear is None or operand.values.shape != rhs.shape:
            return None
        operand = operand.in_blocks()
        assert operand.scale is not None
        return of_codes(operand.values, operand.scale, operand.zero_point, linear, rhs.dtype)

    def multiply(
        self, site: str, operands: tuple[Tensor, Tensor], constants: tuple[Constant | None, Constant | None],
        spec: TrainingSpec, state: ContractionState,
    ) -> Tensor:  # fmt: skip
        """The product with what is stored."""
        gemm, (lhs, rhs), (of_lhs, of_rhs) = spec.output, operands, constants
        if of_rhs is not None and (whole := self._parameters.get(_key("w", of_rhs, spec))) is not None:
            return multiply_served(lhs, whole)  # type: ignore[arg-type]
        a, b = self._operand("l", lhs, of_lhs, spec), self._operand("r", rhs, of_rhs, spec)
        for side, operand, stored in (("left", lhs, a), ("right", rhs, b)):
            if operand.is_meta and stored is None:
                raise ValueError(
                    f"{site}: the {side} operand was dropped by convert, and no codes are stored for this expression "
                    "of the parameters; call the model that was converted, with the same code"
                )
        if a is None and b is None:
            return contraction(lhs, rhs, spec, state)
        if a is None:
            a = quantize_operand(lhs, gemm.lhs, gemm.blocks[1], True, "output.lhs", state)
        if b is None:
            b = quantize_operand(rhs, gemm.rhs, gemm.blocks[0], False, "output.rhs", state)
        return multiply(a, b, gemm, rhs.dtype if lhs.is_meta else lhs.dtype)

    def _operand(self, side: str, operand: Tensor, constant: Constant | None, spec: TrainingSpec) -> Operand | None:
        found: Any = None if constant is None else self._parameters.get(_key(side, constant, spec))
        if found is None:
            return None
        codes, scale, zero_point = found.plain()
        return Operand(codes, operand.shape[0], scale, zero_point, found.scheme.weight)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in self._parameters and isinstance(value, AffineQuantizedTensor):
                self.register_parameter(name, nn.Parameter(torch.clone(value), requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _key(kind: str, constant: Constant, spec: TrainingSpec) -> str:
    text = json.dumps([kind, constant.key, to_json(spec.output)])
    return kind + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:20]


def _as_tensor(operand: Operand, dtype: torch.dtype) -> Tensor:
    operand = operand.in_blocks()
    spec = operand.spec
    assert isinstance(spec, QuantSpec)
    assert operand.scale is not None
    layout = PackedLayout() if can_pack_bits(spec.dtype) and spec.dtype.bits < 8 else None
    linear = LinearSpec(spec.to_nearest(), layout=layout)
    return AffineQuantizedTensor.from_plain(operand.values, operand.scale, operand.zero_point, linear, dtype)
