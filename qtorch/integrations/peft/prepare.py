"""prepare_for_adapters: what a quantized model needs before its adapters are trained."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper, _ConvNd
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from ...calibration.data import Data, collect
from ...calibration.rounding.grid import factor
from ...calibration.statistics import SecondMoment
from ...dtypes import QuantizedTensor
from ...dtypes.low_rank_weight import low_rank_factors
from ...model.install import check_model
from .adapter_layers import OnQuantized, adapt_model, floats, replace_parameters, requantized
from .expert_adapters import is_swapped
from .merged_codes import train_through_codes

M = TypeVar("M", bound=nn.Module)


def prepare_for_adapters(
    model: M,
    *,
    gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    merged_codes: bool = False,
) -> M:
    """Freeze a quantized model and turn gradient checkpointing on, in place; no dtype is changed.

    Call it before `get_peft_model`, in place of PEFT's `prepare_model_for_kbit_training`, which does not know these
    weights: it casts a bf16 model to fp32 and leaves gradient checkpointing off.

    Called on a model with adapters whose weights were quantized after `get_peft_model`, it also makes their layers
    merge; the adapters stay trainable.

    Args:
        model: any module with quantized weights, also a `PeftModel`.
        gradient_checkpointing: turn it on, and let the outputs of the embedding require gradients; for models of
            transformers.
        gradient_checkpointing_kwargs: arguments of `torch.utils.checkpoint.checkpoint`; ``use_reentrant=False`` unless
            they say otherwise.
        merged_codes: adapters, those that are there and those to come, are trained through the codes of the merged
            weight, so that merging them changes no bit (see `merged_codes`). They are LoRA on linear layers, without
            dropout, bias and variants. Each forward and each backward quantizes every adapted weight.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no weight of it is quantized, it has no gradient checkpointing, or adapters that it has cannot be
            trained through merged codes.
    """
    check_model("prepare_for_adapters", model)
    any_model: Any = model
    if not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters()):
        raise ValueError(f"prepare_for_adapters: no weight of {type(model).__name__} is quantized; call quantize_")
    if gradient_checkpointing and not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"prepare_for_adapters: a {type(model).__name__} has no gradient_checkpointing_enable(), which models of "
            "transformers have; pass gradient_checkpointing=False"
        )
    if not any(isinstance(module, BaseTuner) for module in model.modules()):
        model.requires_grad_(False)
    adapt_model(model)
    if merged_codes:
        train_through_codes(model)
    if gradient_checkpointing:
        arguments = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        any_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        any_model.enable_input_require_grads()
    return model


# LoRA adapters initialized from the error of quantization.
#
#     s B A = the best approximation of W - Q of rank r, where Q is the dequantized weight
#
# By the theorem of Eckart, Young and Mirsky that is the truncated singular value decomposition. With one iteration
# this is LoftQ (Li et al. 2023, arXiv:2310.08659, algorithm 1 with T = 1) and ZeroQuant-V2's low rank compensation
# (Yao et al. 2023, arXiv:2303.08302). With the second moment of the inputs, H = E[x x^T] = L L^T, it is QERA-exact
# (Zhang et al. 2024, arXiv:2410.06040): (W - Q) L is decomposed, and A L^-1 takes the place of A. |X (W - Q - s B
# A)^T| is then least.

_DAMPING = 1e-4
"""Of the second moment, relative to the mean of its diagonal: inputs that are always zero say nothing."""


@torch.no_grad()
def initialize_from_quantization_error(
    peft_model: nn.Module,
    float_weights: nn.Module | Mapping[str, Tensor],
    adapter_name: str = "default",
    *,
    iterations: int = 1,
    batches: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, float]:
    """Set the LoRA weights of an adapter so that base plus adapter is as near to the float weights as its rank allows.

    Args:
        peft_model: a model of `get_peft_model` whose base is quantized.
        float_weights: the model before it was quantized, or its weights by name (names as in `state_dict`), read one at
            a time.
        iterations: above 1, LoftQ's alternation: the base is quantized again from W - s B A, and so on. It changes the
            codes of the base, which then has to be saved with the adapter.
        batches: inputs of the model. With them the error of the *outputs* of linear layers is made small (QERA-exact);
            they are run once through the quantized model. Not together with `iterations`.
        forward: ``forward(model, batch)``, how to call the model with a batch, as for calibration.

    Returns:
        For each adapted weight, the Frobenius norm of the error that is left, divided by that of W - Q. (With `batches`
        another norm is minimized, so that this one is not the smallest possible.)

    Raises:
        ValueError: there is no LoRA layer with this adapter on a quantized weight, or it is merged; a float weight is
            missing or has another shape; or the arguments do not go together. The model is unchanged.
        TypeError: `peft_model` is not a module.
    """
    check_model("initialize_from_quantization_error", peft_model)
    if iterations < 1 or (iterations > 1 and batches is not None):
        raise ValueError(f"iterations must be 1 or more, and 1 if there are batches; got {iterations}")
    layers = _layers(peft_model, adapter_name)
    weights = float_weights.state_dict() if isinstance(float_weights, nn.Module) else float_weights
    for name, layer in layers.items():
        shape = tuple(_base(layer).shape)
        if layer.merged:
            raise ValueError(f"{name} has a merged adapter; call unmerge_adapter first")
        if isinstance(layer, _ConvNd) and layer.get_base_layer().groups > 1:
            raise ValueError(f"{name} is of a convolution with groups, whose adapter is not a low-rank product")
        if name not in weights:
            raise ValueError(f"float_weights has no {name!r}, the float weight of shape {shape} that was quantized")
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"float_weights: {name} has shape {tuple(weights[name].shape)}, not {shape}")
    roots: dict[str, Tensor] = {}
    if batches is not None:
        linear = {name: layer for name, layer in layers.items() if isinstance(layer, Linear)}
        bases = {name: layer.get_base_layer().weight for name, layer in linear.items() if not layer.fan_in_fan_out}
        found = collect(peft_model, Data(batches, forward), dict.fromkeys(bases.values(), (SecondMoment,)))
        for name, base in bases.items():
            statistic: Any = found[base][SecondMoment]
            roots[name] = factor(statistic.mean, _DAMPING)[0]
    return {
        name: _initialize(layer, adapter_name, weights[name], iterations, roots.get(name))
        for name, layer in layers.items()
    }


def _layers(model: nn.Module, adapter: str) -> dict[str, Any]:
    """Name of the base weight in the model without adapters -> LoRA layer on it."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, OnQuantized) and isinstance(layer, LoraLayer) and adapter in layer.scaling:
            path = [part for part in name.removeprefix("base_model.model.").split(".") if part != "base_layer"]
            found[".".join([*path, _parameter_name(layer)])] = layer
    if not found:
        raise ValueError(
            f"initialize_from_quantization_error: the model has no LoRA layer with an adapter {adapter!r} on a "
            "quantized weight; call quantize_, then get_peft_model"
        )
    return found


