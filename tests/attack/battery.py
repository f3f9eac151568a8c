"""What is done with a quantized tensor that has loaded: every operation works, or says clearly that it does not."""

import copy
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional

from qtorch.dtypes import ConvWeight, MatrixWeight, QuantizedTensor
from qtorch.kernels.linear import reference
from tests.movement import holding, reasons


def battery(weight: QuantizedTensor) -> str | None:
    """What is wrong with `weight`; None if nothing is."""
    for operation in OPERATIONS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                operation(weight)
        except AssertionError as error:
            return f"{operation.__name__}: {error or 'AssertionError'}"
        except reasons.CLEAR as error:
            if not str(error):
                return f"{operation.__name__}: {type(error).__name__} without a message"
        except Exception as error:
            return f"{operation.__name__}: {type(error).__name__}: {error}"
    return None


def close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Assert that `got` is `wanted` up to rounding; where `wanted` is not finite only its shape is compared."""
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if not bool(wanted.isfinite().all()):
        return
    bound = 2e-2 if got.dtype in (torch.bfloat16, torch.float16) else 1e-3
    error, size = (got.double() - wanted.double()).abs().max(), wanted.double().abs().max()
    assert bool(error <= bound * size + 1e-30), f"{what}: off by {float(error):.3g}, values up to {float(size):.3g}"


def whole(w: QuantizedTensor) -> None:
    """Its inner tensors are plain and nothing of its class is hidden by an attribute."""
    for name, inner in w.inner_tensors.items():
        assert isinstance(inner, torch.Tensor), f"{name} is a {type(inner).__name__}"
    for name, value in vars(w).items():
        own = name in w.tensor_names(w.scheme) or name in ("scheme", "fast_linear", "_is_param")
        known = getattr(type(w), name, value)
        assert own or value is known or hasattr(type(known), "__set__"), f"the attribute {name} of its class is hidden"
    assert w.fast_linear is None or callable(w.fast_linear)
    assert tuple(w.shape) == tuple(w.scheme.shape), f"its shape is {tuple(w.shape)}, its scheme says {w.scheme.shape}"
    assert w.dtype == w.scheme.dtype


def prints(w: QuantizedTensor) -> None:
    assert repr(w)


def dequantizes(w: QuantizedTensor) -> None:
    floats = w.dequantize()
    assert floats.shape == w.shape, f"to shape {tuple(floats.shape)}, its own is {tuple(w.shape)}"
    assert floats.dtype == w.dtype or w.dtype == torch.uint8


def multiplies(w: QuantizedTensor) -> None:
    """F.linear, the first and later calls, against the arithmetic of its inner tensors in torch operators."""
    if w.dim() != 2:
        return
    other = torch.bfloat16 if w.dtype == torch.float32 else torch.float32
    for rows, dtype in ((1, w.dtype), (3, w.dtype), (17, w.dtype), (1, w.dtype), (3, other)):
        if dtype == other and w.trains:
            continue
        x = _input(rows, w.shape[1], dtype)
        y = functional.linear(x, w)
        assert y.shape == (rows, w.shape[0]), f"F.linear gives {tuple(y.shape)}"
        if not w.trains:
            # The reference knows matrices as they are held.
            held_otherwise = isinstance(w, MatrixWeight)
            wanted = functional.linear(x, w.dequantize(dtype)) if held_otherwise else reference.linear(x, w, None)
            close(y, wanted, f"F.linear of {rows} rows in {dtype}")


def multiplies_batches(w: QuantizedTensor) -> None:
    if w.dim() == 3:
        x = _input(5, w.shape[2], w.dtype).expand(w.shape[0], 5, w.shape[2])
        y = torch.bmm(x, w.transpose(1, 2))
        assert y.shape == (w.shape[0], 5, w.shape[1])
        if not w.trains and w.scheme.activation is None:
            close(y, torch.bmm(x, w.dequantize().transpose(1, 2)), "bmm")


def convolves(w: QuantizedTensor) -> None:
    if w.dim() != 4:
        return
    x = torch.randn(2, w.shape[1], 5, 5, dtype=w.dtype)
    y = functional.conv2d(x, w)
    assert y.shape == (2, w.shape[0], 6 - w.shape[2], 6 - w.shape[3])
    if isinstance(w, ConvWeight) and w.scheme.activation is None:
        close(y, functional.conv2d(x.float(), w.dequantize(torch.float32)), "conv2d")


def looks_up(w: QuantizedTensor) -> None:
    if w.dim() == 2 and w.shape[0]:
        ids = torch.tensor([0, w.shape[0] - 1, w.shape[0] // 2])
        rows = functional.embedding(ids, w)
        assert rows.shape == (3, w.shape[1])
        if not w.trains and w.scheme.activation is None:
            close(rows, w.dequantize()[ids], "embedding")


def refuses_rows_that_it_has_not(w: QuantizedTensor) -> None:
    if w.dim() == 2:
        for row in (w.shape[0], -1, 2**40):
            try:
                functional.embedding(torch.tensor([row]), w)
            except (IndexError, *reasons.CLEAR):
                continue
            raise AssertionError(f"it gives row {row} of {w.shape[0]}")


def transposes(w: QuantizedTensor) -> None:
    if w.dim() == 2:
        t = w.detach().t()
        assert t.shape == (w.shape[1], w.shape[0])
        if isinstance(t, QuantizedTensor) and not w.trains and w.scheme.activation is None:
            close(t.dequantize(), w.dequantize().t(), "t()")
            x = _input(3, w.shape[0], w.dtype)
            close(functional.linear(x, t), functional.linear(x.float(), t.dequantize(torch.float32)), "of t()")


def slices(w: QuantizedTensor) -> None:
    if w.dim() and w.shape[0] > 1:
        part = w.detach()[w.shape[0] // 2 :]
        assert part.shape == (w.shape[0] - w.shape[0] // 2, *w.shape[1:])
        if isinstance(part, QuantizedTensor) and not w.trains:
            close(part.dequantize(), w.dequantize()[w.shape[0] // 2 :], "slice")


def converts(w: QuantizedTensor) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert w.detach().to(dtype).shape == w.shape


def clones(w: QuantizedTensor) -> None:
    for made in (w.detach().clone(), copy.deepcopy(w.detach())):
        assert type(made) is type(w)
        close(made.dequantize(), w.dequantize(), "a copy")


def is_written_to(w: QuantizedTensor) -> None:
    with torch.no_grad():
        new = copy.deepcopy(w.detach())
        new.copy_(w.dequantize(torch.float32) / 2)
        assert new.dequantize().shape == w.shape
        new.copy_(w.detach())


def has_a_gradient(w: QuantizedTensor) -> None:
    if w.dim() == 2:
        x = _input(3, w.shape[1], w.dtype).requires_grad_()
        functional.linear(x, w.detach()).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def saves_again(w: QuantizedTensor) -> None:
    again = holding.through_file({"w": w})["w"]
    assert type(again) is type(w)
    assert again.scheme == w.scheme
    close(again.dequantize(), w.dequantize(), "saved and loaded again")


OPERATIONS: list[Callable[[QuantizedTensor], None]] = [
    whole, prints, dequantizes, multiplies, multiplies_batches, convolves, looks_up, refuses_rows_that_it_has_not,
    transposes, slices, converts, clones, is_written_to, has_a_gradient, saves_again, multiplies,
]  # fmt: skip


def _input(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=dtype if dtype.is_floating_point else torch.float32)
