"""Features of the CPU and the GPU that the choice of a kernel depends on."""

import functools
import importlib.util

import torch


@functools.cache
def cpu_has(feature: str) -> bool:
    """Whether the CPU has `feature`: ``"vnni"`` (8-bit dot products) or ``"bf16"`` (AMX or AVX-512 bf16 products)."""
    checks = {"vnni": ("_is_vnni_supported",), "bf16": ("_is_amx_tile_supported", "_is_avx512_bf16_supported")}
    found = any(getattr(torch.cpu, check, bool)() for check in checks[feature])  # bool() is False
    return found and (feature != "vnni" or _int_mm_is_exact())


def _int_mm_is_exact() -> bool:
    """Whether `torch._int_mm` is exact. Without VNNI, or if ONEDNN_MAX_CPU_ISA forbids it, oneDNN adds pairs of
    products in 16 bits, and large codes saturate."""
    codes = torch.full((64, 256), 127, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(codes, codes.t()) == 127 * 127 * 256).all())


def cuda_lacks(feature: str) -> str | None:
    """Why a feature is missing, None if it is available: ``"triton"``, or ``"float8"``, float8 products (compute
    capability 8.9 and up). Without a GPU, the answer is that for a recent GPU."""
    return _cuda_lacks(feature)


# As torch.compiler.assume_constant_result does: the answer is a constant of a compiled graph.
cuda_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _cuda_lacks(feature: str) -> str | None:
    if feature == "triton":
        return None if _importable("triton") else "needs triton, which is not installed"
    if torch.version.hip:
        return "runs on CUDA"
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 9) else f"needs compute capability 8.9, the GPU has {capability}"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # sys.modules maps the name to None: the import is blocked
        return False
