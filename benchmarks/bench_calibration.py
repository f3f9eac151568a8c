"""Calibration of small models, weight-only and asymmetric: how much of what rounding to nearest costs is recovered.

minilm   the sentence model of the demo, calibrated on 256 docstrings. Mean cosine to the float model's embeddings of
         600 other texts, and the mean reciprocal rank (MRR) on 1,000 pairs as a share of the float model's.
llama    the Llama of 1M parameters of `tutorials.qat_llama`, calibrated on 128 x 128 bytes. Perplexity a byte, and the
         KL divergence from the float model. Here, qat and lsq train 250 steps more, on 16 x 128 bytes each, and
         other packages stand beside, where they are installed (see `calibration_peers`).
short llama  the same after 250 steps, calibrated on 64 x 128 bytes and judged on 64 x 128 others.
mixture  a mixture of 64 experts in each of 3 layers, 4 for a token, of 5M parameters, trained for 500 steps of 16 x 128
         bytes, and calibrated on 24 x 32 bytes, of which few come to an expert. Judged as the Llama.

    python -m benchmarks.bench_calibration [--models llama mixture] [--seeds 3] [--methods ...] [--save]

A seed draws the calibration data; `total_bits` are those of a weight with its scales and zero points. With `--save` a
row is written to results/calibration.json as soon as it is there.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.calibration_peers import PEERS, importable
from benchmarks.common import RESULTS, machine
from qtorch.calibration import FloatTarget, auto, calibrated, gptq
from qtorch.primitives import HQQRule, MSERule
from qtorch.recipes.base import Recipe

Drawn = tuple[Any, dict[str, Any]]
"""Batches, and options of `calibrated`."""

Method = Callable[[Any, Any, dict[str, Any]], Recipe]

TRAINED = ("qat", "lsq")
VECTORS = ("gptq, vectors", "auto, vectors")
OF_EXPERTS = ("gptq, all experts", "auto, all experts")
WITHOUT_DATA = ("nearest", "mse", "hqq")

METHODS: dict[str, Method] = {
    "nearest": lambda recipe, data, options: recipe,
    "mse": lambda recipe, data, options: with_rule(recipe, MSERule()),
    "hqq": lambda recipe, data, options: with_rule(recipe, HQQRule()),
    "gptq": lambda recipe, data, options: gptq(recipe, data, **options),
    "target": lambda recipe, data, options: calibrated(recipe, data, target=FloatTarget(residual=False), **options),
    "target, residual": lambda recipe, data, options: calibrated(recipe, data, **options),
    "auto": lambda recipe, data, options: auto(recipe, data, **options),
    "auto, int8 scales": lambda recipe, data, options: auto(replace(recipe, double_quantize=True), data, **options),
    "gptq, vectors": lambda recipe, data, options: gptq(qtorch.vector_codebook_weight_only(), data, **options),
    "auto, vectors": lambda recipe, data, options: auto(qtorch.vector_codebook_weight_only(), data, **options),
    "gptq, all experts": lambda recipe, data, options: gptq(recipe, data, all_experts=True, **options),
    "auto, all experts": lambda recipe, data, options: auto(recipe, data, all_experts=True, **options),
    "qat": lambda recipe, data, options: qtorch.training.qat(recipe),
    "lsq": lambda recipe, data, options: qtorch.training.lsq(recipe=recipe),
}
"""Name -> (recipe, data, options of `calibrated`) -> what `quantize_` gets."""


def with_rule(recipe: Any, rule: Any) -> Any:
    return qtorch.uintx_weight_only(recipe.dtype, recipe.group_size, scale_rule=rule)


class Task:
    """A model, data for calibration, and how it is judged."""

    configurations: tuple[tuple[int, int], ...]
    """(bits, group_size)."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, seed: int) -> Drawn:
        raise NotImplementedError

    def judge(self, model: nn.Module) -> dict[str, float]:
        raise NotImplementedError

    @staticmethod
    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear)

    def methods(self, asked: Iterable[str]) -> list[str]:
        """Those of the methods that this model can show."""
        return [method for method in asked if method not in (*TRAINED, *PEERS, *OF_EXPERTS)]

    def quantize(self, model: nn.Module, method: str, bits: int, group_size: int, seed: int, drawn: Drawn) -> float:
        """Returns the bits of a weight with everything."""
        recipe = qtorch.uintx_weight_only(f"uint{bits}", group_size=group_size)
        rows = qtorch.quantize_(model, METHODS[method](recipe, *drawn), self.is_quantized).quantized
        return 8 * sum(row.bytes_after for row in rows) / sum(torch.Size(row.shape).numel() for row in rows)


