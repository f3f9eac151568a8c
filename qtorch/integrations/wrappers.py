"""Modules of other packages that are put around a module with quantized weights, and what has to happen then.

torch calls a hook when a module becomes the submodule of another. A handler is found by the name of the attribute, and
looks at the class of the outer module: PEFT's layers keep what they adapt in `base_layer`, for example. So the classes
of those packages stay as they are, and a package is imported only by a handler that has seen one of its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ..dtypes import QuantizedTensor
from ..training import TrainingWeight
from ..training.engine.split import CUT_HERE
from ..training.weights.codes import CodesWeight


def holds_frozen(module: nn.Module | None) -> bool:
    """Whether a parameter of `module` or of its submodules is a frozen quantized weight."""
    return module is not None and any(isinstance(p, QuantizedTensor) and not p.trains for p in module.parameters())


def _adapter(outer: Any, inner: nn.Module) -> None:
    if _comes_from(outer, "peft") and holds_frozen(inner):
        from .peft.layers import adapt

        adapt(outer, inner)


def _trained_copy(outer: Any, inner: nn.Module) -> None:
    """Refuse what would be a copy of a quantized module that trains nothing."""
    if _comes_from(outer, "peft") and type(outer).__name__ == "ModulesToSaveWrapper" and holds_frozen(inner):
        raise ValueError(
            f"modules_to_save trains a copy of a {type(inner).__name__} whose weight is quantized and frozen: leave it "
            'in float, quantize_(model, {"its name": None, r".*": recipe}), or call dequantize_ on that module'
        )


def _replica(outer: Any, inner: nn.Module) -> None:
    if not isinstance(outer, DistributedDataParallel):
        return
    from .distributed import ignore_frozen, round_alike

    if holds_frozen(inner):
        ignore_frozen(outer, inner)
    if any(isinstance(parameter, CodesWeight) for parameter in inner.parameters()):
        round_alike(outer, inner)


HANDLERS: dict[str, Callable[[Any, nn.Module], None]] = {
    "base_layer": _adapter,
    "module": _replica,
    "original_module": _trained_copy,
}
"""Name of the attribute that takes the inner module -> handler(outer module, inner module)."""


def _registered(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    handler = HANDLERS.get(name)
    if handler is not None and inner is not None:
        handler(outer, inner)


def _parallelized(module: nn.Module, name: str, parameter: Any) -> None:
    """Refuse a weight in training that tensor parallelism of torch has cut. FSDP2 registers none, and what replaces a
    DTensor was loaded."""
    local = getattr(parameter, "_local_tensor", None)
    if not isinstance(local, TrainingWeight) or hasattr(module._parameters.get(name), "_local_tensor"):
        return
    if module not in CUT_HERE:
        floats = ", with a recipe that keeps weights in floating point, such as int8_mixed_precision_training()"
        raise ValueError(
            f"{name} of {module}: the styles of torch's tensor parallelism do not quantize it by its whole rows; take "
            "ColwiseParallel and RowwiseParallel of qtorch.integrations.tensor_parallel"
            f"{floats if isinstance(local, CodesWeight) else ''}, or convert() first"
        )


def _comes_from(module: nn.Module, package: str) -> bool:
    """Whether the class of `module`, or one that it is derived from, is of `package`."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)


register_module_module_registration_hook(_registered)
register_module_parameter_registration_hook(_parallelized)
