"""Observers as torchao 0.6 has them: modules with the extremes of what passes, in place of a recipe with data.

insert_observers_(model, input_observer, weight_observer)
for batch in batches:
    model(batch)
quantize_(model, from_observers())
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...calibration.observers import min_max
from ...dtypes import AffineQuantizedTensor
from ...model.install import keep_attributes
from ...primitives import Granularity, LinearSpec, MappingType, PerAxis, PerRow, QuantSpec, ZeroPointDomain
from ...primitives import choose_qparams_affine_with_min_max as choose_qparams
from ...primitives.qparams import min_max as extremes
from ...recipes.base import Recipe, check_float_weight, register_recipe

__all__ = [
    "AffineQuantizedMinMaxObserver", "AffineQuantizedObserverBase", "LinearActivationWeightObservedTensor",
    "from_observers", "insert_observers_",
]  # fmt: skip


class AffineQuantizedObserverBase(nn.Module):
    """Base of observers: `forward` looks at a tensor and returns it.

    Args:
        mapping_type, target_dtype, granularity, quant_min, quant_max, eps, preserve_zero, zero_point_domain: of
            `QuantSpec`; None as `zero_point_domain` is NONE.
        scale_dtype, zero_point_dtype: of what `calculate_qparams` returns.
    """

    def __init__(
        self, mapping_type: MappingType, target_dtype: torch.dtype, granularity: Granularity,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain | None = ZeroPointDomain.INT,
    ) -> None:  # fmt: skip
        super().__init__()
        dtype: Any = target_dtype
        self.spec = QuantSpec(
            dtype, granularity, mapping_type, zero_point_domain or ZeroPointDomain.NONE, scale_dtype=scale_dtype,
            eps=eps, quant_min=quant_min, quant_max=quant_max, preserve_zero=preserve_zero,
        )  # fmt: skip
        self.zero_point_dtype = zero_point_dtype

    @classmethod
    def with_args(cls, *args: Any, **kwargs: Any) -> "Callable[..., AffineQuantizedObserverBase]":
        """A function that makes the observer with these arguments."""
        return partial(cls, *args, **kwargs)

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """(scale, zero_point), one element per block, without the axes that have one block."""
        raise NotImplementedError


class AffineQuantizedMinMaxObserver(AffineQuantizedObserverBase):
    """The extremes of each block of all that it has seen: `min_val` and `max_val`, fp32."""

    min_val: Tensor
    max_val: Tensor

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():
            return input
        values = input.detach()
        batch = tuple(end.squeeze() for end in extremes(values, self.spec.block_size(values.shape)))
        if not hasattr(self, "min_val"):
            self.register_buffer("min_val", batch[0])
            self.register_buffer("max_val", batch[1])
        elif self.min_val.shape != batch[0].shape:
            raise ValueError(
                f"AffineQuantizedMinMaxObserver: blocks of shape {tuple(batch[0].shape)}, before "
                f"{tuple(self.min_val.shape)}; an observer of activations takes PerTensor()"
            )
        now = self.min_val.to(values.device), self.max_val.to(values.device)
        self.min_val, self.max_val = min_max().follow(now, batch)  # type: ignore[arg-type]
        return input

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        if not hasattr(self, "min_val"):
            raise ValueError("AffineQuantizedMinMaxObserver: it has seen nothing yet; run the model on data first")
        spec = self.spec
        block: tuple[int, ...] = ()
        of_codes = spec.dtype, spec.quant_min, spec.quant_max, spec.eps, spec.scale_dtype, self.zero_point_dtype
        of_range = spec.preserve_zero, spec.zero_point_domain
        return choose_qparams(self.min_val, self.max_val, spec.mapping, block, *of_codes, *of_range)


class LinearActivationWeightObservedTensor(Tensor):
    """A weight that shows itself and the input of `F.linear` to observers, of which one may be None; else an ordinary
    tensor."""

    input_observer: AffineQuantizedObserverBase | None
    weight_observer: AffineQuantizedObserverBase | None

    @classmethod
    def of(cls, weight: Tensor, input_observer: Any, weight_observer: Any) -> "LinearActivationWeightObservedTensor":
        """`weight`, whose memory it shares, with these observers."""
        made: LinearActivationWeightObservedTensor = Tensor._make_subclass(cls, weight, weight.requires_grad)
        made.input_observer, made.weight_observer = input_observer, weight_observer
        return made

    @property
    def original_weight_tensor(self) -> Tensor:
        """The weight as a plain tensor of the same memory."""
        return Tensor._make_subclass(Tensor, self, False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        weight = self.original_weight_tensor.clone()
        made = self.of(weight, copy.deepcopy(self.input_observer, memo), copy.deepcopy(self.weight_observer, memo))
        memo[id(self)] = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is Tensor.detach:
                return cls.of(result, args[0].input_observer, args[0].weight_observer)
            return result


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, LinearActivationWeightObservedTensor):
        with torch.no_grad():
            if weight.input_observer is not None:
                weight.input_observer(input)
            if weight.weight_observer is not None:
                weight.weight_observer(weight.original_weight_tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return nn.functional.linear(input, weight, bias)


def insert_observers_(
    model: nn.Module, input_observer: AffineQuantizedObserverBase | None,
    weight_observer: AffineQuantizedObserverBase | None, *, filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> None:  # fmt: skip
    """Give the weight of each `nn.Linear` copies of the observers, which then see what passes as the model runs.

    A weight that several layers share has one pair. `from_observers()` quantizes such weights; the observers are
    `layer.weight.input_observer` and `layer.weight.weight_observer`.

    Args:
        model: changed in place.
        input_observer: with `PerTensor()`, or None.
        weight_observer: None quantizes weights per row in the type of the input.
        filter_fn: (module, fully-qualified name) -> bool; by default every `nn.Linear`.

    Raises:
        ValueError: there is no layer to observe, or no observer; a weight is quantized already.
    """
    if input_observer is None and weight_observer is None:
        raise ValueError("insert_observers_: takes an observer of the input, of the weight, or both; got neither")
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) if filter_fn is None else filter_fn(module, name))
    ]
    if not layers:
        raise ValueError(f"insert_observers_: this {type(model).__name__} has no layer to observe")
    for name, layer in layers:
        if type(getattr(layer, "weight", None)) is not nn.Parameter:
            got = type(getattr(layer, "weight", None)).__name__
            raise ValueError(f"insert_observers_: {name}.weight is a {got}, not a parameter in floating point")
    done: dict[int, nn.Parameter] = {}
    for _, layer in layers:
        weight: Any = layer.weight
        if id(weight) not in done:
            observers = copy.deepcopy(input_observer), copy.deepcopy(weight_observer)
            observed = LinearActivationWeightObservedTensor.of(weight.detach(), *observers)
            done[id(weight)] = keep_attributes(nn.Parameter(observed, weight.requires_grad), weight)
        layer.weight = done[id(weight)]


@register_recipe("from_observers")
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
        observer = observed.weight_observer
        if observer is None:
            assert observed.input_observer is not None
            spec = replace(observed.input_observer.spec, granularity=PerRow())
            made = AffineQuantizedTensor.from_float(floats, LinearSpec(spec))
        else:
            spec = observer.spec
            if spec.granularity == PerAxis(0):  # the same blocks, by the name that kernels know
                spec = replace(spec, granularity=PerRow())
            scale, zero_point = _qparams(observer, spec.scale_shape(floats.shape), floats)
            codes = spec.quantize(floats, scale, zero_point)
            made = AffineQuantizedTensor.from_plain(codes, scale, zero_point, spec, floats.dtype)
        if observed.input_observer is None:
            return made
        return made.with_activation(observed.input_observer.spec, *_qparams(observed.input_observer, (1, 1), floats))


def _qparams(observer: AffineQuantizedObserverBase, shape: Any, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as `QuantSpec` has them, of this shape, on the device of `weight`."""
    scale, zero_point = observer.calculate_qparams()
    spec: QuantSpec = observer.spec
    scale = scale.reshape(shape).to(weight.device)
    if zero_point is None or not spec.has_zero_point:
        return scale, None
    dtype = zero_point.dtype if spec.zero_point_domain.is_real else spec.dtype.storage
    return scale, zero_point.reshape(shape).to(weight.device, dtype)


from_observers = FromObservers
