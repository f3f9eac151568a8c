"""Steps around functions of other packages, and what happens when their modules are put around quantized weights.

torch calls a hook when a module becomes the submodule of another. A handler is found by the name of the attribute, and
looks at the class of the outer module: PEFT's layers keep what they adapt in `base_layer`, for example. So the classes
of those packages stay as they are, and a package is imported only by a handler that has seen one of its modules.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..dtypes import QuantizedTensor, ops
from ..dtypes.parameter import FROZEN, HOW_TO_TRAIN, OPTIMIZERS
from ..primitives.jsonable import to_json
from ..primitives.tracing import starts_no_graph

F = TypeVar("F", bound=Callable[..., Any])


def around(owner: Any, name: str) -> Callable[[F], F]:
    """Decorator: `owner.name` calls the function, with what it was before and its arguments."""

    def decorate(step: F) -> F:
        original = getattr(owner, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(original, *args, **kwargs)

        setattr(owner, name, call)
        return step

    return decorate


@around(Optimizer, "add_param_group")
def _trains_frozen(original: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Warn, once, that an optimizer does not train the weights that `quantize_` has frozen."""
    original(optimizer, group)
    OPTIMIZERS.add(optimizer)
    given = optimizer.param_groups[-1]["params"]
    if held := [p for p in given if id(p) in FROZEN and isinstance(p, QuantizedTensor) and not p.trains]:
        FROZEN.clear()
        warnings.warn(
            f"qtorch: {type(optimizer).__name__} gets {len(held)} weights that are quantized and stay frozen; "
            f"{HOW_TO_TRAIN}. Where that is meant, requires_grad_(False) on them first, or give it what trains alone",
            stacklevel=5,
        )


@around(torch.onnx, "export")
def _exported(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a quantized model at once: ONNX lacks its operators. What `portable` returns has none of them."""
    if isinstance(model, nn.Module) and any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise TypeError("torch.onnx.export: the model is quantized; write qtorch.export.onnx(model, args, path)")
    return original(model, *args, **kwargs)


# DistributedDataParallel sends all parameters of rank 0 joined to one flat tensor; frozen quantized tensors cannot be
# joined. So it is told to leave them out, and their inner tensors are sent here. Weights that are trained in codes are
# rounded stochastically, in the same way on all ranks.


def _replica(outer: Any, inner: nn.Module) -> None:
    """Exclude the frozen weights of `inner` from what `outer`, in construction, sends, and send them; share the noise
    of the rounding of weights in codes, from a seed that rank 0 draws.
    """
    if not isinstance(outer, DistributedDataParallel):
        return
    group = outer.process_group
    parameters: Iterable[tuple[str, Any]] = inner.named_parameters(remove_duplicate=False)
    frozen = {name: each for name, each in parameters if isinstance(each, QuantizedTensor) and not each.trains}
    outer.parameters_to_ignore.update(frozen)
    if not _sends_at_start():
        return
    if frozen:
        _check_schemes_are_equal(frozen, group)
        for parameter in dict.fromkeys(frozen.values()):
            for tensor in parameter.inner_tensors.values():
                # Bytes are sent, so that every dtype can be.
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(flat, group=group, group_src=0)
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
            ops.count_write(parameter)
    if any(map(_is_trained_in_codes, inner.parameters())):
        seed = torch.randint(2**62, (1,), device="cpu").to(next(inner.parameters()).device)
        dist.broadcast(seed, group=group, group_src=0)
        from ..training.weights.codes import share_rounding  # whoever trains has imported it

        share_rounding(inner, int(seed))


def _sends_at_start() -> bool:
    """The argument `init_sync` of the constructor that is running; with False, no rank waits for another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not DistributedDataParallel.__init__.__code__:
        frame = frame.f_back
    return frame is None or bool(frame.f_locals.get("init_sync", True))


def _check_schemes_are_equal(frozen: dict[str, QuantizedTensor], group: dist.ProcessGroup) -> None:
    digest = hashlib.sha256()
    for name, parameter in frozen.items():
        digest.update(f"{name} {to_json(parameter.scheme)} {list(parameter.inner_tensors)}".encode())
    device = next(iter(frozen.values())).device
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=device)
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, own, group=group)
    if not all(torch.equal(own, other) for other in all_of_them):
        raise ValueError(
            "DistributedDataParallel: the weights of this rank are quantized differently from those of another rank; "
            "quantize or load the same model on every rank"
        )


def _is_peft(outer: nn.Module) -> bool:
    """Whether this is a module of PEFT, or of a class derived from one."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(outer).__mro__)


def _has_frozen(inner: nn.Module) -> bool:
    return any(isinstance(p, QuantizedTensor) and not p.trains for p in inner.parameters())


def _adapter(outer: Any, inner: nn.Module) -> None:
    if _is_peft(outer) and hasattr(inner, "parts_of_state"):
        raise ValueError("layers that are fused take no adapters: call get_peft_model first, then fuse_projections")
    if _is_peft(outer) and _has_frozen(inner):
        from .peft.adapter_layers import adapt

        adapt(outer, inner)


def _trained_copy(outer: Any, inner: nn.Module) -> None:
    """Refuse what would be a copy of a quantized module that trains nothing."""
    if type(outer).__name__ == "ModulesToSaveWrapper" and _is_peft(outer) and _has_frozen(inner):
        raise ValueError(
            f"modules_to_save trains a copy of a {type(inner).__name__} whose weight is quantized and frozen: leave it "
            'in float, quantize_(model, {"its name": None, r".*": recipe}), or call dequantize_ on that module'
        )


HANDLERS: dict[str, Callable[[Any, nn.Module], None]] = {
    "base_layer": _adapter,
    "module": _replica,
    "original_module": _trained_copy,
}
"""Name of the attribute that takes the inner module -> handler(outer module, inner module)."""


@starts_no_graph
def _registered(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    handler = HANDLERS.get(name)
    if handler is not None and inner is not None:
        handler(outer, inner)


@starts_no_graph
def _parallelized(module: nn.Module, name: str, parameter: Any) -> None:
    """Refuse a weight in training that tensor parallelism of torch has cut. FSDP2 registers none, and what replaces a
    DTensor was loaded."""
    local = getattr(parameter, "_local_tensor", None)
    trains = isinstance(local, QuantizedTensor) and local.trains
    if not trains or hasattr(module._parameters.get(name), "_local_tensor"):
        return
    from ..training.engine.split import CUT_HERE

    if module not in CUT_HERE:
        floats = ", with a recipe that keeps weights in floating point, such as int8_mixed_precision_training()"
        raise ValueError(
            f"{name} of {module}: the styles of torch's tensor parallelism do not quantize it by its whole rows; take "
            "ColwiseParallel and RowwiseParallel of qtorch.integrations.tensor_parallel"
            f"{floats if _is_trained_in_codes(local) else ''}, or convert() first"
        )


def _is_trained_in_codes(parameter: Any) -> bool:
    if not isinstance(parameter, QuantizedTensor) or not parameter.trains:
        return False
    from ..training.weights.codes import WeightInCodes

    return isinstance(parameter, WeightInCodes)


hooks.register_module_module_registration_hook(_registered)
hooks.register_module_parameter_registration_hook(_parallelized)
