"""Calls every launcher with a GPU that is not there: arguments are specialized and kernels compiled, nothing runs.

What a real launch compiles depends on its arguments (sizes of 1 become constants, multiples of 16 are noted), which the
interpreter does not show. Run by `test_ptx.py` in a process of its own, without the interpreter; with --all for more
sizes, some minutes.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qtorch.kernels.cache_form import TOKENS, cache_form
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.adam import adam
from qtorch.kernels.cuda.triton.experts_mm import experts_int8_mm, experts_weight_mm
from qtorch.kernels.cuda.triton.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm, transposed_copy
from qtorch.kernels.cuda.triton.intx_weight_mm import intx_weight_mm
from qtorch.kernels.cuda.triton.kv_attention import kv_attention
from qtorch.kernels.cuda.triton.quantize import (
    quantize_columnwise,
    quantize_rowwise,
    quantize_rowwise_asymmetric,
    quantize_tilewise,
)
from qtorch.kernels.cuda.triton.stochastic_update import update_bf16, update_int8
from qtorch.kernels.cuda.triton.tile_scaled_mm import tile_scaled_mm
from qtorch.kernels.ops.adam import LARGEST_SCALE
from qtorch.kernels.ops.kv_attention import KVAttention
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, step, zeros

BF16, FP32 = torch.bfloat16, torch.float32
SEED = torch.zeros(1, dtype=torch.int64)


class AbsentGPU:
    """The part of a Triton driver that compiling for a launch asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attentions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """On caches of every format."""
    for name, block, dtype in itertools.product(TOKENS, (0, 32), (BF16, FP32)):
        form, tokens, width = cache_form(name, block), 64, 40
        parts = [
            [
                torch.zeros(1, 2, tokens // each, row, dtype=kind)
                for row, kind, each in form.stored(width, keys).values()
            ]
            for keys in (True, False)
        ]
        query, seen = torch.ones(1, 4, 1, width, dtype=dtype), torch.ones(1, 1, 1, tokens, dtype=torch.bool)
        recent = [torch.ones(1, 2, 5, width, dtype=dtype)] * 2
        # Every second with all that there is, the others with nothing.
        whole = block > 0
        more = [torch.ones(1, 1, 1, tokens + 5)] if whole else [seen]
        used = None if whole else torch.tensor(tokens)
        call = KVAttention(
            query, *parts, recent if whole else [], used, *more, None, form, width, 0.1, 5.0 * whole, whole
        )
        yield f"kv_attention {name} {block} {dtype}", lambda call=call: kv_attention(call)


def steps_of_adam() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of every form, on bf16 with all that there is, and on fp32 without."""
    for form, dtype in itertools.product(ALL_FORMS, (BF16, FP32)):
        blocks, whole = BLOCKS[0], dtype == BF16
        moments, weight = zeros(form, blocks, 3 if whole else 2), torch.ones(1500, dtype=dtype)
        call = step(form, 1, 7 if whole else None, 0.1 * whole)
        yield (
            f"adam {form} {dtype}",
            lambda w=weight, m=moments, b=blocks, c=call, f=form: adam(w, w, m, b, c, LARGEST_SCALE[f]),
        )


def launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of every launch."""
    whole = "--all" in sys.argv
    yield from attentions()
    yield from steps_of_adam()
    for m, n, k in ((1, 1, 1), (1, 64, 256), (5, 33, 100), (64, 128, 512)) if whole else ((1, 1, 40),):
        size = f"{m} x {n} x {k}"
        a, b = codes(m, k), codes(n, k).t()
        one, rows, columns = torch.ones(1, 1), torch.ones(m, 1), torch.ones(1, n)
        for tma in (False, True):
            config = LaunchConfig(32, 32, 64, tma=tma)
            with forced(config):
                yield f"int_matmul {size} {tma}", lambda a=a, b=b: int8_scaled_mm(a, b, None, None, torch.int32)
                for scales in ((rows, columns), (one, one)):
                    zero = scales[0].to(torch.int8)
                    yield (
                        f"int8_scaled_mm {size} {tma} {tuple(scales[0].shape)}",
                        lambda a=a, b=b, s=scales, z=zero, n=n: int8_scaled_mm(a, b, *s, BF16, torch.ones(n), z),
                    )
        yield f"transposed_copy {size}", lambda a=a: transposed_copy(a)
        for dtype, x in itertools.product((BF16, FP32) if whole else (BF16,), (torch.ones(m, k), torch.ones(k, m).t())):
            x = x.to(dtype)
            yield f"quantize {size} {dtype}", lambda x=x: quantize_rowwise(x, seed=SEED)
            yield f"quantize asymmetric {size} {dtype}", lambda x=x: quantize_rowwise_asymmetric(x)
            yield f"quantize both {size} {dtype}", lambda x=x: quantize_rowwise(x, torch.float8_e4m3fn, transposed=True)
            yield f"quantize columns {size} {dtype}", lambda x=x: quantize_columnwise(x)
            yield f"quantize tiles {size} {dtype}", lambda x=x, k=k: quantize_tilewise(x, (1, k))
            yield (
                f"update int8 {size} {dtype}",
                lambda x=x, m=m, k=k: update_int8(codes(m, k), torch.ones(m, 1), x, 1.0, SEED),
            )
            yield f"update bf16 {size} {dtype}", lambda x=x: update_bf16(torch.ones(x.shape).bfloat16(), x, 0.5, SEED)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            with forced(LaunchConfig(64, 32, 32)):
                s = torch.ones(m, 1), torch.ones(1, 1)
                yield (
                    f"tile_scaled_mm {size} {dtype}",
                    lambda m=m, n=n, k=k, d=dtype, s=s: tile_scaled_mm(
                        codes(m, k, dtype=d), codes(n, k, dtype=d), *s, BF16
                    ),
                )
        for bits, groups in itertools.product(
            (1, 3, 4, 6, 7, 8) if whole else (4, 8), {1, max(1, k // 64) if k % 64 == 0 else 1, k}
        ):
            packed = codes(n, -(-k // 8) * bits, dtype=torch.uint8) if bits < 8 else codes(n, k)
            scale = torch.ones(n, groups).bfloat16()
            zero = codes(n, groups)
            if groups in (1, k) and bits in (1, 3, 6, 7) and m > 1:
                continue
            with forced(LaunchConfig(16, 32, 64)):
                yield (
                    f"int8_grouped_mm {size} {bits} bits {groups}",
                    lambda m=m, k=k, p=packed, s=scale, z=zero, bits=bits: int8_grouped_mm(
                        codes(m, k), torch.ones(m, 1), codes(m, 1), p, s, z, bits, True, BF16
                    ),
                )
                stack, ws, wz = (t.expand(3, *t.shape) for t in (packed, scale, zero))
                experts = torch.zeros(m, 2, dtype=torch.int64)
                yield (
                    f"experts_int8_mm {size} {bits} bits {groups}",
                    lambda m=m, k=k, e=experts, p=stack, s=ws, z=wz, bits=bits: experts_int8_mm(
                        codes(m, k), e, torch.ones(m, 1), codes(m, 1), p, s, z, bits, True, BF16
                    ),
                )
                yield (
                    f"experts_weight_mm {size} {bits} bits {groups}",
                    lambda m=m, k=k, e=experts, p=stack, s=ws, z=wz, bits=bits: experts_weight_mm(
                        torch.ones(m, k).to(BF16), e, p, s, z, bits, 0, 8.0, "INT"
                    ),
                )
            ways = [LaunchConfig(16, 64, 64, split_k=2, path="mm"), LaunchConfig(path="dense")]
            for way in ways + [LaunchConfig(1, 4, 128, path="mv")] * (m == 1):
                for domain, dtype in (("INT", BF16), ("FLOAT", FP32)):
                    with forced(way):
                        yield (
                            f"intx_weight_mm {size} {bits} bits {groups} {way.path} {domain}",
                            lambda m=m, k=k, p=packed, s=scale, z=zero, bits=bits, d=domain, t=dtype: intx_weight_mm(
                                torch.ones(m, k).to(t), p, s, z.to(BF16) if d == "FLOAT" else z, bits, 0, 8.0, d
                            ),
                        )


def main() -> None:
    triton.runtime.driver.set_active(AbsentGPU())
    # The launchers take CPU tensors where the interpreter runs, as far as they can tell.
    os.environ["TRITON_INTERPRET"] = "1"
    run, compiled = JITFunction.run, set()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.add(kernel.hash)
        return kernel

    JITFunction.run = compile_only
    failed, count = {}, 0
    for name, call in launches():
        count += 1
        try:
            call()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[-600:]
    json.dump({"launches": count, "kernels": len(compiled), "failed": failed}, sys.stdout)


if __name__ == "__main__":
    main()