class MiniLM(Task):
    configurations = ((4, 128), (3, 32), (2, 32))

    def __init__(self) -> None:
        from examples import sentence_model, sentence_pairs

        self.tools = sentence_model
        self.float = sentence_model.pretrained_encoder()
        self.pairs = sentence_pairs.docstring_pairs(4000, seed=1)
        judged = self.pairs[300:600]
        texts = [pair.query for pair in judged] + [pair.document for pair in judged]
        self.few = sentence_model.tokenized_batches(texts, 32)
        self.few_embeddings = sentence_model.embed(self.float, self.few)
        judged = self.pairs[-1000:]
        texts = [pair.query for pair in judged] + [pair.document for pair in judged]
        self.batches = sentence_model.tokenized_batches(texts, 32)
        self.embeddings = sentence_model.embed(self.float, self.batches)
        self.mrr = sentence_model.quality(self.embeddings, self.embeddings).mrr

    def model(self) -> nn.Module:
        return copy.deepcopy(self.float)

    def texts(self, seed: int) -> list[str]:
        chosen = self.pairs[:256]
        if seed:
            others = self.pairs[600:-1000]
            order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:256]
            chosen = [others[index] for index in order.tolist()]
        return [pair.document for pair in chosen]

    def data(self, seed: int) -> Drawn:
        batches = self.tools.tokenized_batches(self.texts(seed), 16)
        return [{"ids": batch.ids, "mask": batch.mask} for batch in batches], {"mask": lambda batch: batch["mask"]}

    def judge(self, model: nn.Module) -> dict[str, float]:
        cosine = self.tools.mean_cosine(self.tools.embed(model, self.few), self.few_embeddings)
        mrr = self.tools.quality(self.tools.embed(model, self.batches), self.embeddings).mrr
        return {"cosine": cosine, "mrr": mrr / self.mrr}


class MiniLMOnCode(MiniLM):
    """Calibrated on other text than it is judged on: source code."""

    configurations = ((3, 32),)

    def texts(self, seed: int) -> list[str]:
        from benchmarks.pretrain_llama import read_text

        code = bytes(read_text(None, limit=16 << 20).train.tolist()).decode(errors="replace")
        starts = torch.randint(len(code) - 500, (256,), generator=torch.Generator().manual_seed(seed)).tolist()
        return [code[start : start + 500] for start in starts]


class Llama(Task):
    configurations = ((3, 32), (2, 32))

    def __init__(self, path: Path) -> None:
        from benchmarks import pretrain_llama
        from tutorials import qat_llama

        self.run = run = qat_llama.Run()
        self.text = pretrain_llama.read_text(None, limit=64 << 20)
        torch.manual_seed(0)
        self.float = self.made()
        if path.exists():
            self.float.load_state_dict(torch.load(path, weights_only=True))
        else:
            self.train(self.float)
            torch.save(self.float.state_dict(), path)
        self.float.eval().requires_grad_(False)
        self.batches = self.text.validation_batches(run.batches, 2 * run.rows, run.length)
        self.logits = self._logits(self.float)

    def made(self) -> nn.Module:
        from benchmarks import pretrain_llama

        return pretrain_llama.make_model(self.run.size, self.run.length, extra_norms=False)

    def train(self, model: nn.Module) -> None:
        from tutorials import qat_llama

        run = self.run
        qat_llama.train(model, self.text, run, 0, run.steps, run.lr)
        qat_llama.train(model, self.text, run, run.steps, run.more_steps, run.more_lr)

    @torch.no_grad()
    def _logits(self, model: nn.Module) -> list[Tensor]:
        return [model(inputs).logits.flatten(0, 1).log_softmax(-1) for inputs, _ in self.batches]

    def model(self) -> nn.Module:
        return copy.deepcopy(self.float)

    def data(self, seed: int) -> Drawn:
        ids = self.text.batch(1000 + seed, 0, 128, self.run.length)[0]
        return [{"input_ids": part} for part in ids.split(8)], {}

    def judge(self, model: nn.Module) -> dict[str, float]:
        found = self._logits(model.eval())
        targets = [targets.flatten() for _, targets in self.batches]
        loss = sum(float(nn.functional.nll_loss(a, b)) for a, b in zip(found, targets, strict=True)) / len(targets)
        kl = [float((f.exp() * (f - q)).sum(-1).mean()) for f, q in zip(self.logits, found, strict=True)]
        return {"perplexity": math.exp(loss), "kl": sum(kl) / len(kl)}

    @staticmethod
    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "head" not in name

    def methods(self, asked: Iterable[str]) -> list[str]:
        found = [method for method in asked if method not in OF_EXPERTS]
        return [method for method in found if method not in PEERS or importable(method)]

    def quantize(self, model: nn.Module, method: str, bits: int, group_size: int, seed: int, drawn: Drawn) -> float:
        if method in PEERS:
            return PEERS[method][1](model, bits, group_size, drawn[0])
        total = super().quantize(model, method, bits, group_size, seed, drawn)
        if method in TRAINED:
            from tutorials import qat_llama

            first = 10_000 * (seed + 1)
            qat_llama.train(
                model.requires_grad_(True), self.text, self.run, first, self.run.more_steps, self.run.more_lr
            )
            qtorch.quantize_(model, qtorch.training.convert())
        return total


