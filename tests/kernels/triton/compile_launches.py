"""Calls the launchers with a GPU that is not there: arguments are specialized and kernels compiled, nothing runs.

What a real launch compiles depends on its arguments (sizes of 1 become constants, multiples of 16 are noted), which the
interpreter does not show. Run by `test_ptx.py` in a process of its own, without the interpreter, with the name of a
table: TYPICAL or EVERY. Prints what became of each launch as JSON.
"""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import qtorch
from qtorch.kernels.cache_form import TOKENS, cache_form
from qtorch.kernels.cuda.launch_config import LaunchConfig, forced
from qtorch.kernels.cuda.triton.adam import adam
from qtorch.kernels.cuda.triton.block_sparse_mm import block_sparse_mm
from qtorch.kernels.cuda.triton.experts_mm import experts_int8_mm, experts_weight_mm
from qtorch.kernels.cuda.triton.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.cuda.triton.int8_scaled_mm import int8_scaled_mm, transposed_copy
from qtorch.kernels.cuda.triton.intx_weight_mm import intx_weight_mm
from qtorch.kernels.cuda.triton.kv_attention import kv_attention
from qtorch.kernels.cuda.triton.quantize import quantize_columnwise, quantize_rowwise, quantize_tilewise
from qtorch.kernels.cuda.triton.stochastic_update import update_bf16, update_int8
from qtorch.kernels.cuda.triton.tile_scaled_mm import tile_scaled_mm
from qtorch.kernels.ops.adam import LARGEST_SCALE
from qtorch.kernels.ops.kv_attention import KVAttention
from tests.kernels.adam_cases import ALL_FORMS, BLOCKS, step, zeros

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SEED = torch.zeros(1, dtype=torch.int64)
SMALL = LaunchConfig(16, 32, 64)

INSTRUCTION = re.compile(
    r"\b(wgmma\.mma_async\S*|wgmma\.wait_group\S* \d+|mma\.sync\S*"
    r"|cp\.async\.bulk\.tensor\S*|cp\.async\.c[ag]\.shared\S*|atom\.\S*"
    r"|red\.\S*|cvt\.f64\S*|lop3\.b32|ld\.global\.v4\S*)"
)


