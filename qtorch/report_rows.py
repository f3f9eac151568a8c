"""The rows of a `QuantizeReport`, made from targets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .dtypes import QuantizedTensor
from .explain import problem_of
from .kernels.registry import choose
from .prepared_module import PreparedModule
from .quantization_error import quantization_error
from .recipe import Recipe
from .report import QUANTIZED_BEFORE, LayerReport
from .targets import Target


def quantized_row(target: Target[Recipe], weight: Tensor, quantized: Any) -> LayerReport:
    """The report on `weight`, of which `quantized` was made."""
    slot = target.asked
    kernel = None
    if isinstance(quantized, QuantizedTensor) and quantized.scheme.spec is not None:
        kernel = choose(problem_of(quantized, slot.module, weight.dtype, weight.device.type)).name
    return LayerReport(
        slot.name,
        tuple(weight.shape),
        "quantized",
        f"{target.recipe}",
        weight.nbytes,
        quantized.nbytes,
        quantization_error(weight, quantized),
        kernel,
        tuple(other.name for other in target.slots if other is not slot),
    )


def skipped_row(target: Target[Recipe]) -> LayerReport:
    """The report on a weight that is left alone."""
    slot, parameter = target.slots[0], target.parameter
    size = 0 if nn.parameter.is_lazy(parameter) else parameter.nbytes
    shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    also = tuple(other.name for other in target.slots[1:])
    done = isinstance(parameter, QuantizedTensor) or isinstance(slot.module, PreparedModule)
    return LayerReport(slot.name, shape, "skipped", QUANTIZED_BEFORE if done else slot.reason, size, size, also=also)


def why_nothing(targets: list[Target[Recipe]]) -> str:
    """Why none of these weights is quantized."""
    slots = [target.asked for target in targets]
    if not slots:
        return "the model has no weight of two or more dimensions"
    return "; ".join(f"{slot.name}: {slot.reason}" for slot in slots[:4]) + ("; ..." if len(slots) > 4 else "")