class ShortLlama(Llama):
    configurations = ((4, 32), (3, 32), (2, 32))

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.batches = self.batches[::6]
        self.logits = self._logits(self.float)

    def train(self, model: nn.Module) -> None:
        from tutorials import qat_llama

        qat_llama.train(model, self.text, self.run, 0, 250, self.run.lr)

    def data(self, seed: int) -> Drawn:
        batches, options = super().data(seed)
        return batches[:8], options


class Mixture(Llama):
    configurations = ((3, 32),)

    def made(self) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False}
        experts = {"num_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True, "router_aux_loss_coef": 0.01}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, use_cache=False, **sizes, **heads, **experts))

    def train(self, model: nn.Module) -> None:
        steps, peak = 500, 3e-3
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        for step in range(steps):
            warm, done = min(1.0, (step + 1) * 10 / steps), max(0.0, (step / steps - 0.1) / 0.9)
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * (0.525 + 0.475 * math.cos(math.pi * done))
            ids = self.text.batch(0, step, 16, self.run.length)[0]
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def data(self, seed: int) -> Drawn:
        ids = self.text.batch(1000 + seed, 0, 24, 32)[0]
        return [{"input_ids": part} for part in ids.split(8)], {}

    @staticmethod
    def is_quantized(module: nn.Module, name: str) -> bool:
        return "head" not in name

    def methods(self, asked: Iterable[str]) -> list[str]:
        return [method for method in asked if method not in (*TRAINED, *PEERS)]


TASKS: Mapping[str, Callable[[Path], Task]] = {
    "minilm": lambda folder: MiniLM(),
    "minilm on code": lambda folder: MiniLMOnCode(),
    "llama": lambda folder: Llama(folder / "llama.pt"),
    "short llama": lambda folder: ShortLlama(folder / "llama_250.pt"),
    "mixture": lambda folder: Mixture(folder / "mixture.pt"),
}


def rows(task: Task, methods: Iterable[str], seeds: int, only: Iterable[tuple[int, int]]) -> Iterable[dict[str, Any]]:
    """One row for each configuration, method and seed; methods without data have one seed."""
    yield {"method": "float", **task.judge(task.model())}
    for bits, group_size in only or task.configurations:
        for method in task.methods(methods):
            if method in VECTORS and bits != 2:
                continue
            for seed in range(1 if method in WITHOUT_DATA else seeds):
                model, drawn = task.model(), task.data(seed)
                begun = time.perf_counter()
                cpu = time.process_time()
                total = task.quantize(model, method, bits, group_size, seed, drawn)
                seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
                row = {"bits": bits, "group_size": group_size, "method": method, "seed": seed}
                yield {**row, "total_bits": total, "seconds": seconds, "cpu_seconds": cpu, **task.judge(model)}


def show(row: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *PEERS], default=[*METHODS, *PEERS])
    parser.add_argument("--only", nargs="+", default=[], metavar="BITS:GROUP", help="configurations, such as 3:32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the trained Llama is kept")
    parser.add_argument("--save", action="store_true", help="write results/calibration.json")
    args = parser.parse_args()
    only = [tuple(map(int, text.split(":"))) for text in args.only]
    path = RESULTS / "calibration.json"
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            task = TASKS[name](args.folder or Path(folder))
            for found in rows(task, args.methods, args.seeds, only):  # type: ignore[arg-type]
                row = {"model": name, **found}
                print(show(row), flush=True)
                if args.save:
                    merge(path, row)


def merge(path: Path, row: Mapping[str, Any]) -> None:
    """Put a row into the file, in the place of an older one of the same kind."""
    stored = json.loads(path.read_text()) if path.exists() else {"rows": []}
    keys = ("model", "bits", "group_size", "method", "seed")
    others = [old for old in stored["rows"] if any(old.get(key) != row.get(key) for key in keys)]
    path.write_text(json.dumps({"machine": machine(), "rows": [*others, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
