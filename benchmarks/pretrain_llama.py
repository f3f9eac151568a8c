"""Pre-train a Llama (transformers' implementation) on real text in any training recipe, with any of our optimizers, and
compare the loss curves.

The text is, by default, the source of Python's standard library, read as bytes; or any text file or folder. Batches
depend on the seed and the step alone, so that every recipe sees the same ones.

    python -m benchmarks.pretrain_llama --recipe int8_mixed_precision [--size 2M] [--steps 600] [--resume]
    python -m benchmarks.pretrain_llama --optimizer adamw_8bit [--seed 1]
    python -m benchmarks.pretrain_llama --plot curves.png             of all runs in benchmarks/results/pretrain_llama
    torchrun --nproc-per-node=8 -m benchmarks.pretrain_llama ...      sharded by FSDP2: see docs/guides/scaling.md

Each run writes a CSV: step, tokens, training loss, validation loss, tokens a second, peak memory in MB.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import math
import resource
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import RESULTS
from benchmarks.ranks import Ranks
from qtorch import PerBlock, PerGroup, QuantSpec, float8_weight_only, nvfp4_weight_only
from qtorch.primitives import MappingType, Rounding, ZeroPointDomain, qdtype
from qtorch.recipes.base import Recipe
from qtorch.training import (
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    CPUOffloadOptimizer,
    Int8MixedPrecisionTrainingConfig,
    Muon8bit,
    QGaLoreAdamW8bit,
    binary_training,
    bitnet_training,
    float8_training,
    fully_quantized,
    int4_training,
    int4_weight_only_quantized_training,
    int8_mixed_precision_training,
    int8_tilewise_training,
    int8_weight_only_quantized_training,
    mixed_precision_training,
    mxfp4_training,
    mxfp8_training,
    nvfp4_training,
    precompute_scales_for_fsdp,
    save_in_codes,
    switchback_training,
    weight_only_quantized_training,
)

OUTPUT = RESULTS / "pretrain_llama"

SAVED: dict[str, contextlib.AbstractContextManager[Any]] = {
    "floats": contextlib.nullcontext(),
    "int8": save_in_codes(),
    "int4": save_in_codes(
        QuantSpec(
            qdtype("uint4"),
            PerGroup(32),
            mapping=MappingType.ASYMMETRIC,
            zero_point_domain=ZeroPointDomain.OFFSET,
            rounding=Rounding.STOCHASTIC,
        )
    ),
}
"""What is kept of activations for the backward."""

SIZES = {  # hidden size, intermediate size, layers, heads
    "100k": (64, 176, 2, 2),
    "1M": (128, 352, 5, 4),
    "2M": (192, 512, 5, 6),
    "8M": (320, 864, 7, 5),
    "30M": (512, 1376, 10, 8),
    "100M": (768, 2048, 14, 12),
    "350M": (1024, 2816, 28, 16),
    "1B": (2048, 5632, 20, 16),
}

RECIPES: dict[str, Recipe | None] = {
    "float": None,
    "int8_mixed_precision": int8_mixed_precision_training(),
    "int8_output_grad_input": int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(grad_weight=False)),
    "int4_forward": mixed_precision_training(fully_quantized(fwd_bits=4, bwd_bits=8)),
    "switchback": switchback_training(),
    "int8_tilewise": int8_tilewise_training(),
    "float8_rowwise": float8_training("rowwise"),
    "float8_tensorwise": float8_training("tensorwise"),
    "float8_blockwise": float8_training(PerBlock((64, 64))),  # 64 divides the sizes of the models, 128 does not
    "mxfp8": mxfp8_training(),
    "nvfp4": nvfp4_training(),
    "nvfp4_ms_eden": nvfp4_training(ms_eden=True),
    "mxfp4": mxfp4_training(),
    "int8_weights": int8_weight_only_quantized_training(),
    "int8_weights_nearest": int8_weight_only_quantized_training(stochastic_rounding=False),
    "int4_weights": int4_weight_only_quantized_training(),
    "float8_weights": weight_only_quantized_training(float8_weight_only()),
    "float8_weights_nearest": weight_only_quantized_training(float8_weight_only(), stochastic_rounding=False),
    "nvfp4_weights": weight_only_quantized_training(nvfp4_weight_only()),
    "bitnet": bitnet_training(),
    "int4": int4_training(),
    "binary": binary_training(),
}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_8bit": AdamW8bit,
    "adamw_4bit": AdamW4bit,
    "adamw_fp8": AdamWFp8,
    "adamw_8bit_offloaded": functools.partial(CPUOffloadOptimizer, optimizer_class=AdamW8bit),
}


def qgalore(parameters: Iterable[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """Q-GaLore for the matrices of the blocks, of rank a quarter of their shorter side; the rest by AdamW8bit."""
    ranks: dict[int | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        # The embedding and the head have the 256 symbols of bytes on one side.
        inner = parameter.dim() == 2 and 256 not in parameter.shape
        ranks.setdefault(min(parameter.shape) // 4 if inner else None, []).append(parameter)
    groups = [{"params": params, "rank": rank} for rank, params in ranks.items()]
    return QGaLoreAdamW8bit(groups, scale=1.0, update_proj_gap=50, **arguments)


def muon(parameters: Iterable[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, with steps of AdamW's size; the rest by AdamW8bit."""
    parameters = list(parameters)
    inner = [p.dim() == 2 and 256 not in p.shape for p in parameters]
    matrices, others = (
        [p for p, kind in zip(parameters, inner, strict=True) if kind == want] for want in (True, False)
    )
    groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    return Muon8bit(groups, adjust_lr_fn="match_rms_adamw", **arguments)


