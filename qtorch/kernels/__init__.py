"""Kernels: plain tensors in, plain tensors out, one operation a file, one registry.

Every module of this package is imported here, so that a kernel is added by adding its file.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:  # triton/ waits for the first launch; cpu/ is imported below
        importlib.import_module(f"{__name__}.{_module.name}")

from .cpu.calibrate import calibrate_cpu  # noqa: E402
from .int_matmul import int_matmul, int_scaled_matmul  # noqa: E402
from .launch_config import LaunchConfig, autotune  # noqa: E402
from .library import record_kernels  # noqa: E402
from .quantize_rowwise import quantize_int8_rowwise  # noqa: E402
from .registry import FallbackError, deregister, lookup, register  # noqa: E402
from .stochastic_update import stochastic_update_bf16_, stochastic_update_int8_  # noqa: E402

__all__ = [
    "FallbackError",
    "LaunchConfig",
    "autotune",
    "calibrate_cpu",
    "deregister",
    "int_matmul",
    "int_scaled_matmul",
    "lookup",
    "quantize_int8_rowwise",
    "record_kernels",
    "register",
    "stochastic_update_bf16_",
    "stochastic_update_int8_",
]
