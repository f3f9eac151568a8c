"""What differs between versions of PEFT, back to 0.18. The other files see it as in the newest one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor

_MAGNITUDE_IS_NAMED = "adapter_name" in inspect.signature(DoraLinearLayer.forward).parameters


def option(arguments: Mapping[str, Any], name: str, default: Any) -> Any:
    """An option of the adapter that `update_layer` is called with: before 0.19 an argument, now of `config`."""
    return getattr(arguments.get("config"), name, arguments.get(name, default))


def has_options(arguments: Mapping[str, Any]) -> bool:
    """Whether `update_layer` is called with the options of LoRA."""
    return arguments.get("config") is not None or "init_lora_weights" in arguments


def of_magnitude(adapter: str) -> dict[str, str]:
    """What the forward of DoRA's magnitude takes since 0.19: the name of the adapter."""
    return {"adapter_name": adapter} if _MAGNITUDE_IS_NAMED else {}


def is_swapped(layer: Any) -> bool:
    """Whether a `ParamWrapper` sees experts as (experts, outputs, inputs); 0.18 never does."""
    return bool(getattr(layer, "_did_swap_in_out_features", False))


def delta_factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """`ParamWrapper.get_delta_factors`, which 0.21 added: (left, right, scaling), left (E, M, R), right (E, R, N)."""
    if hasattr(layer, "get_delta_factors"):
        left, right, scaling = layer.get_delta_factors(adapter)
        return left, right, scaling
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
    left, right = (b, a) if is_swapped(layer) else (a.mT, b.mT)
    dtype = layer.get_param().dtype
    return left.to(dtype), right.to(dtype), layer.scaling[adapter]
