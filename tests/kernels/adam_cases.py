"""Steps of Adam on small parameters, for the tests of every kernel."""

from collections.abc import Callable

import torch

from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.adam import FORMS, AdamStep, Moment, adam_step
from qtorch.primitives.granularity import FlatBlocks
from qtorch.primitives.layouts.packed import packed_length

ALL_FORMS = ["32", *FORMS]

BLOCKS = [FlatBlocks(5, 300, 100), FlatBlocks(1, 1500, 256), FlatBlocks(2, 256, 128), FlatBlocks(3, 77, 39)]


def zeros(form: str, blocks: FlatBlocks, count: int, device: str = "cpu") -> list[Moment]:
    """Moments before the first step."""
    if form == "32":
        return [Moment(torch.zeros(blocks.rows * blocks.length, device=device)) for _ in range(count)]
    rows, width = blocks.shape
    moments = []
    for index in range(count):
        spec = FORMS[form].second if index else FORMS[form].first
        bytes_ = packed_length(width, 4) if form == "4" else width
        zero = 0 if index or form == "float8" else 0x88 if form == "4" else 128
        codes = torch.full((rows, bytes_), zero, dtype=torch.uint8, device=device).view(
            torch.uint8 if form == "4" else spec.dtype.storage
        )
        moments.append(Moment(codes, torch.ones(rows, 1, device=device)))
    return moments


def gradient(blocks: FlatBlocks, dtype: torch.dtype, number: int) -> torch.Tensor:
    """Numbers of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(number)
    count = blocks.rows * blocks.length
    size = 10 ** (torch.rand(count, generator=generator) * 6 - 5)
    grad = torch.randn(count, generator=generator) * size
    grad[::7] = 0
    return grad.to(dtype)


def step(form: str, number: int, key: int | None = None, l2: float = 0.0) -> AdamStep:
    size, correction = 1e-2 / (1 - 0.9**number), (1 - 0.999**number) ** -0.5
    return AdamStep(form, 0.9, 0.999, 1e-8, 1 - 1e-5, l2, size, correction, key, 12345)


def tensors(moments: list[Moment]) -> list[torch.Tensor]:
    return [m.data.view(torch.uint8) if m.data.dtype != torch.float32 else m.data for m in moments] + [
        m.scale for m in moments if m.scale is not None
    ]


def check_equals_the_reference(
    run: Callable[..., object], form: str, blocks: FlatBlocks, dtype: torch.dtype, count: int, key: int | None,
    l2: float, device: str = "cpu",
) -> None:  # fmt: skip
    """`run` gives the bits of the step in torch operators, step after step."""
    reference = zeros(form, blocks, count)
    ours = [Moment(*(None if part is None else part.to(device) for part in m)) for m in zeros(form, blocks, count)]
    other = torch.randn(blocks.rows * blocks.length).to(dtype)
    weight = other.to(device, copy=True)
    for number in (1, 2, 3):
        grad = gradient(blocks, dtype, number)
        run(weight, grad.to(device), ours, blocks, step(form, number, key, l2))
        portable(adam_step)(other, grad, reference, blocks, step(form, number, key, l2))
    assert torch.equal(weight.cpu(), other), (blocks, dtype, count, key, l2)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(ours), tensors(reference), strict=True))
