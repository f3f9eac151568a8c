"""Writes docs/reference/formats.md: size, accuracy and support of every format. `python -m benchmarks.format_table`

It takes some ten minutes: every recipe runs the sentence model of the demo over a thousand pairs of texts.
"""

from __future__ import annotations

import argparse
import copy
import io
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import qtorch
from examples.sentence_model import Batch, SentenceEncoder, embed, pretrained_encoder, quality, tokenized_batches
from examples.sentence_pairs import docstring_pairs
from qtorch import TensorCoreTiledLayout, ZeroPointDomain
from qtorch.kernels.registry import Problem, choose
from qtorch.primitives import compute_error
from qtorch.recipes.base import Recipe, WeightRecipe

SHAPE = (1024, 1024)
PAIRS = 1000

RECIPES: list[WeightRecipe] = [
    qtorch.int8_weight_only(),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int8_semi_sparse_weight(),
    qtorch.float8_weight_only(),
    qtorch.float8_dynamic_activation_float8_weight(),
    qtorch.mxfp8_weight_only(),
    qtorch.mxfp8_dynamic_activation_mxfp8_weight(),
    *(qtorch.uintx_weight_only(f"uint{bits}", group_size=64) for bits in (7, 6, 5)),
    *(qtorch.intx_weight_only(f"int{bits}", group_size=64) for bits in (7, 6, 5)),
    *(qtorch.fpx_weight_only(e, m) for e, m in ((3, 2), (2, 3))),
    qtorch.mxfp6_weight_only(),
    *(qtorch.fpx_weight_only(e, m) for e, m in ((3, 1), (2, 2))),
    *(qtorch.int4_weight_only(group_size=group) for group in (32, 64, 128, -1)),
    *(qtorch.int4_weight_only(group_size=group, use_hqq=True) for group in (32, 128)),
    qtorch.int4_weight_only(group_size=32, double_quantize=True),
    qtorch.int4_weight_only(group_size=32, zero_point_domain=ZeroPointDomain.FLOAT, layout=TensorCoreTiledLayout()),
    qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.float8_dynamic_activation_int4_weight(),
    qtorch.fpx_weight_only(2, 1),
    qtorch.mxfp4_weight_only(),
    qtorch.mxfp4_dynamic_activation_mxfp4_weight(),
    qtorch.nvfp4_weight_only(),
    qtorch.nvfp4_dynamic_activation_nvfp4_weight(),
    qtorch.nf4_weight_only(),
    qtorch.nf4_weight_only(double_quantize=False),
    qtorch.lut_weight_only(4),
    qtorch.gguf_iq4_nl(),
    *(qtorch.uintx_weight_only("uint3", group_size=32, use_hqq=hqq) for hqq in (False, True)),
    *(qtorch.intx_weight_only("int3", group_size=32, double_quantize=double) for double in (False, True)),
    qtorch.fpx_weight_only(2, 0),
    qtorch.lut_weight_only(3),
    *(qtorch.uintx_weight_only("uint2", group_size=32, use_hqq=hqq) for hqq in (False, True)),
    qtorch.uintx_weight_only("uint2", group_size=32, double_quantize=True),
    qtorch.intx_weight_only("int2", group_size=32),
    *(qtorch.lut_weight_only(2, group_size=group) for group in (-1, 64)),
    qtorch.vector_codebook_weight_only(),
]

HEAD = """# Formats

Made by `python -m benchmarks.format_table`; torch {torch}.

## Size and accuracy

Bits per weight include scales, zero points and tables as they are stored in memory, for a bf16 weight of 1024 x 1024.

The SQNR columns compare the dequantized weight with the float one, in dB (6 dB more is half the error), for three
sources of weights: a normal distribution; a Student t distribution with 4 degrees of freedom, which has outliers; and
the sentence model all-MiniLM-L6-v2 (mean of its {layers} linear layers).

The last three columns measure this model with these layers quantized, in retrieval over {pairs} pairs from the
docstrings of Python's standard library: the mean reciprocal rank as a share of the float model's, recall@1
(float: {recall:.1%}), and the mean cosine similarity to the float model's embeddings.

| recipe | bits | normal | t(4) | model | MRR | recall@1 | cosine |
|---|---|---|---|---|---|---|---|
"""

