"""All GPU benchmarks in one run of less than 8 minutes, correctness first.

    python -m benchmarks.gpu_suite [--only int8_mm ...] [--autotune FILE] [--compile] [--out FOLDER] [--write-docs]

Writes gpu_suite.json and gpu_suite.csv into --out (benchmarks/results), and with --write-docs a table into
docs/performance. --autotune first tunes the launch configurations on the shapes measured (minutes more) and
saves them as a table for `qtorch/kernels/cuda/configs`. On a machine without a GPU everything runs small in Triton's
interpreter, nothing is timed or written, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import (
    bench_decode,
    bench_float8,
    bench_int4_mm,
    bench_int8_linear_training,
    bench_int8_mm,
    bench_quantize,
    gpu_checks,
)
from benchmarks.common import write_docs
from benchmarks.gpu import ON_GPU, Row, report, versions
from qtorch.kernels import autotune

ROOT = Path(__file__).parent.parent

BENCHES: dict[str, Callable[[], list[Row]]] = {
    "int8_mm": bench_int8_mm.run,
    "int4_mm": bench_int4_mm.run,
    "int8_linear_training": bench_int8_linear_training.run,
    "quantize": bench_quantize.run,
    "float8": bench_float8.run,
    "decode": bench_decode.run,
}

SECONDS = 470
"""After so long no further benchmark begins."""

TARGETS = {
    ("int8_mm", 4096, 4096, "int8_scaled_mm"): 1.40,
    ("int8_mm", 8192, 8192, "int8_scaled_mm"): 1.47,
    ("int8_mm", 4096, 4096, "dynamic linear"): 1.30,
    ("int8_mm", 8192, 8192, "dynamic linear"): 1.40,
    ("int8_linear_training", 4096, 4096, "int8"): 1.20,
    ("int8_linear_training", 8192, 8192, "int8"): 1.30,
    ("int4_mm", 1, 4096, "int4"): 2.3,
    ("int4_mm", 1, 8192, "int4"): 2.6,
    ("int4_mm", 1, 16384, "int4"): 3.0,
    ("int4_mm", 256, 4096, "int4"): 0.85,
    ("int4_mm", 1024, 4096, "int4"): 0.85,
    ("int4_mm", 4096, 4096, "int4"): 0.85,
    ("int4_mm", 1, 4096, "int8"): 1.6,
    ("float8", 4096, 4096, "rows, linear"): 1.35,
    ("float8", 8192, 8192, "rows, linear"): 1.35,
    ("decode", 1, 4096, "int4 g64"): 1.9,
    ("decode", 1, 4096, "int8"): 1.6,
}
"""Least ratio to bf16 by (bench, m, k, what)."""

AGAINST_TINYGEMM = {1: 1.0, 16: 1.3, 128: 3.0}
"""Least speed of int4 relative to tinygemm by number of rows, 4096 x 4096."""


def verdicts(rows: list[Row]) -> list[str]:
    """Each target that was measured: reached or missed."""
    found = {
        (r.bench, r.m, r.k, r.what): r for r in rows if r.ratio is not None and (r.n == r.k or r.bench == "decode")
    }
    lines = []
    for key, target in TARGETS.items():
        if (row := found.get(key)) is not None and row.ratio is not None:
            bench, m, k, what = key
            word = "reached" if row.ratio >= target else "MISSED"
            lines.append(f"{word}: {bench} {m} rows, {k}: {what} {row.ratio:.2f} of bf16, target {target:.2f}")
    for m, target in AGAINST_TINYGEMM.items():
        ours, theirs = (found.get(("int4_mm", m, 4096, what)) for what in ("int4", "tinygemm"))
        if ours is not None and theirs is not None and ours.us and theirs.us:
            ratio = theirs.us / ours.us
            word = "reached" if ratio >= target else "MISSED"
            lines.append(f"{word}: int4_mm {m} rows, 4096: int4 {ratio:.2f} of tinygemm, target {target:.2f}")
    compiled, ours = (found.get(("int8_mm", 4096, 4096, w)) for w in ("compiled _int_mm", "int8_scaled_mm"))
    if compiled is not None and ours is not None and compiled.us and ours.us:
        word = "reached" if compiled.us >= ours.us else "MISSED"
        lines.append(f"{word}: int8_mm 4096: {compiled.us / ours.us:.2f} of compiled _int_mm, target 1.00")
    return lines


def markdown(rows: list[Row]) -> str:
    """A table for each benchmark: microseconds of its baseline, ratios of the others."""
    about = versions()
    head = f"`python -m benchmarks.gpu_suite`, {about['date']}, one {about['gpu']}, torch {about['torch']}, triton"
    parts = [
        f"{head} {about['triton']}. Medians of CUDA-graph replays; weights rotate past the L2 cache; random inputs."
    ]
    for bench in dict.fromkeys(row.bench for row in rows):
        mine = [row for row in rows if row.bench == bench and row.us is not None]
        names = list(dict.fromkeys(row.what for row in mine))
        if not names:
            continue
        base = names[0]
        parts.append(
            f"\n## {bench}\n\n| m x n x k | {base}, us | {' | '.join(names[1:])} |\n|{'---|' * (len(names) + 1)}"
        )
        for shape in dict.fromkeys((row.m, row.n, row.k) for row in mine):
            by_name = {row.what: row for row in mine if (row.m, row.n, row.k) == shape}
            cells = [f"{by_name[n].ratio:.2f}" if n in by_name and by_name[n].ratio else "" for n in names[1:]]
            first = f"{by_name[base].us:.1f}" if base in by_name else ""
            parts.append(f"| {' x '.join(map(str, shape))} | {first} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n\n" + "\n".join(f"- {line}" for line in verdicts(rows)) + "\n"


def write(rows: list[Row], folder: Path, docs: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": versions(), "rows": [row._asdict() for row in rows]}
    (folder / "gpu_suite.json").write_text(json.dumps(content, indent=1) + "\n")
    with (folder / "gpu_suite.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Row._fields, *versions()])
        writer.writerows([*row, *versions().values()] for row in rows)
    (folder / "gpu_suite.md").write_text(markdown(rows))
    if docs:
        write_docs("gpu_suite", markdown(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--no-checks", action="store_true", help="measure without checking the results first")
    parser.add_argument("--autotune", metavar="FILE", help="tune first, and save the configurations in this table")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the decoder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--write-docs", action="store_true", help="write the tables into docs/performance")
    options = parser.parse_args()
    start = time.monotonic()
    if not ON_GPU:
        print("There is no GPU: everything runs once, small, in Triton's interpreter; nothing is timed.")
    failed = [] if options.no_checks else gpu_checks.run()
    if options.compile:
        BENCHES["decode"] = lambda: bench_decode.run(compiled=True)
    rows: list[Row] = []
    # Tuning happens at the first call of a kernel with a shape, before its graph is captured.
    with autotune(options.autotune) if options.autotune and ON_GPU else contextlib.nullcontext():
        for name in options.only:
            if ON_GPU and not options.autotune and time.monotonic() - start > SECONDS:
                print(f"{name}: left out, {SECONDS} s are over")
                continue
            began = time.monotonic()
            found = BENCHES[name]()
            report(found)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            rows += found
            if ON_GPU:
                write(rows, options.out, options.write_docs)
                torch.cuda.empty_cache()
    print("\n".join(verdicts(rows)))
    print(f"{time.monotonic() - start:.0f} s; {len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
