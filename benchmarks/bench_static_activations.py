"""Static activations of the sentence model of the demo: every observer against dynamic scales.

    python -m benchmarks.bench_static_activations
    python -m benchmarks.bench_static_activations --observers mse min_max --texts 200

Calibrated on docstrings, measured on others: the mean cosine of the embeddings to those of the float model. It exits
with 1 if static int8, asymmetric and with the default observer, is worse than dynamic int8 by more than .002.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence

import torch

import qtorch
from examples.sentence_model import (
    Batch,
    SentenceEncoder,
    embed,
    mean_cosine,
    pretrained_encoder,
    tokenized_batches,
)
from examples.sentence_pairs import docstring_pairs
from qtorch import quantize_
from qtorch.calibration import gptq, observed
from qtorch.calibration.observers import OBSERVERS
from qtorch.recipes.base import Recipe

MARGIN = 0.002
INT8 = qtorch.int8_static_activation_int8_weight()
ASYMMETRIC = qtorch.int8_static_activation_int8_weight(act_mapping_type=qtorch.MappingType.ASYMMETRIC)
FLOAT8 = qtorch.float8_static_activation_float8_weight()


def main() -> int:
    """Print a row for each recipe; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=256, help="number of texts to calibrate on")
    parser.add_argument("--texts", type=int, default=600, help="number of other texts to measure on")
    parser.add_argument("--observers", nargs="+", default=sorted(OBSERVERS), choices=sorted(OBSERVERS))
    parser.add_argument("--gptq", action="store_true", help="GPTQ together with static activations too")
    args = parser.parse_args()
    documents = [pair.document for pair in docstring_pairs(args.calibration + args.texts)]
    data = [{"ids": batch.ids, "mask": batch.mask} for batch in tokenized_batches(documents[: args.calibration])]
    test = tokenized_batches(documents[args.calibration :])

    def mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["mask"]

    recipes: dict[str, Recipe] = {"int8, dynamic": qtorch.int8_dynamic_activation_int8_weight()}
    for name in args.observers:
        recipes[f"int8 asymmetric, {name}"] = observed(ASYMMETRIC, data, observer=name, mask=mask)
        recipes[f"int8, {name}"] = observed(INT8, data, observer=name, mask=mask)
    if args.gptq:
        recipes["int8 asymmetric, gptq"] = gptq(ASYMMETRIC, data, mask=mask)
    recipes["float8, dynamic"] = qtorch.float8_dynamic_activation_float8_weight(qtorch.PerTensor())
    for name in args.observers:
        recipes[f"float8, {name}"] = observed(FLOAT8, data, observer=name, mask=mask)
    found = measured(recipes, test)
    if "mse" not in args.observers:
        return 0
    return 0 if found["int8 asymmetric, mse"] >= found["int8, dynamic"] - MARGIN else 1


def measured(recipes: dict[str, Recipe], test: Sequence[Batch]) -> dict[str, float]:
    """Mean cosine to the float model, by name of the recipe; printed as found."""
    floats = pretrained_encoder()
    wanted, found = embed(floats, test), {}
    print(f"{'':30} {'cosine':>8} {'seconds':>8}")
    for name, recipe in recipes.items():
        model: SentenceEncoder = copy.deepcopy(floats)
        begun = time.perf_counter()
        quantize_(model, recipe)
        seconds = time.perf_counter() - begun
        found[name] = mean_cosine(embed(model, test), wanted)
        print(f"{name:30} {found[name]:8.5f} {seconds:8.1f}", flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
