"""Attention on codes, for the tests of every kernel: problems, and how near to the reference a result has to be."""

from collections.abc import Callable

import torch

from qtorch.kernels.cache_form import TOKENS, CacheForm, cache_form
from qtorch.kernels.ops.kv_attention import KVAttention, attend_portably
from qtorch.kernels.ops.quantize import quantize_keys_and_values
from tests.rounding import gamma

FORMS = [
    *(cache_form(dtype, dtype, block) for dtype in TOKENS for block in (0, 32)),
    *(cache_form(*mixed) for mixed in [("int8", "int4", 0), ("int4", "int2", 32), ("int2", "float8_e4m3fn", 0)]),
]


def problem(
    form: CacheForm, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, mask: str | None = None, device="cpu",
    softcap: float = 0.0, sinks: bool = False, causal: bool = False, used: int | None = None,
) -> KVAttention:  # fmt: skip
    """Of `shape`: batch, heads of keys, heads of queries for each, rows, tokens in codes, recent ones, channels of keys
    and of values."""
    batch, heads, group, rows, tokens, recent, width, v_width = shape
    new = lambda *size: torch.randn(size, device=device)  # noqa: E731
    parts = quantize_keys_and_values(new(batch, heads, tokens, width) + 1, new(batch, heads, tokens, v_width), form)
    query = new(batch, heads * group, rows, width).to(dtype)
    latest = [new(batch, heads, recent, size).to(dtype) for size in (width, v_width)] if recent else []
    seen = new(batch, 1, rows, tokens + recent) > -0.5
    masks = {
        None: None, "bool": seen, "float": new(1, heads * group, rows, tokens + recent + 3),
        "-inf": torch.where(seen[:, :, :1], 0.0, -torch.inf),
    }  # fmt: skip
    length = None if used is None else torch.tensor(used, device=device)
    more = length, masks[mask], new(heads * group) if sinks else None
    return KVAttention(query, *parts, latest, *more, form, v_width, width**-0.5, softcap, causal)


def assert_close(call: KVAttention, got: torch.Tensor) -> None:
    """Sums in fp32 in another order: scores differ by the error of a sum over channels, each weight by as much."""
    call = call.cut()
    wanted = attend_portably(call._replace(query=call.query.float()))
    keys = call.form.dequantize(call.keys, call.query.shape[3], torch.float32, True)
    values = call.form.dequantize(call.values, call.width, torch.float32, False)
    if call.recent:
        keys, values = (torch.cat([a, b.float()], 2) for a, b in zip((keys, values), call.recent, strict=True))
    largest = call.query.float().norm(dim=-1).max() * keys.norm(dim=-1).max() * call.scaling
    # Of codes with zero points, sums are of larger numbers than their result.
    score = 4 * gamma(call.query.shape[3] + 8) * float(largest) + 1e-5 * bool(call.softcap)
    bound = float(values.abs().max()) * (2 * score + 4 * gamma(call.length + 16)) + 1e-6
    if call.query.dtype is not torch.float32:
        bound += float(values.abs().max()) * torch.finfo(call.query.dtype).eps
    assert (got.shape, got.dtype) == (wanted.shape, call.query.dtype)
    assert float((got.double() - wanted.double()).abs().max()) <= bound


def with_used_tokens(device: str = "cpu") -> KVAttention:
    """Tokens beyond the length hold what must not be read."""
    call = problem(cache_form("int8", "int8", 0), (1, 2, 2, 3, 300, 0, 32, 32), device=device, used=130, causal=True)
    for part in (*call.keys, *call.values):
        part[:, :, 130:] = torch.nan if part.is_floating_point() else 127
    return call


def strided(device: str = "cpu") -> KVAttention:
    """Views of larger memory, queries that are transposed, a mask that is expanded."""
    call = problem(cache_form("int4", "int4", 0), (2, 2, 3, 2, 70, 0, 24, 24), mask="bool", device=device)
    keys = [torch.cat([part, part], 2)[:, :, :70] for part in call.keys]
    query = call.query.transpose(1, 2).contiguous().transpose(1, 2)
    return call._replace(keys=keys, query=query, mask=call.mask[:, :, :1].expand(-1, -1, 2, -1))


def check_nan_and_hidden_tokens(attend: Callable[[KVAttention], torch.Tensor], device: str = "cpu") -> None:
    """A token with a NaN reaches the queries that see it, in its head; one that is hidden reaches none."""
    for form in FORMS:
        k, v = torch.randn(2, 1, 2, 64, 16, device=device)
        k[0, 0, 3, 5], v[0, 1, 7, 2] = torch.nan, torch.inf
        mask = torch.ones(1, 1, 3, 64, dtype=torch.bool, device=device)
        mask[..., 1, [3, 7]] = mask[..., 2, :] = False
        query, parts = torch.randn(1, 4, 3, 16, device=device), quantize_keys_and_values(k, v, form)
        got = attend(KVAttention(query, *parts, [], None, mask, None, form, 16, 0.25, 0.0, False))
        assert got[:, :, 0].isnan().all()
        assert got[:, :, 1].isfinite().all()
        assert (got[:, :, 2] == 0).all()
