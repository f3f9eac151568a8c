"""Low-rank branches: what four-bit weights and activations lose with and without one, on two small models.

llama   the short Llama of `bench_calibration`: KL from the float model.
dit     a diffusion transformer of diffusers (DiTTransformer2DModel, 1.5M parameters), trained for 400 steps to predict
        the noise in the handwritten digits of scikit-learn, calibrated on 256 noisy images at random times. The squared
        error of the predicted noise relative to that of the float model, on 256 other images.

    python -m benchmarks.bench_low_rank [--models llama dit] [--seeds 3] [--folder FOLDER] [--save]

A seed draws the calibration data. Bits are those of the quantized weights with everything. NVFP4 and int4 activations
are emulated on a CPU. With `--save` each row is written to results/low_rank.json as soon as it is there, and rows that
are in it are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.bench_calibration import Drawn, ShortLlama, Task
from benchmarks.common import RESULTS, machine
from qtorch import LinearSpec, PackedLayout, PerGroup, QuantSpec
from qtorch.calibration import gptq, smooth
from qtorch.primitives import qdtype
from qtorch.recipes.base import WeightRecipe, register_recipe


@register_recipe("bench_int4_activation_int4_weight")
@dataclass(frozen=True)
class Int4Int4(WeightRecipe):
    """Symmetric int4 in groups of 32, weights and activations."""

    def linear_spec(self) -> LinearSpec:
        codes = QuantSpec(qdtype("int4"), PerGroup(32))
        return LinearSpec(codes, codes, layout=PackedLayout())


class DiT(Task):
    def __init__(self, path: Path) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
        self.labels = torch.tensor(digits.target)
        torch.manual_seed(0)
        self.float = self.made()
        if path.exists():
            self.float.load_state_dict(torch.load(path, weights_only=True))
        else:
            self.train()
            torch.save(self.float.state_dict(), path)
        self.float.eval().requires_grad_(False)
        self.judged = self.batch(0, slice(1500, 1756))
        self.noise = self.float(**self.judged).sample

    def made(self) -> Any:
        from diffusers import DiTTransformer2DModel

        sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 3, "sample_size": 8, "patch_size": 2}
        return DiTTransformer2DModel(**sizes, in_channels=1, out_channels=1, num_embeds_ada_norm=1000)

    def batch(self, seed: int, rows: Any) -> dict[str, Any]:
        """Noisy images at random times of a cosine schedule."""
        generator = torch.Generator().manual_seed(seed)
        clean, labels = self.images[rows], self.labels[rows]
        times = torch.randint(1000, (len(clean),), generator=generator)
        self.target = torch.randn(clean.shape, generator=generator)
        angle = (times / 1000 * torch.pi / 2).reshape(-1, 1, 1, 1)
        noisy = angle.cos() * clean + angle.sin() * self.target
        return {"hidden_states": noisy, "timestep": times, "class_labels": labels}

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.float.parameters(), lr=1e-3)
        for step in range(400):
            rows = torch.randint(1500, (32,), generator=torch.Generator().manual_seed(step))
            given = self.batch(10_000 + step, rows)
            optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 50) * (1 - step / 400)
            optimizer.zero_grad()
            loss = (self.float(**given).sample - self.target).square().mean()
            loss.backward()
            optimizer.step()
        print(f"dit: loss {float(loss):.4f}", flush=True)

    def model(self) -> nn.Module:
        return copy.deepcopy(self.float)

    def data(self, seed: int) -> Drawn:
        given = self.batch(1 + seed, slice(256 * seed, 256 * (seed + 1)))
        return [{name: part[i : i + 32] for name, part in given.items()} for i in range(0, 256, 32)], {}

    def judge(self, model: nn.Module) -> dict[str, float]:
        found: Tensor = model(**self.judged).sample
        return {"error": float((found - self.noise).square().sum() / self.noise.square().sum())}

    @staticmethod
    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "transformer_blocks" in name


FORMATS: Mapping[str, tuple[WeightRecipe, WeightRecipe | None]] = {
    "int4 g32": (qtorch.intx_weight_only("int4", 32), Int4Int4()),
    "nvfp4": (qtorch.nvfp4_weight_only(), qtorch.nvfp4_dynamic_activation_nvfp4_weight()),
    "int3 g32": (qtorch.intx_weight_only("int3", 32), None),
}
"""Name -> weights alone, and with activations."""

METHODS: Mapping[str, Callable[[Any, Any], Any]] = {
    "nearest": lambda recipe, data: recipe,
    "smooth + gptq": lambda recipe, data: gptq(recipe, data, transforms=[smooth()]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("llama", "dit"), default=("llama", "dit"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--folder", type=Path, help="where the trained models are kept")
    parser.add_argument("--save", action="store_true", help="write results/low_rank.json")
    args = parser.parse_args()
    path = RESULTS / "low_rank.json"
    done = json.loads(path.read_text())["rows"] if args.save and path.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        kept = args.folder or Path(folder)
        for name in args.models:
            task: Task = ShortLlama(kept / "llama_250.pt") if name == "llama" else DiT(kept / "dit.pt")
            for key, recipe in cells(name, args.ranks):
                if any(all(row[part] == value for part, value in key.items()) for row in done):
                    continue
                done.append({**key, **measured(task, recipe, METHODS[key["method"]], args.seeds)})
                print(
                    " | ".join(
                        f"{value:.4g}" if isinstance(value, float) else str(value) for value in done[-1].values()
                    ),
                    flush=True,
                )
                if args.save:
                    path.write_text(json.dumps({"machine": machine(), "rows": done}, indent=1) + "\n")


def cells(model: str, ranks: Sequence[int]) -> Iterator[tuple[dict[str, str], WeightRecipe]]:
    """What names a row, and its recipe."""
    for format, recipes in FORMATS.items():
        for method in METHODS:
            for form, recipe in zip(("A16", "A4"), recipes, strict=True):
                if recipe is not None:
                    key = {"model": model, "format": format, "method": method}
                    yield {**key, "form": form}, recipe
                    yield from (({**key, "form": f"{form}, rank {r}"}, qtorch.low_rank(recipe, r)) for r in ranks)


@torch.no_grad()
def measured(task: Task, recipe: Any, make: Callable[..., Any], seeds: int) -> dict[str, Any]:
    """Bits of a weight, and the mean and standard deviation of the error over the draws; nearest has one."""
    found, bits = [], 0.0
    for seed in range(1 if make is METHODS["nearest"] else seeds):
        model = task.model()
        report = qtorch.quantize_(model, make(recipe, task.data(seed)[0]), task.is_quantized)
        rows = report.quantized
        bits = 8 * sum(row.bytes_after for row in rows) / sum(torch.Size(row.shape).numel() for row in rows)
        values = task.judge(model)
        found.append(values.get("kl", values.get("error", 0.0)))
    spread = {"stdev": statistics.stdev(found)} if len(found) > 1 else {}
    return {"bits": bits, "seeds": len(found), "mean": statistics.mean(found), **spread}


if __name__ == "__main__":
    main()
