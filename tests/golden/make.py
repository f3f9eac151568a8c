"""Writes the golden checkpoints: one small layer of every format, its input, its output and its dequantized weight.

    python -m tests.golden.make

It adds what is missing and never rewrites a file: each must load, and give the same numbers, in every later version.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

import qtorch

FOLDER = Path(__file__).parent

GOLDEN: dict[str, qtorch.recipes.base.Recipe] = {
    "int8_weight_only": qtorch.int8_weight_only(),
    "gguf_q8_0": qtorch.gguf_q8_0(),
    "gguf_q5_0": qtorch.gguf_q5_0(),
    "gguf_q5_1": qtorch.gguf_q5_1(),
    "gguf_q4_0": qtorch.gguf_q4_0(),
    "gguf_q4_1": qtorch.gguf_q4_1(),
    **{name: getattr(qtorch, name)() for name in (f"gguf_q{bits}_k" for bits in range(2, 7))},
    "gguf_iq4_nl": qtorch.gguf_iq4_nl(),
    "int8_dynamic_activation_int8_weight": qtorch.int8_dynamic_activation_int8_weight(),
    "int8_dynamic_activation_int4_weight": qtorch.int8_dynamic_activation_int4_weight(),
    "int4_weight_only": qtorch.int4_weight_only(group_size=32),
    "int4_double_quantized": qtorch.int4_weight_only(group_size=32, double_quantize=True),
    "int4_weight_only_tiled": qtorch.int4_weight_only(
        group_size=32, zero_point_domain=qtorch.ZeroPointDomain.FLOAT, layout=qtorch.TensorCoreTiledLayout()
    ),
    **{f"uint{bits}": qtorch.uintx_weight_only(f"uint{bits}", group_size=32) for bits in range(1, 8)},
    **{f"int{bits}": qtorch.intx_weight_only(f"int{bits}", group_size=32) for bits in range(1, 8)},
    "float8_weight_only": qtorch.float8_weight_only(),
    "float8_dynamic_activation_float8_weight": qtorch.float8_dynamic_activation_float8_weight(),
    "float8_dynamic_activation_int4_weight": qtorch.float8_dynamic_activation_int4_weight(group_size=32),
    "float8_static_activation_float8_weight": qtorch.float8_static_activation_float8_weight(0.01),
    "int8_static_activation_int8_weight": qtorch.int8_static_activation_int8_weight(0.03),
    "int8_dynamic_activation_int8_semi_sparse_weight": qtorch.int8_dynamic_activation_int8_semi_sparse_weight(),
    "float8_dynamic_activation_float8_semi_sparse_weight": qtorch.float8_dynamic_activation_float8_semi_sparse_weight(),
    **{f"fpx_{e}_{m}": qtorch.fpx_weight_only(e, m) for e, m in ((3, 2), (2, 3), (2, 2), (3, 1), (2, 1), (2, 0))},
    "mxfp8": qtorch.mxfp8_weight_only(),
    "mxfp6": qtorch.mxfp6_weight_only(),
    "mxfp4": qtorch.mxfp4_weight_only(),
    "nvfp4": qtorch.nvfp4_weight_only(),
    "nf4": qtorch.nf4_weight_only(),
    "lut_3_bits": qtorch.lut_weight_only(3),
    "vector_codebook": qtorch.vector_codebook_weight_only(),
    "block_sparse": qtorch.block_sparse(qtorch.int8_dynamic_activation_int8_weight(), 0.5, block_size=16),
    "low_rank": qtorch.low_rank(qtorch.intx_weight_only("int3", group_size=32), rank=4),
    "conv_int8_dynamic_activation_int8_weight": qtorch.int8_dynamic_activation_int8_weight(),
    "conv_int4_weight_only": qtorch.int4_weight_only(group_size=32),
}


def layer_and_input(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """In floating point."""
    if name.startswith("conv_"):
        return torch.nn.Conv2d(16, 8, (2, 3), padding=1), torch.randn(2, 16, 5, 4)
    dtype = torch.bfloat16 if "tiled" in name else torch.float32
    columns = 256 if name.endswith("_k") else 64
    return torch.nn.Linear(columns, 32, dtype=dtype), torch.randn(3, columns, dtype=dtype)


def make(name: str) -> None:
    """The layer as ``<name>.safetensors``, the numbers as ``<name>.numbers.safetensors``."""
    torch.manual_seed(0)
    layer, x = layer_and_input(name)
    qtorch.quantize_(layer.requires_grad_(False), {"weight": GOLDEN[name]})
    qtorch.save_quantized(layer, FOLDER / f"{name}.safetensors")
    numbers = {"input": x, "output": layer(x), "weight": layer.weight.dequantize().contiguous()}
    save_file(numbers, FOLDER / f"{name}.numbers.safetensors")


def main() -> None:
    for name in GOLDEN:
        if not (FOLDER / f"{name}.safetensors").exists():
            make(name)
            print(name)


if __name__ == "__main__":
    main()
