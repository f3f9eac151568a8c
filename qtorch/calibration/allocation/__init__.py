"""Bit allocation: a recipe for each weight of a model, chosen by what its error costs, within a budget.

    allocation = allocate(model, [intx_weight_only("int2"), intx_weight_only("int4")], "3.5 bits", batches)
    quantize_(model, allocation)

`items` finds the weights and says what each candidate costs, `scores` what it loses, and `allocate` chooses; `swaps`
tries exchanges on the quantized model. The result is an `Allocation`, with a report. `fastest` chooses by measured time
alone.
"""

from .allocate import allocate
from .allocation import Allocation
from .fastest import fastest

__all__ = ["Allocation", "allocate", "fastest"]
