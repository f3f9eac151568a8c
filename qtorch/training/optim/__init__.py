"""Optimizers whose states take fewer bytes than fp32, one a file."""

from .adam_4bit import Adam4bit, AdamW4bit
from .adam_8bit import Adam8bit, AdamW8bit
from .adam_fp8 import AdamFp8, AdamWFp8
from .adamw_fp32 import _AdamW
from .cpu_offload import CPUOffloadOptimizer
from .qgalore import QGaLoreAdamW8bit

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "QGaLoreAdamW8bit",
    "_AdamW",
]
