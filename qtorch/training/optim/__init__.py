"""Optimizers whose states take fewer bytes than fp32, one a file."""

from .adam import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8, _AdamW
from .cpu_offload import CPUOffloadOptimizer
from .muon import Muon8bit
from .qgalore import QGaLoreAdamW8bit

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer", "Muon8bit",
    "QGaLoreAdamW8bit", "_AdamW",
]  # fmt: skip
