"""Optimizers of bitsandbytes: Adam and AdamW of 8 bits, and paged ones, whose states lie on the CPU."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ...training import optim

__all__ = ["Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"]

FIXED = {
    "optim_bits": (8, 32),  # bitsandbytes passes 32, and means 8
    "args": (None,),
    "min_8bit_size": (4096,),
    "percentile_clipping": (100,),
    "block_wise": (True,),
    "is_paged": (False,),
}
"""Arguments of bitsandbytes -> the values that change nothing here."""


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    for key, values in FIXED.items():
        if key in options and options.pop(key) not in values:
            raise ValueError(f"{name}: {key} has no equivalent in qtorch; leave it out")
    return options


class Adam8bit(optim.Adam8bit):
    """`qtorch.training.optim.Adam8bit` with bitsandbytes' arguments."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=lr, **_options("Adam8bit", options))


class AdamW8bit(optim.AdamW8bit):
    """`qtorch.training.optim.AdamW8bit` with bitsandbytes' arguments."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=lr, **_options("AdamW8bit", options))


def PagedAdam8bit(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """`CPUOffloadOptimizer` of `Adam8bit`."""
    return optim.CPUOffloadOptimizer(params, optim.Adam8bit, lr=lr, **_options("PagedAdam8bit", options))


def PagedAdamW8bit(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """`CPUOffloadOptimizer` of `AdamW8bit`."""
    return optim.CPUOffloadOptimizer(params, optim.AdamW8bit, lr=lr, **_options("PagedAdamW8bit", options))


def __getattr__(name: str) -> Any:
    raise AttributeError(f"bitsandbytes.optim.{name} has no equivalent here, only {', '.join(__all__)}")
