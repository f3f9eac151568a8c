"""Quantized layers on this CPU against the float layer, eager: compiled kernels, without a compiler, and, with --peers,
the layers of other engines that can be imported (`peers.py`).

Weights rotate through 100 MB, so that they come from memory as they do in a model. Figures are the float layer's time
divided by the candidate's, medians of interleaved turns: above 1 is faster than float. The best peer of a layer is the
fastest of equal or lower precision: weights of as many bits, groups at least as large, activations of as many bits or
fewer.

    python -m benchmarks.bench_cpu_linear --peers [--threads 2] [--quick] [--save] [--write-docs]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import instruction_set, interleaved_medians, machine, machine_line, save, versions, write_docs
from benchmarks.peers import FLOATING, PEERS, ROW, Precision, found, share_threads
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import WeightRecipe

FOOTPRINT = 100 << 20

MOST_COPIES = 96
"""Of a layer: other engines take tens of milliseconds to make one."""

RECIPES: dict[str, tuple[WeightRecipe, Precision]] = {
    "int8_weight_only()": (qtorch.int8_weight_only(), Precision(8, ROW, FLOATING)),
    "int4_weight_only(group_size=128)": (qtorch.int4_weight_only(group_size=128), Precision(4, 128, FLOATING)),
    "int4_weight_only(group_size=32)": (qtorch.int4_weight_only(group_size=32), Precision(4, 32, FLOATING)),
    "int8_dynamic_activation_int8_weight()": (
        qtorch.int8_dynamic_activation_int8_weight(),
        Precision(8, ROW, 8),
    ),
    "int8_dynamic_activation_int4_weight()": (
        qtorch.int8_dynamic_activation_int4_weight(),
        Precision(4, 32, 8),
    ),
    "int8_dynamic_activation_int4_weight(group_size=128)": (
        qtorch.int8_dynamic_activation_int4_weight(group_size=128),
        Precision(4, 128, 8),
    ),
    "nf4_weight_only()": (qtorch.nf4_weight_only(), Precision(4, 64, FLOATING)),
    "lut_weight_only(3)": (qtorch.lut_weight_only(3), Precision(3, ROW, FLOATING)),
    "lut_weight_only(4, 64)": (qtorch.lut_weight_only(4, group_size=64), Precision(4, 64, FLOATING)),
    "mxfp4_weight_only()": (qtorch.mxfp4_weight_only(), Precision(4, 32, FLOATING)),
    "nvfp4_weight_only()": (qtorch.nvfp4_weight_only(), Precision(4, 16, FLOATING)),
    "fpx_weight_only(3, 2)": (qtorch.fpx_weight_only(3, 2), Precision(6, ROW, FLOATING)),
    "float8_weight_only()": (qtorch.float8_weight_only(), Precision(8, ROW, FLOATING)),
}

NO_COMPILER = ", no compiler"

Row = dict[str, Any]
"""Of the saved table: shape, rows, dtype, "float us", the speed of each candidate by its name, and "best peer", which
has (name, speed) for each recipe that has one."""


def turns(layers: list[nn.Module], x: Tensor, compiled: bool = True) -> Callable[[], Tensor]:
    """Call the layers one after the other, with or without the compiled kernels."""

    def call(layer: nn.Module) -> Tensor:
        with contextlib.nullcontext() if compiled else compiled_library.use(None):
            return layer(x)

    return in_turn([functools.partial(call, layer) for layer in layers])


def in_turn(calls: list[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """Make the calls one after the other. Each is made once before, because engines prepare at the first."""
    for call in calls:
        call()
    cycle = itertools.cycle(calls)
    return lambda: next(cycle)()


def number_of_copies(size: int) -> int:
    """Of a weight of this many bytes."""
    return min(MOST_COPIES, max(2, FOOTPRINT // size))


def copies(layer: nn.Module, size: int) -> list[nn.Module]:
    return [copy.deepcopy(layer) for _ in range(number_of_copies(size))]


@torch.no_grad()
def measure(n: int, k: int, dtype: torch.dtype, options: argparse.Namespace) -> list[Row]:
    """Rows of the table: speed relative to float."""
    layer = nn.Linear(k, n, bias=False, dtype=dtype)
    layers = {"float": copies(layer, layer.weight.nbytes)}
    for name, (recipe, _) in RECIPES.items():
        quantized = copy.deepcopy(layer)
        qtorch.quantize_(quantized, recipe)
        layers[name] = copies(quantized, quantized.weight.nbytes)
    peers = found(dtype) if options.peers else []
    theirs = {
        peer.name: peer.build(layer.weight.detach(), number_of_copies(n * k * peer.precision.weight // 8))
        for peer in peers
    }
    table = []
    for m in options.rows:
        x = torch.randn(m, k, dtype=dtype)
        calls = {name: turns(made, x) for name, made in layers.items()}
        if f"{n}x{k}" in options.fallback:
            calls |= {f"{name}{NO_COMPILER}": turns(layers[name], x, False) for name in RECIPES}
        calls |= {name: in_turn([layer(x) for layer in made]) for name, made in theirs.items()}
        times = interleaved_medians(calls, rounds=options.rounds, seconds=options.seconds)
        speeds = {name: times["float"] / time for name, time in times.items() if name != "float"}
        about = {"shape": [n, k], "rows": m, "dtype": str(dtype), "float us": times["float"]}
        table.append({**about, **speeds, "best peer": best_peers(speeds)})
    return table


def best_peers(speeds: dict[str, float]) -> dict[str, tuple[str, float]]:
    """(name, speed) of the fastest peer of equal or lower precision, for each recipe that has one."""
    best = {}
    for name, (_, precision) in RECIPES.items():
        peers = {peer: speeds[peer] for peer in PEERS if peer in speeds and precision.covers(PEERS[peer].precision)}
        if peers:
            peer = max(peers, key=peers.__getitem__)
            best[name] = (peer, peers[peer])
    return best


def markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """The machine; a table for each shape, with a column for each dtype and number of rows; how many figures are below
    float, or below their best peer."""
    parts = [f"{machine_line(about)}."]
    for shape, of_shape in itertools.groupby(rows, key=lambda row: tuple(row["shape"])):
        parts.append(f"{shape[0]} x {shape[1]}:\n\n{_table(list(of_shape))}")
    return "\n\n".join([*parts, _slower(rows)])


def _dtype(row: Row) -> str:
    return {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[row["dtype"]]


def _table(rows: list[Row]) -> str:
    heads = ["input, rows"]
    for dtype, of_dtype in itertools.groupby(rows, key=_dtype):
        first, *others = (str(row["rows"]) for row in of_dtype)
        heads += [f"{dtype}, {first}", *others]
    lines = [["float, us", *(f"{row['float us']:.0f}" for row in rows)]]
    peers: dict[str, list[str]] = {}  # their figures -> the recipes that they are compared with
    for name in (name for name in RECIPES if name in rows[0]):
        lines.append([f"`{name}`", *(f"{row[name]:.2f}" for row in rows)])
        best = [row["best peer"].get(name) for row in rows]
        if any(best):
            figures = " | ".join(f"{found[1]:.2f} {found[0]}" if found else "" for found in best)
            peers.setdefault(figures, []).append(name.partition("_weight")[0].rpartition("_")[2])
    for figures, weights in peers.items():
        lines.append([f"best peer of {', '.join(dict.fromkeys(weights))}", figures])
    for name in (name for name in RECIPES if f"{name}{NO_COMPILER}" in rows[0]):
        lines.append([f"`{name}`{NO_COMPILER}", *(f"{row[name + NO_COMPILER]:.2f}" for row in rows)])
    head, *body = (f"| {' | '.join(line)} |" for line in [heads, *lines])
    return "\n".join([head, f"|{'---|' * len(heads)}", *body])


def _slower(rows: list[Row]) -> str:
    """How many figures are below float, and how many below the best peer."""
    cells = [(row[name], row["best peer"].get(name, ("", 0.0))[1]) for row in rows for name in RECIPES if name in row]
    of_float, of_peers = sum(own < 1 for own, _ in cells), sum(own < theirs for own, theirs in cells)
    return f"Of {len(cells)} figures {of_float} are below float (1.00) and {of_peers} below the best peer."


QUICK = {"shapes": ["1024x1024"], "rows": [1, 16], "fallback": [], "rounds": 3, "seconds": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n    ")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["1024x1024", "2880x2880", "4096x4096", "4096x14336"]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="out x in")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every engine")
    parser.add_argument("--peers", action="store_true", help="measure onnxruntime, OpenVINO and torchao too")
    parser.add_argument(
        "--fallback", nargs="*", default=["4096x4096"], help="shapes to measure the kernels made of torch operators on"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="one small shape, two numbers of rows, short turns")
    parser.add_argument(
        "--machine", help="name in cpu_linear_NAME, of results and marks; by default the instruction set"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_linear_NAME.json")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance")
    options = parser.parse_args()
    vars(options).update(QUICK if options.quick else {})
    warnings.filterwarnings("ignore", module="torchao")
    torch.set_num_threads(options.threads)
    if options.peers and importlib.util.find_spec("onnxruntime"):
        share_threads()
    about = machine() | (versions() if options.peers else {})
    print(machine_line(about), instruction_set())
    rows: list[Row] = []
    for shape, dtype in itertools.product(options.shapes, options.dtype):
        n, k = map(int, shape.split("x"))
        rows += measure(n, k, getattr(torch, dtype), options)
        last = rows[-len(options.rows) :]
        print(f"{shape} {dtype:46s}" + "".join(f"{row['rows']:>9d}" for row in last))
        for name in [key for key in last[0] if key not in ("shape", "rows", "dtype", "best peer")]:
            print(f"  {name:54s}" + "".join(f"{row[name]:9.2f}" for row in last), flush=True)
    print(_slower(rows))
    name = f"cpu_linear_{options.machine or instruction_set()}"
    if options.save:
        save(name, rows, about)
    if options.write_docs:
        write_docs(name, markdown(about, rows))


if __name__ == "__main__":
    main()
