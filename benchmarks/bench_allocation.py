"""Bit allocation on the Llama of tutorials/qat_llama.py, against uniform bits and "first and last at 4".

The model (1M parameters, bytes of Python's standard library) is trained first. Weights are 2, 3 or 4 bits in groups of
32 with zero points; calibration is 128 x 128 bytes of training text. Figures are on validation text: the Kullback-
Leibler divergence from the float model, in nats a byte, and perplexity; mean and standard deviation over the seeds of
the calibration text.

    uniform 3            all layers at 3 bits
    ends 4, middle 2-3   the first and the last block at 4 bits, those between at 2 and 3, in the bytes of uniform 3
    ends 4, middle 3     the first and the last block at 4 bits, those between at 3; takes more bytes
    allocate             in the bytes of uniform 3, or of `ends 4, middle 3`
    H alone              without gradients
    refine               with swaps measured on held-out calibration text
    rows                 codes with one scale a row, 2 to 4 bits: at most 3.0 bits an element, scales included

    python -m benchmarks.bench_allocation [--short] [--save] [--model FILE] [--report FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks import pretrain_llama
from benchmarks.common import machine, save
from benchmarks.pretrain_llama import Text
from qtorch import MappingType, intx_weight_only
from qtorch.calibration import auto, gptq
from qtorch.calibration.allocation import allocate
from qtorch.recipes.base import Recipe
from tutorials.qat_llama import SHORT, Run, is_quantized, perplexity, train

Recipes = dict[str, Recipe]

CALIBRATED = {"gptq": gptq, "auto": auto}
WITH_CALIBRATION = ("uniform 3", "allocate", "allocate, scores by GPTQ")


def candidates(group_size: int) -> dict[int, Any]:
    return {bits: intx_weight_only(f"int{bits}", group_size, MappingType.ASYMMETRIC) for bits in (2, 3, 4)}


def trained(run: Run, text: Text, path: Path | None) -> nn.Module:
    """The float model, read from `path` if it exists, or else trained and written there."""
    torch.manual_seed(0)
    pretrain_llama.SIZES.setdefault("tiny", (64, 96, 1, 2))
    model = pretrain_llama.make_model(run.size, run.length, extra_norms=False)
    if path is not None and path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, text, run, 0, run.steps, run.lr)
    train(model, text, run, run.steps, run.more_steps, run.more_lr)
    if path is not None:
        torch.save(model.state_dict(), path)
    return model.eval()


def layers(model: nn.Module) -> dict[str, int]:
    """Block of each layer that is quantized, by name."""
    return {name: int(name.split(".")[2]) for name, m in model.named_modules() if is_quantized(m, name)}


def ends_at_4(model: nn.Module, of: dict[int, Any], limit: int | None) -> Recipes:
    """The first and the last block at 4 bits; the others at 3, or at 2 from the first on until the limit is kept."""
    found = layers(model)
    last = max(found.values())
    recipes = {name: of[4 if block in (0, last) else 3] for name, block in found.items()}
    for name, block in found.items():
        if limit is None or size_of(model, recipes) <= limit:
            break
        if block not in (0, last):
            recipes[name] = of[2]
    return recipes


def size_of(model: nn.Module, recipes: Any) -> int:
    return qtorch.quantize_(copy.deepcopy(model), recipes).bytes_after


class Judge:
    """Divergence from the float model, and perplexity, on validation text."""

    def __init__(self, model: nn.Module, text: Text, run: Run) -> None:
        self.model, self.text, self.run = model, text, run
        self.batches = text.validation_batches(run.batches, 2 * run.rows, run.length)
        self.of_float = [self._logs(model, inputs) for inputs, _ in self.batches]

    @torch.no_grad()
    def _logs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs).logits.log_softmax(-1)

    def __call__(self, recipes: Any) -> dict[str, float]:
        model = copy.deepcopy(self.model)
        report = qtorch.quantize_(model, recipes)
        divergences = []
        for (inputs, _), p in zip(self.batches, self.of_float):
            q = self._logs(model, inputs)
            divergences.append(float((p.exp() * (p - q)).sum(-1).mean()))
        elements = report.quantized_parameters
        ppl = perplexity(model, self.text, self.run)
        return {"bits": 8 * report.bytes_after / elements, "kl": statistics.mean(divergences), "perplexity": ppl}


def measure(run: Run, path: Path | None, seeds: int, folder: Path | None, roundings: list[str]) -> list[dict[str, Any]]:
    text = pretrain_llama.read_text(None, limit=1 << 20 if run is SHORT else 64 << 20)
    model = trained(run, text, path)
    judge = Judge(model, text, run)
    print(f"float perplexity {perplexity(model, text, run):.4f}")
    grouped, by_row = candidates(32), candidates(-1)
    names = layers(model)
    uniform, ends = dict.fromkeys(names, grouped[3]), ends_at_4(model, grouped, None)
    small, large = size_of(model, uniform), size_of(model, ends)
    fixed: dict[str, Any] = {
        "uniform 3": uniform,
        "ends 4, middle 2-3": ends_at_4(model, grouped, small),
        "ends 4, middle 3": ends,
        "uniform 3, rows": dict.fromkeys(names, by_row[3]),
    }
    ways: dict[str, tuple[dict[int, Any], int | str, dict[str, Any]]] = {
        "allocate": (grouped, small, {}),
        "allocate, H alone": (grouped, small, {"gradients": False}),
        "allocate, refine": (grouped, small, {"refine": 60}),
        "allocate, scores by GPTQ": (grouped, small, {"rounding": gptq()}),
        "allocate, bytes of ends 4": (grouped, large, {}),
        "allocate, rows": (by_row, "3.0 bits", {}),
    }
    count, part = (128, 16) if run is not SHORT else (8, 2)
    texts = [list(text.batch(1000 + seed, 0, count, run.length)[0].split(part)) for seed in range(seeds)]
    chosen: list[dict[str, Any]] = []
    seconds: list[dict[str, float]] = []
    rows = []

    def add(name: str, rounding: str, seed: int, recipes: Any) -> None:
        found = judge(recipes)
        row = {"method": name, "rounding": rounding, "seed": seed, **found}
        rows.append({**row, "seconds": seconds[seed].get(name, 0.0), "predicted": getattr(recipes, "score", None)})
        print(f"{name:28s}{rounding:10s}{seed:3d}" + "".join(f"{found[key]:11.5f}" for key in found), flush=True)

    for seed, data in enumerate(texts):
        chosen.append({**fixed})
        seconds.append({})
        for name, (recipes, budget, options) in ways.items():
            start = time.perf_counter()
            made = allocate(model, list(recipes.values()), budget, data, filter_fn=is_quantized, **options)
            seconds[seed][name] = time.perf_counter() - start
            chosen[seed][name] = made
        if folder is not None and seed == 0:
            chosen[0]["allocate"].save(folder)
        for name, of_weights in chosen[seed].items():
            if not seed or name not in fixed:
                add(name, "nearest", seed, of_weights)
    for rounding, wrap in CALIBRATED.items():
        for seed, data in enumerate(texts):
            for name in WITH_CALIBRATION if rounding in roundings else ():
                add(name, rounding, seed, {key: wrap(each, data) for key, each in chosen[seed][name].items()})
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown: means and standard deviations over seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["rounding"]), []).append(row)
    lines = ["| recipes | rounding | bits | KL, nats/1000 | perplexity | seconds |", "|---|---|---|---|---|---|"]
    for (method, rounding), found in groups.items():

        def cell(key: str, factor: float, digits: int, found: list[dict[str, Any]] = found) -> str:
            values = [factor * row[key] for row in found]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            return f"{statistics.mean(values):.{digits}f}{spread}"

        seconds = f"{statistics.mean(row['seconds'] for row in found):.0f}" if found[0]["seconds"] else ""
        lines.append(
            f"| {method} | {rounding} | {found[0]['bits']:.3f} | {cell('kl', 1e3, 2)} | {cell('perplexity', 1, 4)} | "
            f"{seconds} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a smaller model and few steps, to see it run")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/allocation.json")
    parser.add_argument("--model", type=Path, help="file of the trained model: read, or written if it does not exist")
    parser.add_argument("--report", type=Path, help="folder for the report of the first allocation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--roundings", nargs="*", default=list(CALIBRATED), choices=CALIBRATED, help="beside nearest")
    options = parser.parse_args()
    print(machine())
    rows = measure(SHORT if options.short else Run(), options.model, options.seeds, options.report, options.roundings)
    print(summary(rows))
    if options.save:
        save("allocation", rows)


if __name__ == "__main__":
    main()
