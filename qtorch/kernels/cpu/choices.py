"""Which way is taken for how many rows."""
from __future__ import annotations
from typing import Any
import torch
WAYS = {"dot": 0, "tile": 1, "amx": 2}
FORCED: list[str] = []
def weight_only(library: Any, bits: int, per_row: bool, dtype: torch.dtype, m: int) -> str:
    if FORCED: return FORCED[-1]
    if library is None: return "slices"
    if m <= 4: return "dot"
    if library.instruction_set == "amx": return "amx"
    return "dot" if m <= 8 else "tile"
def int8(library: Any, bits: int, per_row: bool, m: int) -> str:
    if FORCED: return FORCED[-1]
    if library is None: return "torch"
    return "dot" if m <= 4 else "tile"
