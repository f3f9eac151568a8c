"""Mixture-of-experts layers on the CPU: every implementation of transformers, float and quantized; a decoder of them.

`python -m benchmarks.bench_moe` (one thread; `--threads 2` for two); `--write-docs` writes the table into
docs/performance. The layer has the shape of Qwen3-MoE: 64 experts of 1024 -> 2 x 512 -> 1024, 8 for each
token, fp32. Tokens take turns among eight routings, so that the experts come from memory. Times are minima of
interleaved rounds, of one thread its own time on the processor, which others that run beside it do not count for;
ratios are to the fastest float implementation of the same run.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import RECIPES, machine, save, write_docs
from qtorch.recipes.base import WeightRecipe

EXPERTS, HIDDEN, INNER, CHOSEN, LAYERS = 64, 1024, 512, 8, 8
ROUTINGS = 8
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "qtorch")
PROJECTIONS = r".*experts\.(gate_up|down)_proj|(gate_up|down)_proj"


def config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
    )


def layer(recipe: WeightRecipe | None) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    module = Qwen3MoeExperts(config()).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.02)
    if recipe is not None:
        qtorch.quantize_(module, {PROJECTIONS: recipe})
    return module


def interleaved(candidates: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Least milliseconds of a call of each candidate, a function of the number of the call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, function in candidates.items():
            for call in range(ROUTINGS):
                start = clock()
                function(turn * ROUTINGS + call)
                if turn:  # the first is for warming up
                    times[name].append((clock() - start) * 1e3)
    return {name: min(values) for name, values in times.items()}


def layers(tokens: int, rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(tokens, HIDDEN)
    routings = [
        (torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)]), torch.rand(tokens, CHOSEN))
        for _ in range(ROUTINGS)
    ]
    modules = {name: layer(recipe) for name, recipe in RECIPES.items()}

    def call(name: str, implementation: str) -> Callable[[int], Tensor]:
        module = copy.copy(modules[name])
        module.config = copy.copy(module.config)
        module.config._experts_implementation = implementation
        return lambda number: module(x, *routings[number % ROUTINGS])

    # A copy of the weights for each token: gigabytes for many.
    implementations = [each for each in IMPLEMENTATIONS if tokens == 1 or each != "batched_mm"]
    candidates = {
        f"{name}|{implementation}": call(name, implementation)
        for name in RECIPES
        for implementation in implementations
        if name != "float" or implementation != "qtorch"
    }
    found = interleaved(candidates, rounds)
    best = min(value for key, value in found.items() if key.startswith("float|"))
    rows = []
    for key, value in found.items():
        name, implementation = key.split("|")
        rows.append({"tokens": tokens, "weights": name, "implementation": implementation, "ms": round(value, 2),
                     "of float": round(best / value, 2)})  # fmt: skip
    return rows


def decoder(rounds: int) -> list[dict[str, Any]]:
    """Decoding of one token, attention and head included, after 16."""
    from transformers import DynamicCache, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config()).eval().requires_grad_(False)
    models: dict[str, Any] = {}
    for name in ("float", "int8", "int4 g32"):
        recipe = RECIPES[name]
        models[name] = model
        if recipe is not None:
            models[name] = _quantized(model, recipe)
            models[name].set_experts_implementation("qtorch")
    ids = torch.randint(1024, (1, 16))

    def call(model: nn.Module, implementation: str | None = None) -> Callable[[int], Any]:
        cache = DynamicCache()
        model(ids, past_key_values=cache)

        def step(number: int) -> None:
            if implementation is not None:
                model.config._experts_implementation = implementation
            model(ids[:, number % 16 : number % 16 + 1], past_key_values=cache)
            cache.crop(-1)

        return step

    candidates = {
        "float|grouped_mm": call(models["float"], "grouped_mm"),
        "float|eager": call(models["float"], "eager"),
        **{f"{name}|qtorch": call(each) for name, each in models.items() if name != "float"},
    }
    found = interleaved(candidates, rounds)
    best = min(value for key, value in found.items() if key.startswith("float|"))
    return [
        {"tokens": "decoder, 1", "weights": key.split("|")[0], "implementation": key.split("|")[1],
         "ms": round(value, 2), "of float": round(best / value, 2)}
        for key, value in found.items()
    ]  # fmt: skip


def _quantized(model: Any, recipe: WeightRecipe) -> Any:
    """A quantized copy that shares what stays in floating point."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    qtorch.quantize_(twin, {PROJECTIONS: recipe, r".*_proj": recipe, "lm_head": recipe})
    return twin


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens | weights | eager | batched_mm | grouped_mm | qtorch | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Any, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tokens"], row["weights"]), {})[row["implementation"]] = row
    for (tokens, weights), found in groups.items():
        cells = [f"{found[each]['ms']:.2f}" if each in found else "" for each in IMPLEMENTATIONS]
        ratio = max(each["of float"] for each in found.values())
        lines.append(f"| {tokens} | {weights} | {' | '.join(cells)} | {ratio:.1f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--no-decoder", action="store_true")
    parser.add_argument("--write-docs", action="store_true", help="write the table into the page of results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    with torch.inference_mode():
        for tokens in arguments.tokens:
            rows += layers(tokens, arguments.rounds if tokens == 1 else max(1, arguments.rounds // 3))
            print(table(rows), flush=True)
        if not arguments.no_decoder:
            rows += decoder(arguments.rounds)
    about = machine()
    text = f"{about['processor']}, {about['threads']} thread(s), torch {about['torch']}; milliseconds:\n\n{table(rows)}"
    print(text)
    save(f"moe_{arguments.threads}", rows)
    if arguments.write_docs:
        write_docs(f"moe {arguments.threads}", text)


if __name__ == "__main__":
    main()
