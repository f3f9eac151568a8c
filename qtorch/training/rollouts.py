"""Rollouts equal to the trainer: a token sampled with a KV cache has the log-probability that training computes.

Products of a model with int8 weights and activations are sums of integers, exact in any order. What is left in floating
point depends, in torch, on the number of rows and on the place of a row among them:

    sums (norms, softmax, attention, float linear layers)    order of addition by shape, vector length and threads
    silu, gelu, sigmoid                                      other code for the last elements of a vector

In `batch_invariant` each of these is a function of its own row: sums run from the first term to the last (`cumsum`,
which on a CPU adds up in double precision), so that terms of zero, those of padding and of masked tokens, change no bit
wherever they stand; activations are made of exp, tanh and erf, which torch computes alike for every element. Autograd
differentiates them as they are. The cost is a pass over all products of an attention or float layer.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..dtypes import QuantizedTensor
from ..dtypes.products import by_position
from ..model.install import check_model
from .weights.base import TrainingWeight

_PRODUCTS = 1 << 22
"""Number of products of a float layer that are in memory at a time."""


class batch_invariant(torch.overrides.TorchFunctionMode):
    """Context in which the floating-point part of a model on a CPU does not depend on the batch: a row of the input
    gives the same bits alone, in any batch, with padding on any side, and token by token with a KV cache.

        with batch_invariant():
            logits = model(input_ids, attention_mask=mask).logits

    Both sides run in it, trainer and sampler, with the same weights (`sync_codes`). Weights of linear layers are in
    int8 or fewer bits with activations in int8 by row; layers in floating point are possible, and slow. The model calls
    torch's functions (``attn_implementation="eager"`` or ``"sdpa"``), without dropout.

    Raises:
        ValueError: a float tensor of another device than a CPU, or a product that is not rows times a matrix.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = FUNCTIONS.get(func)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        of_floats = tensors and all(t.is_floating_point() or t.dtype is torch.bool for t in tensors)
        if function is None or not of_floats or any(isinstance(t, QuantizedTensor) for t in tensors):
            return func(*args, **kwargs)
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise ValueError("batch_invariant: cumsum has no order of its own on other devices than the CPU")
        args, kwargs = by_position(args, kwargs)
        return function(*args, **kwargs)


def sum_in_order(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum along one axis, from the first element to the last; all axes, flattened, without `dim`."""
    x = x if dtype is None else x.to(dtype)
    if dim is None:
        x, dim = x.reshape(-1), -1
    for axis in sorted((axis % x.dim() for axis in ((dim,) if isinstance(dim, int) else dim)), reverse=True):
        size = x.shape[axis]
        x = x.cumsum(axis).narrow(axis, size - 1, 1) if size else x.sum(axis, keepdim=True)
        x = x if keepdim else x.squeeze(axis)
    return x


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    total = sum_in_order(x, dim, keepdim, dtype=dtype)
    return total / (x.numel() // max(total.numel(), 1))


def _softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    terms = (x - x.detach().amax(dim, keepdim=True)).exp()
    return terms / sum_in_order(terms, dim, True)


def _log_softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    x = x - x.detach().amax(dim, keepdim=True)
    return x - sum_in_order(x.exp(), dim, True).log()


def _logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    high = x.detach().amax(dim, keepdim=True)
    total = sum_in_order((x - high).exp(), dim, True).log() + high
    return total if keepdim else total.squeeze(dim)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) times b (..., K, N), a few rows at a time."""
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"batch_invariant: a product of shapes {tuple(a.shape)} and {tuple(b.shape)} is of a vector")
    columns = b.mT.unsqueeze(-3)
    rows = max(1, _PRODUCTS // max(1, math.prod(columns.shape) * math.prod(a.shape[: -b.dim()])))
    return torch.cat([sum_in_order(part.unsqueeze(-2) * columns, -1) for part in a.split(rows, -2)], -2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _matmul(x.reshape(-1, x.shape[-1]), weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    wide = x.float()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = wide * (_mean(wide * wide, tuple(range(-len(normalized_shape), 0)), True) + eps).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    wide, axes = x.float(), tuple(range(-len(normalized_shape), 0))
    centered = wide - _mean(wide, axes, True)
    y = centered * (_mean(centered * centered, axes, True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of rows (B, H, M, D) with keys (B, H, T, D)."""
    if dropout_p:
        raise ValueError("batch_invariant: dropout is another in each call; call model.eval(), or set it to 0")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for x in (key, value))
    scores = _matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        floats = attn_mask.dtype is not torch.bool
        scores = scores + attn_mask if floats else scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    return _matmul(_softmax(scores, -1), value)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x * _sigmoid(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())


_PRODUCTS_OF_TORCH = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)

FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.sum, Tensor.sum), sum_in_order),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys((functional.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), _logsumexp),
    **dict.fromkeys(_PRODUCTS_OF_TORCH, _matmul),
    functional.linear: _linear,
    functional.rms_norm: _rms_norm,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, functional.sigmoid), _sigmoid),
    functional.silu: _silu,
    functional.gelu: _gelu,
}
"""Function of torch -> what it is in `batch_invariant`."""


@torch.no_grad()
def sync_codes(trainer: nn.Module, sampler: nn.Module) -> None:
    """Write the weights of `trainer`, in quantization-aware training or in floating point, into those of `sampler`, the
    converted model, in place: in codes where they are in codes.

    Raises:
        ValueError: a parameter of `sampler` has no counterpart of its name and shape in `trainer`; nothing is written.
    """
    check_model("sync_codes", trainer)
    check_model("sync_codes", sampler)
    sources = dict(trainer.named_parameters())
    targets = dict(sampler.named_parameters())
    for name, target in targets.items():
        if name not in sources or sources[name].shape != target.shape:
            raise ValueError(f"sync_codes: trainer has no parameter {name} of shape {tuple(target.shape)}")
    for name, target in targets.items():
        source: Any = sources[name]
        target.copy_(source.convert() if isinstance(source, TrainingWeight) else source.detach())
