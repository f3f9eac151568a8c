"""The quantized KV cache: attention of one new token, growth, memory, decoding, accuracy.

attention    one new token: 32 heads of queries on 8 of keys, 128 channels, fp32. Peers: SDPA with query heads folded
             into rows, the fastest way in torch; SDPA with `enable_gqa`; what transformers calls, with and without a
             mask; transformers' own fp8 cache, a whole step (its other ones need quanto or hqq)
growth       one more token behind many: memory that doubles, and `torch.cat`
decode       a Llama with random weights, tokens a second after a prompt
accuracy     KL divergence from the float cache in the Llama of 1M parameters of `tutorials.qat_llama`, on three
             seeds of text it was not trained on; tokens after the first 16 are fed in chunks of 8, so that they read
             the cache. Once more with two pairs of channels of each head 8 times as large in the keys and as small in
             the queries: the same function, with the outliers that keys of large models have

    python -m benchmarks.bench_kv_cache [attention growth decode accuracy] [--threads 1] [--llama llama.pt] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import save
from qtorch.kv_cache import GrowingKV, KVCacheSpec, quantized_cache, use_quantized_attention

HEADS, KV_HEADS, WIDTH = 32, 8, 128
PLAIN: dict[str, Any] = {"keys": "token", "recent": 0, "rotate_keys": False}
SPECS = {
    "int8": KVCacheSpec("int8"),
    "float8": KVCacheSpec("float8_e4m3fn"),
    "int8, values int4": KVCacheSpec("int8", value_dtype="int4"),
    "int8, values int4, none recent": KVCacheSpec("int8", value_dtype="int4", recent=0),
    "int4": KVCacheSpec("int4"),
    "int4, fp16 scales": KVCacheSpec("int4", scale_dtype=torch.float16),
    "int4, values int2": KVCacheSpec("int4", value_dtype="int2"),
    "int3": KVCacheSpec("int3"),
    "int2": KVCacheSpec("int2"),
    "int8, keys by channel": KVCacheSpec("int8", keys="channel"),
    "int4, keys by channel, none recent": KVCacheSpec("int4", recent=0),
    "int4, keys by token": KVCacheSpec("int4", **PLAIN),
    "int4, keys by token, rotated": KVCacheSpec("int4", keys="token", recent=0),
    "int4, keys by token, both rotated": KVCacheSpec("int4", keys="token", recent=0, rotate_values=True),
    "int4, keys by token, rotated, 32 recent": KVCacheSpec("int4", keys="token"),
    "int3, keys by token, rotated, 32 recent": KVCacheSpec("int3", keys="token"),
    "int2, keys by token, rotated, 32 recent": KVCacheSpec("int2", keys="token"),
}


def milliseconds(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Minimum and median time of a call, interleaved. With one thread it is the time of its processor, which leaves out
    what others take of it; on a shared machine the minimum says more."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, function in candidates.items():
            begun = clock()
            function()
            times[name].append((clock() - begun) * 1e3)
    return {name: (min(values), statistics.median(values)) for name, values in times.items()}


def attention(length: int, rounds: int) -> list[dict[str, Any]]:
    from transformers.cache_utils import Fp8QuantizedLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    keys, values = (torch.randn(1, KV_HEADS, length, WIDTH) for _ in range(2))
    query = torch.randn(1, HEADS, 1, WIDTH)
    new = keys[:, :, :1], values[:, :, :1]
    folded = query.reshape(1, KV_HEADS, HEADS // KV_HEADS, WIDTH)
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
    sdpa = functional.scaled_dot_product_attention

    def fp8_step() -> Tensor:
        fp8 = Fp8QuantizedLayer()
        fp8.__dict__.update(fp8_state)
        k, v = fp8.update(*new)
        return sdpa_attention_forward(module, query, k, v, None)[0]

    fp8 = Fp8QuantizedLayer()
    fp8.cumulative_length = 0
    fp8.update(keys, values)
    fp8_state = dict(fp8.__dict__)
    candidates: dict[str, Callable[[], Any]] = {
        "float, heads folded": lambda: sdpa(folded, keys, values),
        "float, enable_gqa": lambda: sdpa(query, keys, values, enable_gqa=True),
        "float, transformers, no mask": lambda: sdpa_attention_forward(module, query, keys, values, None),
        "float, transformers, mask": lambda: sdpa_attention_forward(module, query, keys, values, mask),
        "transformers fp8 cache, a step": fp8_step,
    }
    bytes_of = {name: 2 * keys.numel() * 4 for name in candidates}
    stores = {}
    for name, spec in SPECS.items():
        store = stores[name] = GrowingKV(spec)
        store.append(keys, values)
        bytes_of[name] = store.nbytes
        candidates[name] = lambda store=store: store.attend(query)
    found = milliseconds(candidates, rounds)
    base = found["float, heads folded"]
    return [
        {
            "part": "attention",
            "length": length,
            "name": name,
            "ms": least,
            "median": median,
            "times": base[0] / least,
            "smaller": 2 * keys.numel() * 4 / bytes_of[name],
            "bytes": bytes_of[name],
        }
        for name, (least, median) in found.items()
    ]


def growth(length: int, rounds: int) -> list[dict[str, Any]]:
    keys, values = (torch.randn(1, KV_HEADS, length, WIDTH) for _ in range(2))
    new = keys[:, :, :1], values[:, :, :1]
    floats = [keys, values]

    def cat() -> None:
        floats[:] = [torch.cat([x[:, :, :length], more], 2) for x, more in zip(floats, new, strict=True)]

    candidates: dict[str, Callable[[], Any]] = {"float, torch.cat": cat}
    for name in ("int8", "int4", "float8"):
        store = GrowingKV(SPECS[name])
        store.append(keys, values)
        store.append(*new)  # takes the memory for as many again
        candidates[name] = lambda store=store: store.append(*new)
    found = milliseconds(candidates, rounds)
    return [{"part": "growth", "length": length, "name": n, "ms": a, "median": b} for n, (a, b) in found.items()]


def decode(prompt: int, rounds: int) -> list[dict[str, Any]]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1 << 15,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 1024, (1, prompt))
    makers: dict[str, Callable[[], Any]] = {"float": lambda: DynamicCache(config=config)}
    makers |= {
        name: (lambda spec=spec: quantized_cache(model, spec)) for name, spec in SPECS.items() if "," not in name
    }
    candidates: dict[str, Callable[[], Any]] = {}
    for name, make in makers.items():
        model.set_attn_implementation("sdpa") if name == "float" else use_quantized_attention(model)
        cache = make()
        model(ids, past_key_values=cache)

        def step(name: str = name, cache: Any = cache) -> None:
            config._attn_implementation_internal = "sdpa" if name == "float" else "qtorch"
            model(ids[:, :1], past_key_values=cache)

        candidates[name] = step
    found = milliseconds(candidates, rounds)
    return [{"part": "decode", "length": prompt, "name": n, "ms": a, "median": b} for n, (a, b) in found.items()]


def accuracy(path: Path, first: int = 16, chunk: int = 8) -> list[dict[str, Any]]:
    from benchmarks.bench_calibration import Llama

    task = Llama(path)
    model: Any = task.float
    model.config.use_cache = True
    use_quantized_attention(model)
    windows = task.text.validation.unfold(0, task.run.length, 1)
    draw = lambda seed: torch.randint(len(windows), (48,), generator=torch.Generator().manual_seed(seed))  # noqa: E731
    seeds = [windows[draw(seed)].long() for seed in range(3)]
    exact = [model(ids, use_cache=False).logits[:, first:].log_softmax(-1) for ids in seeds]
    rows = []
    for outliers in (False, True):
        if outliers:
            _plant(model)
        for name, spec in SPECS.items():
            found = []
            for ids, wanted in zip(seeds, exact, strict=True):
                cache = quantized_cache(model, spec)
                parts = [ids[:, :first], *ids[:, first:].split(chunk, 1)]
                logits = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)[:, first:]
                found.append(float((wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()))
            rows.append({"part": "accuracy", "outliers": outliers, "name": name, "kl": sum(found) / 3, "seeds": found})
            print(show(rows[-1]), flush=True)
    return rows


def _plant(model: Any, factor: float = 8.0) -> None:
    """Make two pairs of channels of all keys larger, and the queries as much smaller; RoPE turns a pair as before."""
    half = model.config.head_dim // 2
    for layer in model.model.layers:
        for projection, by in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
            pairs = projection.weight.unflatten(0, (-1, 2, half))
            pairs[:, :, [half - 1, half - 3]] *= by


def show(row: Mapping[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["attention", "growth", "decode", "accuracy"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--llama", type=Path, default=Path("llama.pt"))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        if part == "accuracy":
            rows += accuracy(options.llama)
        else:
            for length in options.lengths:
                rows += {"attention": attention, "growth": growth, "decode": decode}[part](length, options.rounds)
    for row in rows:
        print(show(row))
    if options.save:
        save("kv_cache", [{"threads": options.threads, **row} for row in rows])


if __name__ == "__main__":
    main()
