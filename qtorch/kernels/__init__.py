"""Kernels: plain tensors in, plain tensors out, one operation a file, one registry.

Every module of this package is imported here, so that a kernel is added by adding its file.
"""

from ..primitives.discovery import import_modules

import_modules(__name__, __path__)

from .cpu.operators import cpu_operators_library  # noqa: E402
from .cpu.tuning import tune_cpu  # noqa: E402
from .cuda.launch_config import LaunchConfig, autotune  # noqa: E402
from .custom_ops import record_kernels  # noqa: E402
from .ops.int_matmul import int_matmul, int_scaled_matmul  # noqa: E402
from .ops.quantize import quantize_int8_rowwise  # noqa: E402
from .ops.stochastic_update import stochastic_update_bf16_, stochastic_update_int8_  # noqa: E402
from .registry import FallbackError, deregister, lookup, register  # noqa: E402

__all__ = [
    "FallbackError", "LaunchConfig", "autotune", "cpu_operators_library", "deregister", "int_matmul",
    "int_scaled_matmul", "lookup", "quantize_int8_rowwise", "record_kernels", "register", "stochastic_update_bf16_",
    "stochastic_update_int8_", "tune_cpu",
]  # fmt: skip
