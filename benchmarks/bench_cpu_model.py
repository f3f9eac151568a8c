"""Quantized models on this CPU against the float ones, eager and compiled: the sentence model of the demo, a decoder of
Llama's shape, one with a mixture of experts, and a vision transformer (`cpu_models.py`); torchao's and onnxruntime's
forms of them, where they can be imported and where onnxruntime takes the graph.

Figures are the float model's time divided by the candidate's, medians of interleaved turns: above 1 is faster than
float. Scores compare the outputs with those of the float model: the mean cosine of the output vectors, or the ratio of
perplexities on tokens that the float model sampled.

    python -m benchmarks.bench_cpu_model [--models sentence llama] [--dtype float32] [--small] [--save] [--write-docs]

It takes some fifteen minutes on two cores, half of them in the compiler.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import interleaved_medians, machine, machine_line, save, versions, write_docs
from benchmarks.cpu_models import COSINE, WORKLOADS, Workload
from qtorch.recipes.base import WeightRecipe

RECIPES: dict[str, WeightRecipe] = {
    "int8_weight_only()": qtorch.int8_weight_only(),
    "int4_weight_only(group_size=128)": qtorch.int4_weight_only(group_size=128),
    "int8_dynamic_activation_int8_weight()": qtorch.int8_dynamic_activation_int8_weight(),
}

TURN = 0.3
"""Seconds of a turn: a decoder writes several tokens one after the other."""

Row = dict[str, Any]
"""Of the saved table: what, mode, dtype, "float ms", the speed of each candidate by its name, and "scores", which has
(name of the score, value) for each candidate."""

ABOUT = ("what", "mode", "dtype", "scores")


def torchao_configs() -> dict[str, Any]:
    """Its counterparts of the recipes, by name; none where it is not installed."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    except ImportError:
        return {}
    return {
        "torchao int8 weight-only": Int8WeightOnlyConfig(),
        "torchao int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    }


def onnx_models(workload: Workload) -> dict[str, Callable[..., Tensor]]:
    """onnxruntime on the graph of the model: in fp32, and quantized by its `quantize_dynamic`; nothing where it is not
    installed, or for workloads without a graph in fp32."""
    if workload.example is None or any(p.dtype != torch.float32 for p in workload.model.parameters()):
        return {}
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (the exporter needs it)
        from onnxruntime import quantization
    except ImportError:
        return {}
    inputs, axes = workload.example
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            "onnxruntime float": Path(folder) / "float.onnx",
            "onnxruntime int8 dynamic": Path(folder) / "int8.onnx",
        }
        exported, quantized = paths.values()
        torch.onnx.export(workload.model, inputs, exported, dynamo=True, dynamic_shapes=axes, verbose=False)
        quantization.quantize_dynamic(exported, quantized, per_channel=True, weight_type=quantization.QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()

        def model(path: Path) -> Callable[..., Tensor]:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            names = [given.name for given in session.get_inputs()]

            def call(*tensors: Tensor) -> Tensor:
                (output,) = session.run(None, dict(zip(names, (each.numpy() for each in tensors), strict=True)))
                return torch.from_numpy(output)

            return call

        return {name: model(path) for name, path in paths.items()}


def candidates(workload: Workload, peers: bool) -> dict[str, Callable[..., Tensor]]:
    """The float model, quantized copies of it, and those of other packages, by name."""
    found: dict[str, Callable[..., Tensor]] = {"float": workload.model}
    for name, recipe in RECIPES.items():
        found[name] = made = copy.deepcopy(workload.model)
        qtorch.quantize_(made, recipe)
        workload.prepare(made)
    for name, config in (torchao_configs() if peers else {}).items():
        from torchao.quantization import quantize_

        found[name] = made = copy.deepcopy(workload.model)
        quantize_(made, config)
    return found | (onnx_models(workload) if peers else {})


@torch.no_grad()
def measure(
    make: Callable[[bool, torch.dtype], Workload], dtype: torch.dtype, options: argparse.Namespace
) -> list[Row]:
    """Rows of the table: speed relative to float, and scores."""
    workload = make(options.small, dtype)
    models = candidates(workload, options.peers)
    rows = []
    for mode in options.modes:
        for model in models.values() if mode == "compiled" else ():
            if isinstance(model, nn.Module):
                workload.compile(model)
        for what, run in workload.runs.items():
            calls = {name: functools.partial(run, model) for name, model in models.items()}
            scores = scores_of(workload, what, calls)
            times = interleaved_medians(calls, rounds=options.rounds, seconds=TURN)
            ratios = {name: times["float"] / time for name, time in times.items() if name != "float"}
            about = {"what": what, "mode": mode, "dtype": str(dtype).removeprefix("torch.")}
            rows.append({**about, "float ms": times["float"] / 1000, **ratios, "scores": scores})
            print(f"{what}, {mode}, {about['dtype']}: float {times['float'] / 1000:.1f} ms", flush=True)
            for name, ratio in ratios.items():
                print(f"  {name:46s}{ratio:9.2f}   {scores[name][0]} {scores[name][1]:.4f}", flush=True)
    return rows


def scores_of(workload: Workload, what: str, calls: dict[str, Callable[[], Tensor]]) -> dict[str, tuple[str, float]]:
    """(name, value) of the score of each candidate but "float"."""
    score = workload.scores.get(what, COSINE)
    of_float = calls["float"]().clone()
    return {name: (score.name, score.of(call(), of_float)) for name, call in calls.items() if name != "float"}


def markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """The machine, and two tables with a row for each candidate: of speed, with a column for each workload, mode and
    dtype, and of scores in the first mode."""
    names = list(dict.fromkeys(key for row in rows for key in row if key not in ABOUT))
    heads = [f"{row['what']}, {row['mode']}, {row['dtype']}" for row in rows]
    speeds = [[_shown(name), *(_figure(row, name) for row in rows)] for name in names]
    scored = [row for row in rows if row["mode"] == rows[0]["mode"]]
    scores = [
        [_shown(name), *("" if name not in row["scores"] else f"{row['scores'][name][1]:.4f}" for row in scored)]
        for name in names
        if name != "float ms"
    ]
    kinds = [f"{row['what']}, {row['dtype']}: {next(iter(row['scores'].values()))[0]}" for row in scored]
    return f"{machine_line(about)}.\n\n{_table(heads, speeds)}\n\n{_table(kinds, scores)}"


def _shown(name: str) -> str:
    return f"`{name}`" if name in RECIPES else name


def _figure(row: Row, name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]:.1f}" if name == "float ms" else f"{row[name]:.2f}"


def _table(heads: list[str], lines: list[list[str]]) -> str:
    shown = [f"| | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    return "\n".join([*shown, *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without torchao and onnxruntime")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_model.json")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # one graph for each candidate and number of tokens
    about = machine() | (versions() if options.peers else {})
    print(machine_line(about))
    rows = []
    for name, dtype in itertools.product(options.models, options.dtype):
        rows += measure(WORKLOADS[name], getattr(torch, dtype), options)
    if options.save:
        save("cpu_model", rows, about)
    if options.write_docs:
        write_docs("cpu_model", markdown(about, rows))


if __name__ == "__main__":
    main()