def _initialize(layer: Any, adapter: str, weight: Tensor, iterations: int, root: Tensor | None) -> float:
    """Initialize one layer, and return the relative error that is left."""
    base: Any = _base(layer)
    weight = weight.detach().to(base.device, torch.float32)
    before = error = weight - base.dequantize(torch.float32)
    delta = torch.zeros_like(weight)
    for iteration in range(iterations):
        if iteration:
            base = requantized(base, weight - delta)
            error = weight - base.dequantize(torch.float32)
        delta = _set_factors(layer, adapter, error, root)
    if iterations > 1:
        replace_parameters(layer.get_base_layer(), {_parameter_name(layer): base})
    if layer.use_dora.get(adapter):
        with floats(layer):  # the magnitudes are the norms of the rows of base plus adapter
            layer.lora_variant[adapter].init(layer, adapter_name=adapter)
    return float((error - delta).norm() / before.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _set_factors(layer: Any, adapter: str, error: Tensor, root: Tensor | None) -> Tensor:
    """Set A and B of a layer to the decomposition of `error`, and return s B A in the shape of the weight."""
    rank, scaling = layer.r[adapter], layer.scaling[adapter]
    if isinstance(layer, Embedding):
        left, right = low_rank_factors(error.T, rank)
        a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        stored, delta = (right, left), (left @ right).T
    else:
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        if isinstance(layer, _ConvNd):
            left, right = low_rank_factors(error.flatten(1), rank)
            stored, delta = (right.reshape(a.shape), left.reshape(b.shape)), (left @ right).reshape(error.shape)
        elif isinstance(layer, ParamWrapper) and error.dim() == 3:
            left, right = low_rank_factors(error, rank)
            # (E, R, K) and (E, N, R): as `ParamWrapper.get_delta_factors` reads them.
            of_a, of_b = (right, left) if is_swapped(layer) else (left.mT, right.mT)
            stored, delta = (of_a.reshape(a.shape), of_b.permute(1, 2, 0).reshape(b.shape)), left @ right
        else:
            left, right = low_rank_factors(error.T if layer.fan_in_fan_out else error, rank, root)
            stored, delta = (right, left), (left @ right).T if layer.fan_in_fan_out else left @ right
    a.copy_(stored[0] / scaling**0.5)
    b.copy_(stored[1] / scaling**0.5)
    return delta


def _parameter_name(layer: Any) -> str:
    return str(layer.parameter_name) if isinstance(layer, ParamWrapper) else "weight"


def _base(layer: Any) -> Any:
    return getattr(layer.get_base_layer(), _parameter_name(layer))
