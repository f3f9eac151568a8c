"""PEFT's layers on quantized weights: the same layers, with merges that keep the codes of the base.

A layer that takes a module with quantized weights (`lora.Linear`, and every other kind that PEFT has) gets a subclass
of its own class, of the same name. While it merges, or initializes an adapter from the base weight, the weight is a
float parameter, so that PEFT's own code runs; the codes are kept, and come back when it unmerges.
"""

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from peft.tuners.lora import LoraLayer, variants
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ...dtypes import QuantizedTensor
from ...model.install import Change, install, keep_attributes
from ...model.module_repr import show_quantized
from .expert_adapters import adapted_parameter

# What differs between versions of PEFT, back to 0.18.

_MAGNITUDE_IS_NAMED = "adapter_name" in inspect.signature(DoraLinearLayer.forward).parameters


def option(arguments: Mapping[str, Any], name: str, default: Any) -> Any:
    """An option of the adapter that `update_layer` is called with: before 0.19 an argument, now of `config`."""
    return getattr(arguments.get("config"), name, arguments.get(name, default))


# DoRA on quantized weights (Liu et al. 2024, arXiv:2402.09353).
#
#     y = m / |W + s B A| * (W x + s B A x)      m: one learned number per output; |.|: the norm of a row
#
# PEFT's code takes the norm of `base_layer.weight + s B A`. Here it gets the dequantized weight, for the norm only; W x
# is the product of the quantized layer.


def _magnitude(module: Any, adapter: str, x: Tensor, factors: Any, bias: Any = None, **more: Any) -> Any:
    """PEFT's magnitude of an adapter with these factors (A, B), on the dequantized weight."""
    base = SimpleNamespace(weight=nn.Parameter(module.get_base_layer().weight.dequantize(), False), bias=bias)
    given = {"lora_A": factors[0], "lora_B": factors[1], "scaling": module.scaling[adapter], "base_layer": base}
    named = {"adapter_name": adapter} if _MAGNITUDE_IS_NAMED else {}  # since 0.19
    return module.lora_magnitude_vector[adapter](x, **given, **more, **named)


