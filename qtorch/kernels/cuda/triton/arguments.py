"""Checks of a launcher's arguments before the launch, and sizes of blocks."""

import os

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on one device that Triton can use, and that their elements lie there in memory.

    Raises:
        ValueError: they are not.
    """
    given = {name: t for name, t in tensors.items() if t is not None}
    devices = {t.device for t in given.values()}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {found}")
    (device,) = devices
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"{op} runs on CUDA, or with TRITON_INTERPRET=1 on CPU; the tensors are on {device}")
    for name, t in given.items():
        if t.is_neg() or (not t.data_ptr() and t.numel()):
            what = "is a lazy negative: .resolve_neg()" if t.is_neg() else f"has no memory: a {type(t).__name__}"
            raise ValueError(f"{op}: {name} of shape {tuple(t.shape)} {what}")


def check_matrix(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a tensor is 2-d and has one of these dtypes.

    Raises:
        ValueError: it is not.
    """
    if x.dim() != 2 or x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{op}: {name} must be a matrix of {wanted}, got shape {tuple(x.shape)} of {x.dtype}")


def check_shape(op: str, name: str, x: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Check that a tensor has one of these shapes, or is None.

    Raises:
        ValueError: another.
    """
    if x is not None and tuple(x.shape) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(x.shape)}")


def power_of_two_divisor(*sizes: int) -> int:
    """The largest power of two that divides all of these."""
    size = 0
    for s in sizes:
        size |= s
    return size & -size


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
