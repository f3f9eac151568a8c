"""Writes docs/formats.md: bits and accuracy of every weight format. `python -m benchmarks.format_table`"""

from __future__ import annotations

from pathlib import Path

import torch

import qtorch
from qtorch.primitives import compute_error
from qtorch.quantize_api import Recipe

SHAPE = (1024, 1024)

RECIPES: list[Recipe] = [
    qtorch.int8_weight_only(),
    qtorch.float8_weight_only(),
    qtorch.mxfp8_weight_only(),
    *(qtorch.uintx_weight_only(f"uint{bits}", group_size=64) for bits in (7, 6, 5)),
    *(qtorch.intx_weight_only(f"int{bits}", group_size=64) for bits in (7, 6, 5)),
    *(qtorch.fpx_weight_only(e, m) for e, m in ((3, 2), (2, 3))),
    qtorch.mxfp6_weight_only(),
    *(qtorch.fpx_weight_only(e, m) for e, m in ((3, 1), (2, 2))),
    *(qtorch.int4_weight_only(group_size=group) for group in (32, 64, 128, -1)),
    qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.fpx_weight_only(2, 1),
    qtorch.mxfp4_weight_only(),
    qtorch.nf4_weight_only(),
    qtorch.nf4_weight_only(double_quantize=False),
    qtorch.lut_weight_only(4),
    qtorch.uintx_weight_only("uint3", group_size=64),
    qtorch.intx_weight_only("int3", group_size=64),
    qtorch.fpx_weight_only(2, 0),
    qtorch.lut_weight_only(3),
    qtorch.uintx_weight_only("uint2", group_size=64),
    qtorch.intx_weight_only("int2", group_size=64),
    qtorch.lut_weight_only(2),
]

HEAD = """# Formats

Weights of 1024 x 1024 in bf16, drawn from a normal and from a Student t distribution with 4 degrees of freedom, whose
outliers are closer to those of real models. Bits per weight include scales, zero points and tables, as they are in
memory. SQNR is that of the dequantized weight, in dB; 6 dB are a factor of 2 in error. Kernel: what runs on CPU with
bf16 inputs; `explain` says it for others. Made by `python -m benchmarks.format_table`.

| recipe | bits per weight | SQNR, normal | SQNR, t(4) | kernel |
|---|---|---|---|---|
"""


def row(recipe: Recipe, normal: torch.Tensor, student: torch.Tensor) -> str:
    quantized = recipe.apply(normal)
    bits = quantized.nbytes * 8 / normal.numel()
    errors = [float(compute_error(weight, recipe.apply(weight).dequantize())) for weight in (normal, student)]
    kernel = qtorch.explain(quantized).kernel
    return f"| `{recipe}` | {bits:.2f} | {errors[0]:.1f} | {errors[1]:.1f} | `{kernel}` |\n"


def main() -> None:
    torch.manual_seed(0)
    normal = torch.randn(SHAPE).bfloat16()
    student = torch.distributions.StudentT(torch.tensor(4.0)).sample(SHAPE).bfloat16()
    text = HEAD + "".join(row(recipe, normal, student) for recipe in RECIPES)
    (Path(__file__).parent.parent / "docs" / "formats.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