OPTIMIZERS |= {"qgalore": qgalore, "muon_8bit": muon, "muon_8bit_ns_int8": functools.partial(muon, ns_int8=True)}


@dataclass
class Text:
    """Bytes to train on, and others, from other files where there are several, to validate on."""

    train: Tensor
    validation: Tensor

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both (rows, length)."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _windows(self.train, torch.randint(len(self.train) - length - 1, (rows,), generator=generator), length)

    def validation_batches(self, count: int, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        starts = torch.linspace(0, len(self.validation) - length - 1, count * rows).long()
        return [_windows(self.validation, part, length) for part in starts.split(rows)]


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def read_text(path: str | None, limit: int = 64 << 20) -> Text:
    """A file, or the files of a folder (``*.py`` and ``*.txt``), at most `limit` bytes; every twentieth file, or the
    last twentieth of a single one, is for validation."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        data = root.read_bytes()[:limit]
        cut = len(data) * 19 // 20
        return Text(_tensor(data[:cut]), _tensor(data[cut:]))
    files = [f for f in sorted(root.rglob("*")) if f.suffix in (".py", ".txt") and "site-packages" not in f.parts]
    if not files:
        raise SystemExit(f"no .py or .txt file in {root}")
    train, validation = bytearray(), bytearray()
    for i, file in enumerate(files):
        (validation if i % 20 == 7 else train).extend(file.read_bytes())
        if len(train) > limit:
            break
    return Text(_tensor(bytes(train)), _tensor(bytes(validation)))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Normalized(nn.Module):
    """A linear layer with an RMSNorm before it."""

    def __init__(self, linear: nn.Linear, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(linear.in_features, eps)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def make_model(size: str, length: int, extra_norms: bool) -> nn.Module:
    """`extra_norms`: an RMSNorm before each linear layer instead of those before attention and MLP, as BitNet wants."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    if extra_norms:
        for layer in model.model.layers:
            layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
            for block in (layer.self_attn, layer.mlp):
                for name, child in list(block.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(block, name, Normalized(child, config.rms_norm_eps))
    return model


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def peak_memory(device: str) -> float:
    """MB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Run:
    """One training run and its files. Each of several processes has `options.batch` rows of a batch."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        name = options.name or options.recipe + ("_extra_norms" if options.extra_norms else "")
        if not options.name and options.optimizer != "adamw":
            name = options.optimizer if options.recipe == "float" else f"{name}_{options.optimizer}"
        if not options.name and options.seed:
            name += f"_seed{options.seed}"
        if not options.name and options.saved != "floats":
            name += f"_saved_{options.saved}"
        output = Path(options.output)
        output.mkdir(parents=True, exist_ok=True)
        self.csv = output / f"{name}.csv"
        self.checkpoint = Path(options.checkpoint) if options.checkpoint else None
        torch.manual_seed(options.seed)
        self.text = read_text(options.data)
        self.rows_a_step = options.batch * ranks.count
        self.validation = self.text.validation_batches(options.validation_batches, self.rows_a_step, options.length)
        model: Any = make_model(options.size, options.length, options.extra_norms or options.recipe == "bitnet")
        self.model = model.to(options.device, getattr(torch, options.dtype))
        self.parameters = sum(p.numel() for p in model.parameters())
        if (recipe := RECIPES[options.recipe]) is not None:
            qtorch.quantize_(
                self.model, recipe, lambda module, name: isinstance(module, nn.Linear) and "head" not in name
            )
        if ranks.sharded:
            ranks.shard(self.model, model.model.layers, getattr(torch, options.gather_dtype))
        self.optimizer: Any = OPTIMIZERS[options.optimizer](
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.forward = torch.compile(self.model) if options.compile else self.model
        self.step = 0
        self.rows: list[dict[str, Any]] = []

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of the rows of this process."""
        device = self.options.device
        inputs, targets = self.ranks.part(inputs), self.ranks.part(targets)
        autocast = torch.autocast(device, torch.bfloat16) if self.options.autocast else contextlib.nullcontext()
        with autocast, SAVED[self.options.saved]:
            logits = self.forward(input_ids=inputs.to(device)).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        losses = [self.ranks.mean(self.loss(*batch).item()) for batch in self.validation]
        self.model.train()
        return sum(losses) / len(losses)

    def save(self) -> None:
        if self.checkpoint is None:
            return
        rest = {"step": self.step, "random": torch.get_rng_state(), "rows": self.rows}
        if self.ranks.sharded or self.checkpoint.is_dir():
            self.ranks.save(self.checkpoint, self.model, self.optimizer, rest)
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **rest}
        torch.save(state, self.checkpoint)

    def resume(self) -> None:
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        if self.checkpoint.is_dir():  # of any number of processes
            state = self.ranks.load(self.checkpoint, self.model, self.optimizer)
        else:
            state = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows = state["step"], state["rows"]
        torch.set_rng_state(state["random"])

    def train(self) -> None:
        options = self.options
        tokens_a_step = self.rows_a_step * options.length
        mark, since, total = time.perf_counter(), 0, 0.0
        self.model.train()
        while self.step < options.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, options)
            loss = self.loss(*self.text.batch(options.seed, self.step, self.rows_a_step, options.length))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            precompute_scales_for_fsdp(self.model)
            self.step, since, total = self.step + 1, since + 1, total + self.ranks.mean(loss.item())
            if self.step % options.log_every and self.step != options.steps:
                continue
            seconds = time.perf_counter() - mark
            due = self.step % options.validate_every == 0 or self.step == options.steps
            row = {
                "step": self.step,
                "tokens": self.step * tokens_a_step,
                "train_loss": round(total / since, 5),
                "val_loss": round(self.validate(), 5) if due else "",
                "tokens_per_s": round(since * tokens_a_step / seconds),
                "peak_memory_mb": round(peak_memory(options.device)),
            }
            self.rows.append(row)
            if self.ranks.is_first:
                said = (f"{key} {value}" for key, value in row.items() if value != "")
                print(f"{options.recipe:24s}", *said, flush=True)
                self.write()
            if due:
                self.save()
            mark, since, total = time.perf_counter(), 0, 0.0

    def write(self) -> None:
        with self.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def read_runs() -> dict[str, list[dict[str, str]]]:
    """Rows of the CSV files, by name of the run."""
    runs = {}
    for path in sorted(OUTPUT.glob("*.csv")):
        with path.open() as file:
            runs[path.stem] = list(csv.DictReader(file))
    return runs


TWINS = {"bitnet": "float_extra_norms"}
"""What a run is compared with, if not with `float`."""


def table() -> str:
    """Markdown: the final validation loss of each run, averaged over its seeds, and its distance from the float twin of
    the same seed: the mean, and the smallest and the largest."""
    final: dict[str, dict[str, float]] = {}
    for name, rows in read_runs().items():
        run, _, seed = name.partition("_seed")
        if rows[-1]["val_loss"]:
            final.setdefault(run, {})[seed] = float(rows[-1]["val_loss"])
    lines = ["| run | seeds | validation loss | against its float twin |", "|---|---|---|---|"]
    for run, losses in sorted(final.items(), key=lambda item: mean(item[1].values())):
        twin = final.get(TWINS.get(run, "float"), {})
        gaps = [loss / twin[seed] - 1 for seed, loss in losses.items() if seed in twin and run != "float"]
        text = f"{mean(gaps):+.2%}" if gaps else ""
        if len(gaps) > 1:
            text += f" ({min(gaps):+.2%} to {max(gaps):+.2%})"
        lines.append(f"| {run} | {len(losses)} | {mean(losses.values()):.4f} | {text} |")
    return "\n".join(lines)


def plot(path: str) -> None:
    """Validation loss against step, and its ratio to that of the float twin, of each recipe with seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = {
        name: {int(row["step"]): float(row["val_loss"]) for row in rows if row["val_loss"]}
        for name, rows in read_runs().items()
        if "_seed" not in name and not name.endswith(tuple(OPTIMIZERS))
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for i, (name, losses) in enumerate(runs.items()):
        style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "linewidth": 1.1, "label": name}
        left.plot(list(losses), list(losses.values()), **style)
        twin = runs.get(TWINS.get(name, "float"), {})
        both = [step for step in losses if step in twin and step > max(losses) // 6]
        right.plot(both, [100 * (losses[step] / twin[step] - 1) for step in both], **style)
    left.set(xlabel="step", ylabel="validation loss, nats a byte", yscale="log")
    right.set(xlabel="step", ylabel="validation loss against the float twin, %")
    right.axhline(0, color="black", linewidth=0.5)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="float")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--size", choices=SIZES, default="2M")
    parser.add_argument("--extra-norms", action="store_true", help="BitNet's norms (always there for bitnet)")
    parser.add_argument("--data", help="a text file or a folder; default: the standard library's source")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, of each process under torchrun")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--autocast", action="store_true", help="bf16 autocast")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--saved", choices=SAVED, default="floats", help="what the backward keeps of the activations")
    parser.add_argument(
        "--gather-dtype", default="float32", choices=["float32", "bfloat16"], help="of floats that FSDP2 gathers"
    )
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--validation-batches", type=int, default=32)
    parser.add_argument("--checkpoint", help="file to save to after each validation, under torchrun a folder")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint, if it is there")
    parser.add_argument("--name", help="of the CSV file; default: the recipe and the optimizer")
    parser.add_argument("--output", default=OUTPUT, help="folder of the CSV file")
    parser.add_argument("--plot", metavar="PNG", help="plot all runs and print their table; train nothing")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        print(table())
        return
    with Ranks.of_this_run(options.device) as ranks:
        run = Run(options, ranks)
        if ranks.is_first:
            print(f"{options.recipe}: {run.parameters:,} parameters, {len(run.text.train):,} bytes of text", flush=True)
        if options.resume:
            run.resume()
        run.train()


if __name__ == "__main__":
    main()
