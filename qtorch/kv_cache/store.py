"""What a growing and a static store of keys and values share: attention on them, and their numbers."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.cache_form import TOKENS, CacheForm, Parts, cache_form
from ..kernels.ops.kv_attention import kv_attention
from ..kernels.ops.quantize import rotate_heads
from ..primitives import is_compiling, jsonable, qdtype
from ..primitives.affine import check_tensors


@jsonable
@dataclass(frozen=True)
class KVCacheSpec:
    """How the keys and values of attention are quantized. Hashable, JSON-able.

    Every token is quantized once, when it is appended or leaves the recent tokens; its codes never change afterwards.
    What is None depends on the store, which has the spec as it is then, see `settled`.

    Args:
        dtype: ``"int8"`` (symmetric), ``"int4"``, ``"int3"``, ``"int2"`` (with zero points, packed to their size) or
            ``"float8_e4m3fn"``; a torch dtype works too.
        keys: ``"token"``, a scale for each token of a head; or ``"channel"``, a scale for each channel of `block`
            consecutive tokens, which keys with a few large channels want (KIVI, arXiv 2402.02750). Values have a scale
            for each token of a head. None: by channel in a store that grows, if keys have 4 bits or less.
        block: tokens whose keys share the scales of channels.
        recent: the number of latest tokens, at least, that stay in floating point; None: as many as a block in a store
            that grows, if keys share scales or keys or values have 4 bits or less; else none.
        scale_dtype: dtype in which scales and zero points are kept.
        value_dtype: that of the values; None: that of the keys, which need as many bits or more.
        rotate_keys: quantize keys times a Hadamard matrix, which spreads large channels over all (QuaRot, arXiv
            2404.00456); the query is multiplied too, so that products stay. None: if keys have 4 bits or less and a
            scale for each token.
        rotate_values: the same for values; the result is multiplied back.

    Raises:
        ValueError: there is no such format, or a size is negative.
    """

    dtype: str = "int8"
    keys: str | None = None
    block: int = 32
    recent: int | None = None
    scale_dtype: torch.dtype = torch.float32
    value_dtype: str | None = None
    rotate_keys: bool | None = None
    rotate_values: bool = False

    def __post_init__(self) -> None:
        for field in ("dtype", "value_dtype"):
            name: Any = getattr(self, field) or self.dtype
            name = name if isinstance(name, str) else qdtype(name).name
            if name not in TOKENS:
                raise ValueError(f"KVCacheSpec: {field} is one of {', '.join(TOKENS)}, got {name!r}")
            object.__setattr__(self, field, name)
        if self.keys not in ("token", "channel", None):
            raise ValueError(f'KVCacheSpec: keys is "token" or "channel", got {self.keys!r}')
        if self.block < 1 or (self.recent or 0) < 0:
            raise ValueError(f"KVCacheSpec: block is positive, recent not negative, got {self.block}, {self.recent}")
        if self.scale_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"KVCacheSpec: scale_dtype is fp32, bf16 or fp16, got {self.scale_dtype}")

    @classmethod
    def of(cls, spec: "KVCacheSpec | str") -> "KVCacheSpec":
        """`spec`; a string is the dtype of one."""
        if not isinstance(spec, KVCacheSpec | str):
            raise TypeError(f'takes a KVCacheSpec, or its dtype such as "int8", got {type(spec).__name__}')
        return cls(spec) if isinstance(spec, str) else spec

    def settled(self, growing: bool = True) -> "KVCacheSpec":
        """The spec of a store that grows, or of one that quantizes each token when it comes, with nothing None."""
        of_keys, of_values = (TOKENS[str(name)].dtype.bits <= 4 for name in (self.dtype, self.value_dtype))
        keys = self.keys or ("channel" if of_keys and growing else "token")
        waits = growing and (keys == "channel" or of_keys or of_values)
        recent = (self.block if waits else 0) if self.recent is None else self.recent
        rotated = of_keys and keys == "token" if self.rotate_keys is None else self.rotate_keys
        return replace(self, keys=keys, recent=recent, rotate_keys=rotated)

    @property
    def form(self) -> CacheForm:
        """What kernels know of it."""
        return cache_form(self.dtype, str(self.value_dtype), self.step * (self.keys == "channel"), self.scale_dtype)

    @property
    def step(self) -> int:
        """Tokens that are quantized together."""
        return self.block if self.keys == "channel" else 1

    @property
    def kept(self) -> int:
        """The number of latest tokens, at least, that stay in floating point."""
        return self.recent or 0


class KVStore(ABC):
    """The keys and values of one layer of attention, (B, H, T, D), in codes: so many channels of each (`widths`), in
    the dtype and on the device of what was appended. Where the spec rotates, all that is held is rotated."""

    def __init__(self, spec: KVCacheSpec | str, growing: bool) -> None:
        self.spec = spec = KVCacheSpec.of(spec).settled(growing)
        self.form = spec.form
        self.rotated = bool(spec.rotate_keys), spec.rotate_values
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.widths = (0, 0)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads, and the number of tokens, or that for which there is room if the store is static."""

    @abstractmethod
    def parts(self) -> tuple[Parts, Parts, Sequence[Tensor], Tensor | None]:
        """Keys, values, recent tokens and length, as `kv_attention` takes them."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens (B, H, t, D) in floating point.

        Raises:
            ValueError: their shape, dtype or device is not that of the tokens before.
        """

    @abstractmethod
    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors that changes the batch, or the device."""

    def attend(
        self, query: Tensor, mask: Tensor | None = None, scaling: float | None = None, *, causal: bool = False,
        softcap: float | None = None, sinks: Tensor | None = None, last: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of queries on all keys and values: softmax(scaling * q k^T + mask) v.

        Args:
            query: (B, Hq, M, D) in floating point; Hq is a multiple of H, and Hq / H heads share a head of the keys.
            mask: (B or 1, Hq or 1, M, at least T), bool (True: the token is seen) or numbers to add.
            scaling: factor of the products; None: 1 / sqrt(D).
            causal: the last query sees all tokens, each one before it one token less.
            softcap: products become softcap * tanh(product / softcap).
            sinks: (Hq), logits of tokens without values, which take part in the softmax.
            last: the latest tokens only, of a store whose tokens all are in codes with scales of their own.

        Returns:
            (B, Hq, M, D of the values) in the query's dtype; zeros for queries that see no token. It has no gradient:
            a backward pass through it is an error.

        Raises:
            ValueError: shapes do not fit.
        """
        check_heads("attend", query)
        keys, values, recent, length = self.parts()
        if last is not None and last < self.shape[2]:
            keys, values = (tuple(x.narrow(2, x.shape[2] - last, last) for x in of) for of in (keys, values))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        form = self.form
        formats = form.dtype, form.value_dtype, form.block, self.widths[1]
        arguments = (*formats, float(scaling), float(softcap or 0), causal)
        rows = rotate_heads(query.detach()) if self.rotated[0] else query.detach()
        out = kv_attention(rows, list(keys), list(values), list(recent), length, mask, sinks, *arguments)
        out = rotate_heads(out) if self.rotated[1] else out
        return NoGradient.apply(out, query) if torch.is_grad_enabled() and query.requires_grad else out

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, D) in floating point; of a static store also those of tokens that are not there."""
        keys, values = self._rotate(*self._floats(torch.float32 if any(self.rotated) else dtype or self.dtype))
        return keys.to(dtype or self.dtype), values.to(dtype or self.dtype)

    def _rotate(self, *keys_and_values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are held, from those of the model; and back."""
        keys, values = (rotate_heads(x) if on else x for x, on in zip(keys_and_values, self.rotated, strict=True))
        return keys, values

    def _floats(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values as they are held, dequantized."""
        keys, values, recent, _ = self.parts()
        form = self.form
        floats = [
            form.dequantize(part, width, dtype, of_keys)
            for part, width, of_keys in ((keys, self.widths[0], True), (values, self.widths[1], False))
        ]
        if recent:
            floats = [torch.cat([old, new.to(dtype)], 2) for old, new in zip(floats, recent, strict=True)]
        return floats[0], floats[1]

    def reorder(self, rows: Tensor) -> None:
        """Let row i of the batch become row `rows[i]`; rows may be left out or repeated."""
        self.change(lambda x: x.index_select(0, torch.as_tensor(rows, device=x.device)))

    def repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def to(self, device: torch.device | str) -> None:
        """Move all tensors."""
        self.change(lambda x: x.to(device))
        self.device = torch.device(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and recent tokens; memory that waits for more tokens is not counted."""
        keys, values, recent, _ = self.parts()
        return sum(part.numel() * part.element_size() for part in (*keys, *values, *recent))

    def note_form(self, keys: Tensor, values: Tensor) -> None:
        """Remember widths, dtype and device of the first tokens, and check that later ones have the same."""
        check_heads("append", keys, values)
        found = (keys.shape[3], values.shape[3]), keys.dtype, keys.device
        if self.widths == (0, 0):
            self.widths, self.dtype, self.device = found
        before = self.widths, self.dtype, self.device
        batch, heads, _ = self.shape
        wrong = batch and (keys.shape[:2] != (batch, heads) or found != before)
        if wrong or values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype:
            raise ValueError(
                f"the cache holds ({batch}, {heads}, tokens, {self.widths}) {before[1]} on {before[2]}; got keys "
                f"{tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} on {keys.device}"
            )


def check_heads(function: str, *tensors: Any) -> None:
    """Raise `ValueError` if one of these is no tensor with four axes."""
    check_tensors(function, *tensors)
    if wrong := [tuple(tensor.shape) for tensor in tensors if tensor.dim() != 4]:
        raise ValueError(f"{function} takes tensors (batch, heads, tokens, channels), got {wrong[0]}")


class NoGradient(torch.autograd.Function):
    """The first tensor; its gradient is an error."""

    @staticmethod
    def forward(ctx: object, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise RuntimeError("attention on a quantized KV cache has no gradient; train with use_cache=False")


_said: set[str] = set()


def say_once(what: str) -> None:
    """Warn that keys and values are dequantized, once for each reason."""
    if not is_compiling() and what not in _said:
        _said.add(what)
        warnings.warn(f"qtorch: the quantized KV cache is dequantized at each step: {what}", stacklevel=2)


class StoredKV:
    """The keys (`index` 0) or values (1) of a store, as they travel through a layer to its attention function; `fresh`
    ones are the first of the cache, in floating point, and `tokens` is how many of the latest it stands for.

    The layers of transformers hand what `Cache.update` gives them to the attention function, and most look at no more
    than its shape on the way. So codes can travel in this small object, which is no tensor. If a model does use it as a
    tensor, it becomes one: the dequantized keys or values.
    """

    def __init__(self, store: KVStore, index: int, fresh: tuple[Tensor, Tensor] | None, tokens: int) -> None:
        self.store, self.index, self.fresh, self.tokens = store, index, fresh, tokens

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.store.shape[:2], self.tokens, self.store.widths[self.index]))

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def device(self) -> torch.device:
        return self.store.device

    def floats(self) -> Tensor:
        """The dequantized tensor."""
        say_once("the model computes with the keys or values before it calls its attention function")
        floats = self.store.dequantize()[self.index]
        return floats.narrow(2, floats.shape[2] - self.tokens, self.tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("store", "index", "fresh", "tokens"):
            raise AttributeError(name)
        return getattr(self.floats(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.floats()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = lambda x: x.floats() if isinstance(x, StoredKV) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)
