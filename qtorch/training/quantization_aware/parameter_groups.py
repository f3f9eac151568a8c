"""parameter_groups: learned scales with a learning rate of their own, and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...prepared_module import QuantizationState


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the parameters of the model, and, if there are any, those that quantization has added.

    A step is learned as a logarithm (`LearnedStep`): a step of Adam with `scale_lr` changes it by that share.

    Args:
        lr, weight_decay: of the model's own parameters.
        scale_lr: of learned scales and offsets, `lr` by default; their weight decay is zero.
    """
    learned = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, QuantizationState)
        for parameter in module.parameters()
    }
    own = [parameter for parameter in model.parameters() if id(parameter) not in learned]
    groups: list[dict[str, Any]] = [{"params": own, "lr": lr, "weight_decay": weight_decay}]
    if learned:
        rate = lr if scale_lr is None else scale_lr
        groups.append({"params": list(learned.values()), "lr": rate, "weight_decay": 0.0})
    return groups
