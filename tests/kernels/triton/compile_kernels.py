"""Compiles the kernels ahead of time, for GPUs that need not be there, and prints what became of them as JSON.

Run by `test_ptx.py` in a process of its own, without the interpreter:
``python -m tests.kernels.triton.compile_kernels``.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qtorch.kernels.cuda.triton import (
    int8_grouped_mm,
    int8_scaled_mm,
    intx_weight_mm,
    quantize,
    stochastic_update,
    tile_scaled_mm,
)
from qtorch.kernels.cuda.triton import quantize as quantize_columns
from qtorch.kernels.cuda.triton import quantize as quantize_tiles

STRIDES_OF_ONE = (
    "stride_ak",
    "stride_bk",
    "stride_cn",
    "stride_xk",
    "stride_sg",
    "stride_zg",
    "stride_rs",
    "stride_cs",
    "stride_ask",
    "stride_bsk",
    "stride_uk",
    "stride_wk",
    "stride_xs",
    "stride_xz",
)

INSTRUCTION = re.compile(
    r"\b(wgmma\.mma_async\S*|mma\.sync\S*|cp\.async\.bulk\.tensor\S*|cp\.async\.c[ag]\.shared\S*|atom\.\S*"
    r"|red\.\S*|cvt\.f64\S*|lop3\.b32|ld\.global\.v4\S*)"
)


def compile_kernel(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int, **options: Any
) -> Any:
    """What Triton compiles for sizes that are multiples of 16, the usual case; other integer arguments are i32."""
    names = [p.name for p in kernel.params]
    constants = {**{name: 1 for name in STRIDES_OF_ONE if name in names}, **constants}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and signature[name] != "fp32"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if not signature[names[i]].startswith("tensordesc")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def int8_product(capability: int, tma: bool = False, m: int = 128, n: int = 256) -> Any:
    kernel = int8_scaled_mm._int8_scaled_mm_tma if tma else int8_scaled_mm._int8_scaled_mm
    operands = (
        {"a_desc": f"tensordesc<i8[{m},128]>", "b_desc": f"tensordesc<i8[{n},128]>"}
        if tma
        else {"a_ptr": "*i8", "b_ptr": "*i8"}
    )
    extra = {
        "c_ptr": "*bf16",
        "row_scale_ptr": "*fp32",
        "column_scale_ptr": "*fp32",
        "row_zero_ptr": "*i8",
        "column_sum_ptr": "*i32",
        "bias_ptr": "*bf16",
    }
    constants = {
        "SCALED": True,
        "ZEROS": False,
        "BIAS": True,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": 128,
        "GROUP_M": 8,
        **({} if tma else {"EVEN_K": True}),
    }
    return compile_kernel(
        kernel,
        {**operands, **extra},
        constants,
        capability,
        num_warps=8,
        num_stages=4 if n > 128 else 3,
        enable_fp_fusion=False,
    )


def weight_product(
    capability: int, bits: int, dtype: str = "bf16", m: int = 16, n: int = 64, one_group: bool = True
) -> Any:
    pointers = {
        "x_ptr": f"*{dtype}",
        "q_ptr": "*i8" if bits == 8 else "*u8",
        "scale_ptr": "*bf16",
        "zero_ptr": "*u8",
        "bias_ptr": f"*{dtype}",
        "y_ptr": f"*{dtype}",
    }
    constants = {
        "GROUP": 128,
        "BITS": bits,
        "OFFSET": 0.0,
        "MIDDLE": 8.0,
        "ZERO": 1 if bits < 8 else 0,
        "BIAS": False,
        "ONE_GROUP": one_group,
        "EVEN": True,
        "SCALE_PRODUCT": one_group and m <= 64,
        "PRECISION": "tf32x3",
        "ASM": True,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": 64,
        "SPLIT_K": 1,
    }
    return compile_kernel(intx_weight_mm._weight_mm, pointers, constants, capability, num_warps=4, num_stages=3)


def weight_vector(capability: int, bits: int, dtype: str = "bf16") -> Any:
    pointers = {
        "x_ptr": f"*{dtype}",
        "q_ptr": "*i8" if bits == 8 else "*u8",
        "scale_ptr": "*bf16",
        "zero_ptr": "*u8",
        "bias_ptr": f"*{dtype}",
        "y_ptr": f"*{dtype}",
    }
    constants = {
        "GROUP": 128,
        "BITS": bits,
        "OFFSET": 0.0,
        "MIDDLE": 8.0,
        "ZERO": 1 if bits < 8 else 0,
        "BIAS": False,
        "ONE_GROUP": True,
        "EVEN": True,
        "ASM": True,
        "RUN": 16,
        "BLOCK_N": 4,
        "BLOCK_K": 512,
    }
    return compile_kernel(intx_weight_mm._weight_mv, pointers, constants, capability, num_warps=4)


def grouped_product(capability: int, bits: int, m: int = 16, n: int = 64) -> Any:
    pointers = {
        "x_ptr": "*i8",
        "q_ptr": "*i8" if bits == 8 else "*u8",
        "y_ptr": "*bf16",
        "scale_ptr": "*bf16",
        "zero_ptr": "*i8",
        "x_scale_ptr": "*fp32",
        "x_zero_ptr": "*i8",
        "bias_ptr": "*bf16",
    }
    constants = {
        "GROUP": 128,
        "TILES": 1,
        "UNROLL": True,
        "BITS": bits,
        "OFFSET": 8 if bits == 4 else 0,
        "WEIGHT_ZERO": False,
        "INPUT_ZERO": True,
        "BIAS": False,
        "EVEN": True,
        "ASM": True,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": 128,
    }
    return compile_kernel(
        int8_grouped_mm._int8_grouped_mm,
        pointers,
        constants,
        capability,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


def tile_product(capability: int, dtype: str) -> Any:
    pointers = {
        "a_ptr": f"*{dtype}",
        "b_ptr": f"*{dtype}",
        "c_ptr": "*bf16",
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
    }
    constants = {
        "TILE": 128,
        "STEPS": 1,
        "UNROLL": True,
        "ROWS": 1,
        "COLUMNS": 128,
        "BIAS": False,
        "EVEN": True,
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "GROUP_M": 8,
    }
    return compile_kernel(
        tile_scaled_mm._tile_scaled_mm,
        pointers,
        constants,
        capability,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


def quantizer(capability: int, dtype: str, stochastic: bool = False) -> Any:
    pointers = {"x_ptr": "*bf16", "q_ptr": f"*{dtype}", "t_ptr": f"*{dtype}", "scale_ptr": "*fp32", "seed_ptr": "*i64"}
    constants = {
        "LARGEST": 127.0,
        "TINY": quantize.TINY,
        "STOCHASTIC": stochastic,
        "TRANSPOSED": False,
        "ONE_PASS": True,
        "ROWS": 1,
        "BLOCK_K": 4096,
    }
    return compile_kernel(quantize._quantize_rows, pointers, constants, capability, num_warps=8, enable_fp_fusion=False)


def column_quantizer(capability: int) -> Any:
    pointers = {"x_ptr": "*bf16", "bits_ptr": "*i32", "q_ptr": "*i8", "scale_ptr": "*fp32", "seed_ptr": "*i64"}
    constants = {
        "LARGEST": 127.0,
        "TINY": quantize.TINY,
        "STOCHASTIC": True,
        "CHUNKS": 16,
        "BLOCK_M": 64,
        "BLOCK_K": 64,
    }
    kernel = quantize_columns._quantize_columns
    return compile_kernel(kernel, pointers, constants, capability, num_warps=4, enable_fp_fusion=False)


def tile_quantizer(capability: int) -> Any:
    pointers = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "seed_ptr": "*i64"}
    constants = {
        "LARGEST": 448.0,
        "TINY": quantize.TINY,
        "STOCHASTIC": False,
        "R": 1,
        "C": 128,
        "TILES": 16,
        "BLOCK_R": 1,
        "BLOCK_C": 128,
    }
    kernel = quantize_tiles._quantize_tiles
    return compile_kernel(kernel, pointers, constants, capability, num_warps=4, enable_fp_fusion=False)


def int8_update(capability: int) -> Any:
    pointers = {"q_ptr": "*i8", "scale_ptr": "*fp32", "u_ptr": "*bf16", "seed_ptr": "*i64", "alpha": "fp32"}
    constants = {"TINY": quantize.TINY, "BLOCK_K": 4096}
    kernel = stochastic_update._update_int8
    return compile_kernel(kernel, pointers, constants, capability, num_warps=8, enable_fp_fusion=False)


KERNELS = {
    "int8 sm_90": lambda: int8_product(90),
    "int8 sm_90 tma": lambda: int8_product(90, tma=True),
    "int8 sm_80": lambda: int8_product(80, n=128),
    "int4 weight sm_90": lambda: weight_product(90, 4),
    "int4 weight fp16 sm_90": lambda: weight_product(90, 4, "fp16"),
    "int4 weight large sm_90": lambda: weight_product(90, 4, m=128, n=128),
    "int4 weight sm_80": lambda: weight_product(80, 4),
    "int4 weight fp32 sm_90": lambda: weight_product(90, 4, "fp32"),
    "int4 weight gathered sm_90": lambda: weight_product(90, 4, one_group=False),
    "int8 weight sm_90": lambda: weight_product(90, 8),
    "int8 weight sm_80": lambda: weight_product(80, 8),
    "int8 weight fp16 sm_90": lambda: weight_product(90, 8, "fp16"),
    "int3 weight sm_90": lambda: weight_product(90, 3),
    "int4 vector sm_90": lambda: weight_vector(90, 4),
    "int8 vector sm_80": lambda: weight_vector(80, 8),
    "int4 grouped sm_90": lambda: grouped_product(90, 4),
    "int8 grouped sm_90": lambda: grouped_product(90, 8, 128, 128),
    "int4 grouped sm_80": lambda: grouped_product(80, 4),
    "int8 tiles sm_90": lambda: tile_product(90, "i8"),
    "float8 tiles sm_90": lambda: tile_product(90, "fp8e4nv"),
    "int8 tiles sm_80": lambda: tile_product(80, "i8"),
    "quantize int8 sm_90": lambda: quantizer(90, "i8"),
    "quantize int8 stochastic sm_80": lambda: quantizer(80, "i8", True),
    "quantize float8 sm_90": lambda: quantizer(90, "fp8e4nv"),
    "quantize columns sm_90": lambda: column_quantizer(90),
    "quantize tiles sm_90": lambda: tile_quantizer(90),
    "update int8 sm_90": lambda: int8_update(90),
}


def describe(compiled: Any) -> dict[str, Any]:
    """Instructions of interest with how often they occur, and the shared memory in bytes."""
    counts: dict[str, int] = {}
    for found in INSTRUCTION.findall(compiled.asm["ptx"]):
        counts[found] = counts.get(found, 0) + 1
    return {"instructions": counts, "shared": compiled.metadata.shared, "target": compiled.metadata.target.arch}


if __name__ == "__main__":
    json.dump({name: describe(make()) for name, make in KERNELS.items()}, sys.stdout)