def _linear_or_conv(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
    """`forward` of DoRA for `lora.Linear` and the convolutions."""
    dropout, base_result = module.lora_dropout[active_adapter], result
    if module.training and not isinstance(dropout, nn.Identity):
        x = dropout(x)
        base_result = module.base_layer(x.to(result.dtype))
    factors, bias = (module.lora_A[active_adapter], module.lora_B[active_adapter]), module.get_base_layer().bias
    made: Tensor = _magnitude(module, active_adapter, x, factors, bias, base_result=base_result)
    return result + made


def _embedding(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
    """`forward` of DoRA for `lora.Embedding`."""
    factors = module.lora_embedding_A[active_adapter].T, module.lora_embedding_B[active_adapter].T
    norm_scale, of_adapter = _magnitude(module, active_adapter, x, factors, embed_fn=module._embed)
    embed_scale = module._get_embed_scale()
    if embed_scale is not None:
        of_adapter = of_adapter * embed_scale.to(of_adapter.dtype)
    made: Tensor = norm_scale * result + of_adapter
    return made


VARIANTS = {
    variant: type(f"Quantized{variant.__name__}", (variant,), {"forward": staticmethod(forward)})
    for variant, forward in [
        *((getattr(variants, f"Dora{of}Variant"), _linear_or_conv) for of in ("Linear", "Conv1d", "Conv2d", "Conv3d")),
        (variants.DoraEmbeddingVariant, _embedding),
    ]
}
"""Variant whose forward looks at the base weight -> its class for quantized weights."""


# What becomes of a quantized weight when adapters are merged into it.

_REQUANTIZES: ContextVar[bool] = ContextVar("requantizes", default=False)


@contextmanager
def requantize_merged() -> Iterator[None]:
    """Context in which PEFT's merges quantize the merged weights again, each as it was quantized before.

        with requantize_merged():
            model = peft_model.merge_and_unload()

    Without it, merged weights are plain float parameters of the weight's dtype, so that the merged model computes what
    the adapter computed. With it they take as little memory as before, and differ from base plus adapter by one more
    rounding to codes. `unmerge_adapter` gives the codes of the base back in both cases.
    """
    token = _REQUANTIZES.set(True)
    try:
        yield
    finally:
        _REQUANTIZES.reset(token)


@torch.no_grad()
def requantized(base: QuantizedTensor, values: Tensor) -> nn.Parameter:
    """A frozen parameter with `values`, quantized as `base` is."""
    if not bool(values.isfinite().all()):
        raise ValueError("NaN or infinite values in the merged weights; the base weight is unchanged")
    return keep_attributes(nn.Parameter(base.quantized_like(values.detach()), requires_grad=False), base)


READS_NO_WEIGHT = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not look at the base weight."""


class OnQuantized:
    """Mixin of a PEFT layer, of the class `peft_class`, whose base has quantized weights. The parameters of the base
    before the first merge are `kept` by name while anything is merged. While the base weight is in float for a while
    (`on_floats`), PEFT's own merge and unmerge run."""

    peft_class: ClassVar[type]
    mixin: "ClassVar[type[OnQuantized]]"
    kept: dict[str, Tensor]
    on_floats: bool

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base weight, which becomes a float parameter, or codes in `requantize_merged`.

        Each merge starts from the codes of the base and adds all merged adapters, in fp32.
        """
        if self.on_floats:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
            return
        names = check_adapters_to_merge(self, adapter_names)
        if not names:
            return
        base, kept, merged = self.get_base_layer(), self.kept, list(self.merged_adapters)
        present = {name: base._parameters[name] for name in names_of(self)}
        data = {name: p.data for name, p in present.items() if not isinstance(p, QuantizedTensor)}
        self.kept = kept or present | {name: value.detach().clone() for name, value in data.items()}
        try:
            self._put_back()
            self.merged_adapters = []
            with floats(self, torch.float32) as of:
                super().merge(safe_merge=safe_merge, adapter_names=[*merged, *names])  # type: ignore[misc]
                values = {name: base._parameters[name].data for name in of}
            for name, value in values.items():
                if _REQUANTIZES.get():
                    made = requantized(of[name], value)
                else:
                    made = keep_attributes(nn.Parameter(value.to(of[name].scheme.dtype), False), of[name])
                replace_parameters(base, {name: made})
            for name in data.keys() - of.keys():
                present[name].data = present[name].data.to(data[name].dtype)  # a bias: PEFT casts it like the weight
        except BaseException:
            for name, value in data.items():
                present[name].data = value
            replace_parameters(base, present)
            self.kept, self.merged_adapters = kept, merged
            raise

    def unmerge(self: Any) -> None:
        """Give the base the parameters that it had before the first merge, bit for bit."""
        if self.on_floats:
            super().unmerge()  # type: ignore[misc]
            return
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self._put_back()
        self.kept = {}
        for name in self.merged_adapters:
            vars(self).get("_caches", {}).pop(f"{name}-weight_norm", None)
        self.merged_adapters.clear()

    def _put_back(self: Any) -> None:
        """Install what is kept, on the device and in the dtype that the base has now."""
        base = self.get_base_layer()
        for name, tensor in self.kept.items():
            now = base._parameters[name]
            if not isinstance(tensor, QuantizedTensor):
                now.data = tensor.to(now.device, now.dtype, copy=True)
            elif (tensor.device, tensor.dtype) == (now.device, now.dtype):
                replace_parameters(base, {name: tensor})
            else:
                replace_parameters(base, {name: nn.Parameter(tensor.to(now.device, now.dtype), requires_grad=False)})

    def update_layer(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter. If its initialization changes the base weight (PiSSA, OLoRA), the codes are chosen anew."""
        if option(kwargs, "init_lora_weights", None) == "loftq":
            raise ValueError(
                'init_lora_weights="loftq" quantizes a float model, and this one is quantized: leave it out, and call '
                "qtorch.integrations.peft.initialize_from_quantization_error(peft_model, float_model) afterwards"
            )
        if self.kept or not self._reads_the_weight(kwargs):
            super().update_layer(adapter_name, *args, **kwargs)  # type: ignore[misc]
            return
        base = self.get_base_layer()
        with floats(self) as of:
            before = {name: base._parameters[name].detach().clone() for name in of}
            super().update_layer(adapter_name, *args, **kwargs)  # type: ignore[misc]
            after = {name: base._parameters[name].data for name in of}
        changed = {name: value for name, value in after.items() if not torch.equal(value, before[name])}
        replace_parameters(base, {name: requantized(of[name], value) for name, value in changed.items()})

    def _reads_the_weight(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the initialization of an adapter may look at the base weight."""
        of_lora = arguments.get("config") is not None or "init_lora_weights" in arguments
        if not isinstance(self, LoraLayer) or not of_lora:
            return True
        if option(arguments, "use_dora", False) or option(arguments, "kasa_config", None) is not None:
            return True
        return option(arguments, "init_lora_weights", True) not in READS_NO_WEIGHT

    def resolve_lora_variant(self: Any, *args: Any, **kwargs: Any) -> Any:
        """PEFT's variant of an adapter, of the class for quantized weights."""
        variant = super().resolve_lora_variant(*args, **kwargs)  # type: ignore[misc]
        if variant is not None:
            kind: Any = type(variant)
            variant.__class__ = VARIANTS.get(kind, kind)
        return variant

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time: a copy or pickle makes it again.
        return _rebuild, (self.peft_class, self.mixin), vars(self)


class OnQuantizedParameter(OnQuantized):
    """`OnQuantized` of the layer for `target_parameters`: W + B A is not computed, its products are."""

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [name for name in active_adapters or [] if name in self.lora_A]
        if not adapters:
            yield
            return
        # An attribute of the instance hides the parameter, which stays where it is.
        base, name = self.get_base_layer(), self.parameter_name
        vars(base)[name] = adapted_parameter(self, adapters)
        try:
            yield
        finally:
            del vars(base)[name]


class OnQuantizedTokens(OnQuantized):
    """`OnQuantized` of the layer for `trainable_token_indices`, which replaces rows of a table in each forward."""

    def get_merged_weights(self: Any, active_adapters: list[str]) -> Tensor:
        """The table in float with the trained rows (V, D)."""
        with floats(self):
            return super().get_merged_weights(active_adapters)  # type: ignore[misc]


class OnQuantizedValues(OnQuantized):
    """`OnQuantized` of a layer whose forward computes with the elements of the base weight: they are dequantized in
    each, and the input is not quantized."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or not self.active_adapters or self.merged:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with floats(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


READS_VALUES = ("glora", "hira", "shira", "supertuning")
"""Packages in peft.tuners whose layers do."""

MIXINS: dict[type, type[OnQuantized]] = {
    ParamWrapper: OnQuantizedParameter,
    TrainableTokensLayer: OnQuantizedTokens,
    BaseTunerLayer: OnQuantized,
}
"""PEFT class -> mixin of it; the first that fits. The attribute `adapter_mixin` of a base is that of its adapters."""


def adapt(layer: Any, base: nn.Module) -> None:
    """Give `layer`, a PEFT layer that is taking `base`, the class for quantized weights."""
    if isinstance(layer, OnQuantized) or not isinstance(layer, BaseTunerLayer):
        return
    root: Any = base
    while isinstance(root, BaseTunerLayer):
        root = root.base_layer
    if isinstance(layer, MultiheadAttention):
        raise ValueError("LoRA on nn.MultiheadAttention adds to quantized weights; leave it out of target_modules")
    if not any(is_frozen(root._parameters[name]) for name in names_of(layer, root)):
        return
    kind: Any = type(layer)
    layer.__class__ = adapted_class(kind, vars(root).get("adapter_mixin"))
    vars(layer).update(kept={}, on_floats=False)


def adapt_model(model: nn.Module) -> None:
    """`adapt` all PEFT layers of a model: those that were there before its weights were quantized."""
    for module in list(model.modules()):
        if isinstance(module, BaseTunerLayer) and isinstance(getattr(module, "base_layer", None), nn.Module):
            adapt(module, module.base_layer)


@functools.cache
def adapted_class(kind: Any, mixin: type[OnQuantized] | None = None) -> Any:
    """The class for quantized weights of a class of PEFT's layers, with the mixin of that class unless one is given."""
    if mixin is None:
        mixin = next(mixin for of, mixin in MIXINS.items() if issubclass(kind, of))
        if any(f".tuners.{name}." in base.__module__ for base in kind.__mro__ for name in READS_VALUES):
            mixin = OnQuantizedValues
    doc = f"{kind.__module__}.{kind.__qualname__} on quantized weights."
    # PEFT looks at the names of some of its classes.
    own = {"__module__": __name__, "__doc__": doc, "peft_class": kind, "mixin": mixin}
    return type(kind.__name__, (mixin, kind), own)


def _rebuild(kind: type, mixin: type[OnQuantized] | None = None) -> Any:
    made: Any = adapted_class(kind, mixin)  # type: ignore[arg-type]
    return made.__new__(made)


@contextmanager
def floats(layer: Any, dtype: torch.dtype | None = None) -> Iterator[dict[str, QuantizedTensor]]:
    """Context in which the quantized weights that `layer` adapts are float parameters, in their logical dtype unless
    `dtype` is given. Gives the quantized ones, by name; they are back at the end."""
    base = layer.get_base_layer()
    of = {name: base._parameters[name] for name in names_of(layer) if is_frozen(base._parameters[name])}
    before = layer.on_floats
    for name, tensor in of.items():
        base._parameters[name] = nn.Parameter(tensor.dequantize(dtype), requires_grad=False)
    layer.on_floats = True
    try:
        yield of
    finally:
        layer.on_floats = before
        base._parameters.update(of)


def names_of(layer: Any, base: nn.Module | None = None) -> list[str]:
    """Names of the parameters of the base that `layer` may change."""
    if isinstance(layer, ParamWrapper) and hasattr(layer, "parameter_name"):  # 0.18 sets it after the base
        return [layer.parameter_name]
    base = base or layer.get_base_layer()
    return [name for name, parameter in base._parameters.items() if parameter is not None]


def is_frozen(parameter: Tensor | None) -> bool:
    """Whether a parameter is quantized and is not trained itself."""
    return isinstance(parameter, QuantizedTensor) and not parameter.trains


def replace_parameters(base: nn.Module, parameters: Mapping[str, Any]) -> None:
    """Install parameters in a module, and show which are quantized when it is printed."""
    install(Change(base._parameters, name, parameter) for name, parameter in parameters.items())
    show_quantized(base)
