"""from_observers: weights with observers become quantized ones, with what the observers have seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor

from ...dtypes import AffineQuantizedTensor
from ...primitives import LinearSpec, PerAxis, PerRow, QuantSpec
from ...recipe import Recipe, check_float_weight, register_recipe
from .observers import AffineQuantizedObserverBase, LinearActivationWeightObservedTensor


@register_recipe("from_observers")
@dataclass(frozen=True)
class FromObservers(Recipe):
    """The weights to which `insert_observers_` gave observers, with a static activation whose scale is that of
    `input_observer.calculate_qparams()`, and codes by `weight_observer.calculate_qparams()`.

    Without an observer of the input, weights alone are quantized; without one of the weight, it is quantized per row in
    the type of the input, from its extremes.
    """

    selects: ClassVar[tuple[type, ...]] = (LinearActivationWeightObservedTensor,)

    def check(self, weight: Tensor) -> None:
        if not isinstance(weight, LinearActivationWeightObservedTensor):
            raise ValueError("has no observers; call insert_observers_, and run the model on data")
        check_float_weight(weight.original_weight_tensor)
        for observer in (weight.input_observer, weight.weight_observer):
            if observer is not None:
                observer.calculate_qparams()
        if weight.input_observer is not None:
            spec = weight.input_observer.spec
            if (shape := spec.scale_shape((1, weight.shape[-1]))) != (1, 1):
                raise ValueError(f"the observer of its input has {shape[-1]} scales; a layer takes PerTensor()")

    def apply(self, weight: Tensor) -> Tensor:
        observed = cast(LinearActivationWeightObservedTensor, weight)
        floats = observed.original_weight_tensor
        made = _weight(floats, observed)
        if observed.input_observer is None:
            return made
        scale, zero_point = _qparams(observed.input_observer, (1, 1))
        return made.with_activation(observed.input_observer.spec, scale.to(floats.device), _moved(zero_point, floats))


def _weight(floats: Tensor, observed: LinearActivationWeightObservedTensor) -> AffineQuantizedTensor:
    observer = observed.weight_observer
    if observer is None:
        assert observed.input_observer is not None
        spec = replace(observed.input_observer.spec, granularity=PerRow())
        return AffineQuantizedTensor.from_float(floats, LinearSpec(spec))
    # The same blocks, by the name that kernels know.
    spec = replace(observer.spec, granularity=PerRow()) if observer.spec.granularity == PerAxis(0) else observer.spec
    scale, zero_point = _qparams(observer, spec.scale_shape(floats.shape))
    scale, zero_point = scale.to(floats.device), _moved(zero_point, floats)
    codes = spec.quantize(floats, scale, zero_point)
    return AffineQuantizedTensor.from_plain(codes, scale, zero_point, spec, floats.dtype)


def _qparams(observer: AffineQuantizedObserverBase, shape: Any) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as `QuantSpec` has them, of this shape."""
    scale, zero_point = observer.calculate_qparams()
    spec: QuantSpec = observer.spec
    if zero_point is None or not spec.has_zero_point:
        return scale.reshape(shape), None
    dtype = zero_point.dtype if spec.zero_point_domain.is_real else spec.dtype.storage
    return scale.reshape(shape), zero_point.reshape(shape).to(dtype)


def _moved(zero_point: Tensor | None, to: Tensor) -> Tensor | None:
    return None if zero_point is None else zero_point.to(to.device)


from_observers = FromObservers