class Launch(NamedTuple):
    """A call of a launcher, with the configuration and on the GPU for which it compiles."""

    name: str
    call: Callable[[], Any]
    config: LaunchConfig = SMALL
    capability: int = 90


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def stored(n: int, k: int, bits: int) -> Tensor:
    """Codes (N, K), packed where they have fewer than 8 bits."""
    return codes(n, k) if bits == 8 else codes(n, -(-k // 8) * bits, dtype=torch.uint8)


def int8_product(m: int, n: int, k: int, *zero: Tensor) -> Callable[[], Any]:
    a, b, scales = codes(m, k), codes(n, k).t(), (torch.ones(m, 1), torch.ones(1, n))
    return lambda: int8_scaled_mm(a, b, *scales, BF16, torch.ones(n, dtype=BF16), *zero)


def weight_product(
    m: int, n: int, k: int, bits: int, groups: int, dtype: torch.dtype = BF16, domain: str = "INT"
) -> Callable[[], Any]:
    x, scale = torch.ones(m, k, dtype=dtype), torch.ones(n, groups, dtype=BF16)
    zeros = {"FLOAT": scale, "NONE": None, "TABLE": torch.ones(2**bits), "TABLES": torch.ones(n, groups, 2**bits)}
    zero, domain = zeros.get(domain, codes(n, groups)), domain.replace("TABLES", "TABLE")
    return lambda: intx_weight_mm(x, stored(n, k, bits), scale, zero, f"uint{bits}", 8.0, domain)


def grouped_product(m: int, n: int, k: int, bits: int, groups: int, *, zero: bool) -> Callable[[], Any]:
    of_weight = stored(n, k, bits), torch.ones(n, groups, dtype=BF16), codes(n, groups) if zero else None
    xq = codes(m, k), torch.ones(m, 1), codes(m, 1)
    return lambda: int8_grouped_mm(*xq, *of_weight, f"int{bits}", None, BF16)


def experts_products(m: int, n: int, k: int, bits: int, groups: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    experts = torch.zeros(m, 2, dtype=torch.int64)
    of_weight = [
        t.expand(3, *t.shape) for t in (stored(n, k, bits), torch.ones(n, groups).bfloat16(), codes(n, groups))
    ]
    xq, x = codes(m, k), torch.ones(m, k, dtype=BF16)
    scales = torch.ones(m, 1), codes(m, 1)
    yield "experts_int8_mm", lambda: experts_int8_mm(xq, experts, *scales, *of_weight, f"int{bits}", BF16)
    yield "experts_weight_mm", lambda: experts_weight_mm(x, experts, *of_weight, f"uint{bits}", 8.0, "INT")
    tables = *of_weight[:2], torch.ones(3, n, groups, 2**bits), f"uint{bits}", 0.0, "TABLE"
    yield "experts_weight_mm, tables", lambda: experts_weight_mm(x, experts, *tables)


def tile_product(m: int, n: int, k: int, dtype: torch.dtype, tile: int) -> Callable[[], Any]:
    a, b = codes(m, k, dtype=dtype), codes(n, k, dtype=dtype)
    a_scale, b_scale = torch.ones(m, k // tile), torch.ones(max(1, n // tile), k // tile)
    return lambda: tile_scaled_mm(a, b, a_scale, b_scale, BF16)


def typical() -> Iterator[Launch]:
    """Sizes that are multiples of 16, with the tiles that large problems have."""
    large, wide = LaunchConfig(128, 256, 128, num_warps=8, num_stages=4), LaunchConfig(16, 64, 64)
    yield Launch("int8 sm_90", int8_product(256, 512, 1024), large)
    yield Launch("int8 sm_90 tma", int8_product(256, 512, 1024), LaunchConfig(**{**vars(large), "tma": True}))
    yield Launch("int8 sm_80", int8_product(256, 512, 1024), LaunchConfig(128, 128, 128, num_warps=8), 80)
    for name, bits, dtype, capability in (
        ("int4 weight", 4, BF16, 90), ("int4 weight fp16", 4, FP16, 90), ("int4 weight fp32", 4, FP32, 90),
        ("int4 weight", 4, BF16, 80), ("int8 weight", 8, BF16, 90), ("int8 weight", 8, BF16, 80),
        ("int8 weight fp16", 8, FP16, 90), ("int3 weight", 3, BF16, 90),
    ):  # fmt: skip
        call = weight_product(16, 256, 1024, bits, 8, dtype, "INT" if bits < 8 else "NONE")
        yield Launch(f"{name} sm_{capability}", call, wide, capability)
    yield Launch("int4 weight large sm_90", weight_product(128, 256, 1024, 4, 8), LaunchConfig(128, 128, 64))
    call = weight_product(128, 256, 1024, 8, 1, domain="NONE")
    yield Launch("int8 weight large sm_90", call, LaunchConfig(128, 128, 64, num_warps=8))
    yield Launch("int4 weight gathered sm_90", weight_product(16, 256, 1024, 4, 64), wide)
    rows = LaunchConfig(8, 32, 128, path="rows")
    yield Launch("int4 rows sm_90", weight_product(1, 256, 4096, 4, 32), rows)
    yield Launch("int8 rows sm_80", weight_product(1, 256, 4096, 8, 32, domain="NONE"), rows, 80)
    yield Launch("table large sm_90", weight_product(128, 256, 1024, 4, 8, domain="TABLE"), LaunchConfig(128, 128, 64))
    yield Launch("tables sm_90", weight_product(128, 256, 1024, 4, 8, domain="TABLES"), LaunchConfig(128, 128, 64))
    yield Launch("float8 weight sm_90", weight_product(16, 256, 1024, 8, 8, domain="TABLE"), wide)
    yield Launch("table rows sm_80", weight_product(1, 256, 4096, 4, 32, domain="TABLE"), rows, 80)
    for capability in (90, 80):
        call = grouped_product(16, 256, 1024, 4, 8, zero=False)
        yield Launch(f"int4 grouped sm_{capability}", call, LaunchConfig(16, 64, 128), capability)
        call = tile_product(128, 256, 1024, torch.int8, 128)
        yield Launch(f"int8 tiles sm_{capability}", call, LaunchConfig(64, 128, 128), capability)
    call = grouped_product(128, 256, 1024, 8, 8, zero=False)
    yield Launch("int8 grouped sm_90", call, LaunchConfig(128, 128, 128))
    yield Launch("float8 tiles sm_90", tile_product(128, 256, 1024, E4M3, 128), LaunchConfig(64, 128, 128))
    x = torch.ones(64, 4096, dtype=BF16)
    yield Launch("quantize int8 sm_90", lambda: quantize_rowwise(x))
    yield Launch("quantize int8 stochastic sm_80", lambda: quantize_rowwise(x, seed=SEED), capability=80)
    yield Launch("quantize float8 sm_90", lambda: quantize_rowwise(x, E4M3))
    yield Launch("quantize columns sm_90", lambda: quantize_columnwise(x, seed=SEED))
    yield Launch("quantize tiles sm_90", lambda: quantize_tilewise(x, (1, 128), E4M3))
    yield Launch("update int8 sm_90", lambda: update_int8(codes(64, 4096), torch.ones(64, 1), x, 1.0, SEED))


def attentions() -> Iterator[Launch]:
    """On caches of every format: by blocks with all that there is, by tokens with as little as there can be."""
    for name, whole, dtype in itertools.product(TOKENS, (False, True), (BF16, FP32)):
        form, tokens, width = cache_form(name, name, 32 * whole), 64, 40
        parts = [
            [codes(1, 2, tokens // each, row, dtype=kind) for row, kind, each in form.stored(width, keys).values()]
            for keys in (True, False)
        ]
        recent = [torch.ones(1, 2, 5, width, dtype=dtype)] * 2 if whole else []
        mask = torch.ones(1, 1, 1, tokens + 5) if whole else torch.ones(1, 1, 1, tokens, dtype=torch.bool)
        used = None if whole else torch.tensor(tokens)
        query = torch.ones(1, 4, 1, width, dtype=dtype)
        call = KVAttention(query, *parts, recent, used, mask, None, form, width, 0.1, 5.0 * whole, whole)
        yield Launch(f"kv_attention {name} {whole} {dtype}", lambda call=call: kv_attention(call))


def steps_of_adam() -> Iterator[Launch]:
    """Of every form, on bf16 with all that there is, and on fp32 without."""
    for form, dtype in itertools.product(ALL_FORMS, (BF16, FP32)):
        blocks, whole = BLOCKS[0], dtype == BF16
        weight = torch.ones(1500, dtype=dtype)
        about = zeros(form, blocks, 3 if whole else 2), blocks, step(form, 1, 7 if whole else None, 0.1 * whole)
        largest = LARGEST_SCALE[form]
        yield Launch(f"adam {form} {dtype}", lambda w=weight, a=about, s=largest: adam(w, w, *a, s))


def quantizers(m: int, k: int, dtype: torch.dtype) -> Iterator[Launch]:
    for order, x in (("rows", torch.ones(m, k, dtype=dtype)), ("columns", torch.ones(k, m, dtype=dtype).t())):
        about = f"{order} {m} x {k} {dtype}"
        for name, call in {
            "quantize": lambda x=x: quantize_rowwise(x, seed=SEED),
            "quantize asymmetric": lambda x=x: qtorch.kernels.cuda.triton.quantize.quantize_rowwise_asymmetric(x),
            "quantize both": lambda x=x: quantize_rowwise(x, E4M3, transposed=True),
            "quantize columns": lambda x=x: quantize_columnwise(x),
            "quantize tiles": lambda x=x: quantize_tilewise(x, (1, k)),
            "update int8": lambda x=x: update_int8(codes(m, k), torch.ones(m, 1), x, 1.0, SEED),
            "update bf16": lambda x=x: update_bf16(torch.ones(m, k, dtype=BF16), x, 0.5, SEED),
        }.items():
            yield Launch(f"{name} {about}", call)


def every() -> Iterator[Launch]:
    """Every launcher, with sizes of 1 and sizes that nothing divides."""
    yield from attentions()
    yield from steps_of_adam()
    for bits, activation in itertools.product((4, 8), (torch.int8, BF16)):
        xs = torch.ones(4, 1) if activation is torch.int8 else None
        scale, columns = torch.ones(128, 4), torch.zeros(2, 2, dtype=torch.int32)
        about = codes(4, 256, dtype=activation), xs, None, stored(128, 128, bits), columns, scale, f"int{bits}", BF16
        yield Launch(f"block_sparse {bits} {activation}", lambda a=about: block_sparse_mm(*a, None), LaunchConfig(16))
    for m, n, k in ((1, 1, 40), (5, 33, 100)):
        size = f"{m} x {n} x {k}"
        a, b = codes(m, k), codes(n, k).t()
        for tma in (False, True):
            config = LaunchConfig(32, 32, 64, tma=tma)
            sums = lambda a=a, b=b: int8_scaled_mm(a, b, None, None, torch.int32)  # noqa: E731
            yield Launch(f"int_matmul {size} {tma}", sums, config)
            yield Launch(f"int8_scaled_mm {size} {tma}", int8_product(m, n, k, codes(m, 1)), config)
        yield Launch(f"transposed_copy {size}", lambda a=a: transposed_copy(a))
        yield from quantizers(m, k, BF16 if m == 1 else FP32)
        for dtype in (torch.int8, E4M3):
            yield Launch(f"tile_scaled_mm {size} {dtype}", tile_product(m, n, k, dtype, k), LaunchConfig(64, 32, 32))
        for bits, groups in itertools.product((4, 8) if m == 1 else (3, 6), (1, k) if m == 1 else (1,)):
            about = f"{size} {bits} bits {groups}"
            yield Launch(f"int8_grouped_mm {about}", grouped_product(m, n, k, bits, groups, zero=True))
            for name, call in experts_products(m, n, k, bits, groups):
                yield Launch(f"{name} {about}", call)
            variants = [LaunchConfig(16, 64, 64, split_k=2, path="mm"), LaunchConfig(path="dense")]
            for config in variants + [LaunchConfig(8, 16, 64, path="rows")]:
                for domain, dtype in (("INT", BF16), ("FLOAT", FP32), ("TABLE", BF16), ("TABLES", BF16)):
                    call = weight_product(m, n, k, bits, groups, dtype, domain)
                    yield Launch(f"intx_weight_mm {about} {config.path} {domain}", call, config)


class AbsentGPU:
    """The part of a Triton driver that compiling for a launch asks for; devices are numbered by capability."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(launches: Iterator[Launch]) -> dict[str, Any]:
    """Of each launch: instructions of interest, shared memory in bytes and capability; or why it failed."""
    gpu, run = AbsentGPU(), JITFunction.run
    triton.runtime.driver.set_active(gpu)
    # The launchers take CPU tensors where the interpreter runs, as far as they can tell.
    os.environ["TRITON_INTERPRET"] = "1"
    compiled: list[Any] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if "ASM" in options:
            options["ASM"] = True
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    found: dict[str, Any] = {}
    for launch in launches:
        compiled.clear()
        gpu.capability = launch.capability
        try:
            with forced(launch.config):
                launch.call()
        except Exception as error:
            found[launch.name] = {"failed": f"{type(error).__name__}: {error}"[-600:]}
            continue
        found[launch.name] = {
            "instructions": INSTRUCTION.findall("".join(kernel.asm["ptx"] for kernel in compiled)),
            "shared": max(kernel.metadata.shared for kernel in compiled),
            "target": compiled[0].metadata.target.arch,
        }
    return found


if __name__ == "__main__":
    json.dump(compile_all({"TYPICAL": typical, "EVERY": every}[sys.argv[1]]()), sys.stdout)
