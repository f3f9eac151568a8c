"""Optimizers whose states take fewer bytes than fp32, one a file."""

from .adam import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8, _AdamW
from .cpu_offload import CPUOffloadOptimizer
from .qgalore import QGaLoreAdamW8bit

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer", "QGaLoreAdamW8bit",
    "_AdamW",
]  # fmt: skip
