"""prepare_for_adapters: what a quantized model needs before its adapters are trained."""

from __future__ import annotations

from typing import Any, TypeVar

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ...dtypes import QuantizedTensor
from ...model_argument import check_model
from .layers import adapt_model

M = TypeVar("M", bound=nn.Module)


def prepare_for_adapters(
    model: M, *, gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
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

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no weight of it is quantized, or it has no gradient checkpointing.
    """
    check_model("prepare_for_adapters", model)
    any_model: Any = model
    if not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters()):
        raise ValueError(
            f"prepare_for_adapters: no weight of this {type(model).__name__} is quantized; call quantize_ first"
        )
    if gradient_checkpointing and not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"prepare_for_adapters: a {type(model).__name__} has no gradient_checkpointing_enable(), which models of "
            "transformers have; pass gradient_checkpointing=False"
        )
    if not any(isinstance(module, BaseTuner) for module in model.modules()):
        model.requires_grad_(False)
    adapt_model(model)
    if gradient_checkpointing:
        arguments = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        any_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        any_model.enable_input_require_grads()
    return model