SUPPORT = """
## Where they run

The kernels that `F.linear` runs with a bf16 input on CPU and on CUDA; `qtorch.explain` says it for other inputs, and
why. The last three columns were tried for each recipe: a layer gives the same output under
`torch.compile(fullgraph=True)`, after `save_quantized` and `load_quantized` (safetensors), and after `torch.save` and
`torch.load(weights_only=True)`.

| recipe | CPU | CUDA | compile | safetensors | weights-only |
|---|---|---|---|---|---|
"""


class SentenceModel(NamedTuple):
    """The float model, what it reads, and what it makes of it."""

    encoder: SentenceEncoder
    batches: Sequence[Batch]
    embeddings: Tensor


def accuracy_row(recipe: WeightRecipe, normal: Tensor, student: Tensor, model: SentenceModel) -> str:
    quantized = recipe.apply(normal)
    bits = quantized.nbytes * 8 / normal.numel()
    encoder = copy.deepcopy(model.encoder)
    report = qtorch.quantize_(encoder, recipe)
    of_model = statistics.mean(layer.sqnr for layer in report.quantized if layer.sqnr is not None)
    errors = [float(compute_error(weight, recipe.apply(weight).dequantize())) for weight in (normal, student)]
    if recipe.linear_spec().activation is None:
        # Weights that were rounded tell all, and float layers are done sooner.
        qtorch.dequantize_(encoder)
    of_float = quality(model.embeddings, model.embeddings)
    found = quality(embed(encoder, model.batches), model.embeddings)
    cells = [
        f"`{recipe}`",
        f"{bits:.2f}",
        *(f"{sqnr:.1f}" for sqnr in (*errors, of_model)),
        f"{found.mrr / of_float.mrr:.1%}",
        f"{found.recall_at_1:.1%}",
        f"{found.cosine:.4f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def support_row(recipe: Recipe) -> str:
    layer = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    qtorch.quantize_(layer, recipe)
    kernels = [
        choose(Problem("linear", layer.weight.scheme, torch.bfloat16, device)).name for device in ("cpu", "cuda")
    ]
    works = ["yes" if works(layer) else "**no**" for works in (compiles, survives_safetensors, survives_torch_save)]
    return f"| `{recipe}` | {' | '.join([f'`{name}`' for name in kernels] + works)} |\n"


def compiles(layer: nn.Module) -> bool:
    torch.compiler.reset()
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    return bool(compute_error(layer(x), torch.compile(layer, fullgraph=True)(x)) > 40)


def survives_safetensors(layer: nn.Module) -> bool:
    def through_file(fresh: nn.Module) -> None:
        with tempfile.TemporaryDirectory() as folder:
            qtorch.save_quantized(layer, f"{folder}/layer.safetensors")
            qtorch.load_quantized(fresh, f"{folder}/layer.safetensors")

    return same_output(layer, through_file)


def survives_torch_save(layer: nn.Module) -> bool:
    def through_file(fresh: nn.Module) -> None:
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)

    return same_output(layer, through_file)


def same_output(layer: nn.Module, fill: Callable[[nn.Module], None]) -> bool:
    with torch.device("meta"):
        fresh = nn.Linear(256, 128, dtype=torch.bfloat16)
    fill(fresh)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    return torch.equal(fresh(x), layer(x))


def sentence_model() -> SentenceModel:
    pairs = docstring_pairs(PAIRS)
    batches = tokenized_batches([pair.query for pair in pairs] + [pair.document for pair in pairs])
    encoder = pretrained_encoder()
    return SentenceModel(encoder, batches, embed(encoder, batches))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    normal = torch.randn(SHAPE).bfloat16()
    student = torch.distributions.StudentT(torch.tensor(4.0)).sample(SHAPE).bfloat16()
    model = sentence_model()
    layers = sum(isinstance(module, nn.Linear) for module in model.encoder.modules())
    recall = quality(model.embeddings, model.embeddings).recall_at_1
    text = HEAD.format(torch=torch.__version__, layers=layers, pairs=PAIRS, recall=recall)
    for recipe in RECIPES:
        text += accuracy_row(recipe, normal, student, model)
        print(text.splitlines()[-1], flush=True)
    text += SUPPORT
    for recipe in RECIPES:
        text += support_row(recipe)
        print(text.splitlines()[-1], flush=True)
    (Path(__file__).parent.parent / "docs" / "reference" / "formats.md").write_text(text)


if __name__ == "__main__":
    main()
