"""A step of low-bit Adam against torch's fused AdamW, torchao's optimizers and bitsandbytes', in time and memory.

The parameters are `--count` matrices of `--size`, 20 of 1024 x 1024 by default, with gradients of random numbers.
Figures are the fastest of interleaved steps, since the machine may be shared, and their ratio to torch's fused AdamW;
bytes a parameter are those of all states. What is not installed is left out. torchao compiles its step, at the first
one.

    python -m benchmarks.bench_optim [--size 1024] [--count 20] [--threads 2] [--dtype float32] [--save] [--write-docs]
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import machine, save, write_docs
from qtorch.training import optim

Make = Callable[[list[nn.Parameter]], Any]


def candidates() -> dict[str, Make]:
    """Optimizers by name, those of other packages where they are installed."""
    found: dict[str, Make] = {
        "torch AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
        "torch AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    }
    for name in ("_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"):
        found[f"`{name}`"] = lambda params, cls=getattr(optim, name): cls(params)  # type: ignore[misc]
    for name in ("_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"):
        if cls := _of("torchao.optim", name):
            found[f"torchao {name}"] = lambda params, cls=cls: cls(params)  # type: ignore[misc]
    if cls := _of("bitsandbytes.optim", "AdamW8bit"):
        found["bitsandbytes AdamW8bit"] = lambda params, cls=cls: cls(params)  # type: ignore[misc]
    return found


def _of(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # of a package that is broken here
        print(f"{module} is left out: {type(error).__name__}", flush=True)
        return None


def state_bytes(optimizer: Any) -> int:
    """Of all storages that the states reach, each counted once."""
    sizes: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        elif isinstance(value, Tensor):
            sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for value in state.values():
            add(value)
    return sum(sizes.values())


def made(make: Make, size: int, count: int, dtype: torch.dtype) -> Any:
    """An optimizer of its own parameters, after the first step."""
    parameters = [nn.Parameter(torch.randn(size, size).to(dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(size, size).to(dtype)
    optimizer = make(parameters)
    optimizer.step()
    return optimizer


def measure(size: int, count: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Rows: name, milliseconds, ratio, bytes a parameter."""
    optimizers = {}
    for name, make in candidates().items():
        try:
            optimizers[name] = made(make, size, count, dtype)
        except Exception as error:  # of another package, on this machine
            if "`" in name or name.startswith("torch AdamW"):
                raise
            print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append((time.perf_counter() - start) * 1e3)
    base = min(times["torch AdamW, fused"])
    rows = []
    for name, optimizer in optimizers.items():
        least = min(times[name])
        each = state_bytes(optimizer) / (size * size * count)
        rows.append(
            {
                "optimizer": name,
                "ms": round(least, 2),
                "median_ms": round(statistics.median(times[name]), 2),
                "ratio": round(least / base, 2),
                "bytes": round(each, 3),
            }
        )
    return rows


def page(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    on = machine()
    lines = [
        f"{args.count} matrices of {args.size} x {args.size}, {args.dtype}, {args.threads} threads, "
        f"{on['processor']}, {on['date']}:",
        "",
        "| optimizer | step, ms | of torch's fused AdamW | bytes a parameter |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row['optimizer']} | {row['ms']:.1f} | {row['ratio']:.2f} | {row['bytes']:.3f} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write results/optim.json")
    parser.add_argument("--write-docs", action="store_true", help="write the table of docs/performance")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args.size, args.count, getattr(torch, args.dtype), args.rounds)
    print(page(rows, args))
    if args.save:
        save("optim", rows)
    if args.write_docs:
        write_docs("optim", page(rows, args))


if __name__ == "__main__":
    main()
