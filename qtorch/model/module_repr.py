"""Modules with quantized weights show them when printed, and refuse operations that would dequantize them.

    Linear(in_features=512, out_features=2048, bias=True, weight=int8 PerRow() symmetric, 2048x512, 1,056,768 bytes)

`nn.Module.__repr__` calls `extra_repr` of the instance, which is set to a `QuantizedRepr`. It is copied and pickled
with its module, so that a copy of the module gets its own; it reads the parameters when it is called, so that it is
never outdated; and its reference to the module is weak, so that the memory of a deleted model is freed at once.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor, embedding
from ..primitives.tracing import is_compiling, starts_no_graph
from .install import check_model


class QuantizedRepr:
    """`extra_repr` of one module: that of its class, followed by its quantized weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        module = self._module()
        if module is None:  # called on a shallow copy of a deleted module
            return ""
        if is_compiling():  # torch.func.vmap reads the name of what it maps; text cannot be traced
            return type(module).extra_repr(module)
        return ", ".join(filter(None, [type(module).extra_repr(module), *_weights(module)]))

    # A copy or pickle of a module contains this object before the attributes of the module are set.
    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedRepr, (self._module(),)


def _weights(module: nn.Module) -> list[str]:
    parameters: dict[str, Any] = dict(module._parameters)
    return [
        f"{name}={_description(parameter)}, {'x'.join(map(str, parameter.shape))}, {parameter.nbytes:,} bytes"
        for name, parameter in parameters.items()
        if isinstance(parameter, QuantizedTensor)
    ]


def _description(weight: QuantizedTensor) -> str:
    """The spec of a weight, or how it trains."""
    training: Any = getattr(weight.scheme, "training", None)
    if training is not None:
        return f"in training by {training}"
    spec = weight.scheme.spec
    words = str(spec).removeprefix("weight ")
    return f"in training, {words}" if weight.trains else words


def refuse_jit_script() -> NoReturn:
    """``__prepare_scriptable__`` of a module with quantized weights: a script would run, but be saved without codes."""
    raise TypeError("torch.jit.script cannot save quantized weights; use torch.export, or dequantize_(model) first")


def show_quantized(module: nn.Module) -> None:
    """Show the quantized weights of `module` when it is printed, or restore the repr of its class if it has none."""
    attributes = vars(module)
    if any(isinstance(parameter, QuantizedTensor) for parameter in module._parameters.values()):
        attributes.setdefault("extra_repr", QuantizedRepr(module))
        attributes.setdefault("__prepare_scriptable__", refuse_jit_script)
        return
    if isinstance(attributes.get("extra_repr"), QuantizedRepr):
        del attributes["extra_repr"]
    if attributes.get("__prepare_scriptable__") is refuse_jit_script:
        del attributes["__prepare_scriptable__"]


@starts_no_graph
def _registered(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Hook that torch calls when a parameter is set on a module, also by `load_state_dict(assign=True)`."""
    if isinstance(parameter, QuantizedTensor):
        _refuse_reparametrization(module, name, parameter)
        vars(module).setdefault("extra_repr", QuantizedRepr(module))
        vars(module).setdefault("__prepare_scriptable__", refuse_jit_script)


def _refuse_reparametrization(module: nn.Module, name: str, parameter: QuantizedTensor) -> None:
    """Raise `ValueError` if a reparametrization makes `parameter` the source from which a weight is computed: that
    would be a plain tensor, and the layer would run in full precision. The weight of the module is unchanged, or
    restored."""
    own, _, suffix = name.rpartition("_")
    parameters: dict[str, Any] = module._parameters
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        what = "register_parametrization"
    elif suffix == "orig" and own:
        what = "torch.nn.utils.prune, or spectral_norm,"
        parameters.setdefault(own, parameter)
    elif suffix == "v" and f"{own}_g" in parameters:
        what = "torch.nn.utils.weight_norm"
        del parameters[f"{own}_g"]
        parameters[own] = parameter
    else:
        return
    state, hint = "quantized", ""
    if parameter.trains:
        state, hint = "in training", "; or train with lsq or scheduled_qat, which quantize what it computes"
    raise ValueError(
        f"{what} computes a weight from one that is {state}, as a plain tensor: the layer would leave low precision. "
        f"Call it, and what makes it permanent (remove_parametrizations, prune.remove), before quantize_{hint}"
    )


nn.modules.module.register_module_parameter_registration_hook(_registered)
torch.serialization.add_safe_globals([QuantizedRepr, refuse_jit_script])


def get_model_size_in_bytes(model: nn.Module, ignore_embeddings: bool = False) -> int:
    """Size in bytes of all parameters and buffers of `model`, each counted once.

    Quantized tensors count with their packed codes and scales, uninitialized ones not at all.

    Args:
        ignore_embeddings: leave out the tables of `nn.Embedding` and `nn.EmbeddingBag`, unless a head shares them.

    Raises:
        TypeError: `model` is not a module.
    """
    check_model("get_model_size_in_bytes", model)
    sizes = {}
    for module in model.modules():
        if not (ignore_embeddings and isinstance(module, embedding.EMBEDDINGS)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if not nn.parameter.is_lazy(tensor):
                    quantized = isinstance(tensor, QuantizedTensor)
                    sizes[id(tensor)] = tensor.nbytes if quantized else tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def with_codes_counted(footprint: Callable[..., int]) -> Callable[..., int]:
    """`get_memory_footprint` of the models of another package, which multiplies elements by the size of the logical
    dtype, with quantized tensors as `get_model_size_in_bytes` counts them."""

    @wraps(footprint)
    def get_memory_footprint(self: Any, *args: Any, **kwargs: Any) -> int:
        quantized = [p for p in self.parameters() if isinstance(p, QuantizedTensor)]
        return footprint(self, *args, **kwargs) + sum(p.nbytes - p.numel() * p.element_size() for p in quantized)

    return get_memory_footprint
