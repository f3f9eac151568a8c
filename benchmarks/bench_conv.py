"""Networks of convolutions on this CPU: 224x224, one image, against torch and ONNX Runtime, in one interleaved run.

    python -m benchmarks.bench_conv [--nets resnet18 mobilenet] [--threads 1 2] [--rounds 15] [--save] [--write-docs]

Figures are milliseconds, the fastest call of interleaved turns, and speeds relative to the faster of torch's formats.
ONNX Runtime quantizes the same network itself, statically: unsigned activations, signed weights per channel.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import machine, save, write_docs
from benchmarks.conv_nets import MobileNetV2, ResNet18
from qtorch.calibration import observed
from qtorch.primitives.granularity import PerAxis

NETS: dict[str, Callable[[], nn.Module]] = {"resnet18": ResNet18, "mobilenet": MobileNetV2}

Call = Callable[[], Any]


def multiplies(module: nn.Module, name: str) -> bool:
    """Filter of `quantize_`: all layers that multiply."""
    return isinstance(module, nn.Conv2d | nn.Linear)


def onnx_sessions(net: nn.Module, x: Tensor, batches: list[Tensor], threads: int) -> dict[str, Call]:
    """ONNX Runtime in fp32 and in 8 bits; none where it is not installed."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return {}
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter([{"x": batch.numpy()} for batch in batches])

        def get_next(self) -> Any:
            return next(self.rows, None)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: str(Path(folder, f"{name}.onnx")) for name in ("float", "int8")}
        torch.onnx.export(net, (x,), paths["float"], input_names=["x"], dynamo=False)
        quantize_static(
            paths["float"],
            paths["int8"],
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        sessions = {
            name: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for name, path in paths.items()
        }
    feed = {"x": x.numpy()}
    return {
        f"onnxruntime {'fp32' if name == 'float' else 'u8s8 static'}": lambda s=session: s.run(None, feed)
        for name, session in sessions.items()
    }


def quantized(net: nn.Module, recipe: Any) -> nn.Module:
    """A copy whose layers are quantized."""
    model = copy.deepcopy(net)
    qtorch.quantize_(model, recipe, multiplies)
    return model


def candidates(net: nn.Module, x: Tensor, batches: list[Tensor], threads: int) -> dict[str, Call]:
    """What takes turns, by name."""
    last = {"x": x.to(memory_format=torch.channels_last)}["x"]
    dynamic = qtorch.int8_dynamic_activation_int8_weight(act_granularity=PerAxis(0))
    models = {
        "static": quantized(net, observed(qtorch.int8_static_activation_int8_weight(), batches)),
        "dynamic, per image": quantized(net, dynamic),
        "weight-only": quantized(net, qtorch.int8_weight_only()),
    }
    traced = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(net, x)))
    of_last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    calls: dict[str, Call] = {
        "torch": lambda: net(x),
        "torch, channels last": lambda: of_last(last),
        "torch.jit": lambda: traced(x),
        **onnx_sessions(net, x, batches, threads),
    }
    for name, model in models.items():
        calls[name] = lambda model=model: model(x)
        calls[f"{name}, channels last"] = lambda model=model: model(last)
    for name in ("static", "dynamic, per image"):
        fused = qtorch.fuse_convolutions(models[name], x)
        calls[f"{name}, fused"] = lambda fused=fused: fused(x)
    for name, model in models.items():
        print(f"  {name}: {qtorch.compute_error(net(x), model(x)):.1f} dB")
    return calls


def fastest(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of the fastest call of each candidate; they take turns of three calls."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(3):
                start = time.perf_counter()
                call()
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def measure(name: str, threads: int, size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each candidate."""
    torch.manual_seed(0)
    net = NETS[name]().eval()
    x = torch.randn(1, 3, size, size)
    batches = [torch.randn(1, 3, size, size) for _ in range(3)]
    calls = candidates(net, x, batches, threads)
    times = fastest(calls, rounds)
    # A change of the setting makes all others prepare their weights anew: copies have a run of their own.
    few = {word: calls[word] for word in ("torch", "torch, channels last")}
    few |= {f"{word}, copies": calls[word] for word in ("weight-only", "weight-only, channels last")}
    with qtorch.config.patch(float_copy_bytes=1 << 30):
        copies = fastest(few, rounds)
    shift = times["torch, channels last"] / copies["torch, channels last"]
    times |= {word: seconds * shift for word, seconds in copies.items() if word not in times}
    return {word: seconds * 1000 for word, seconds in times.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """The table for docs/performance."""
    names = [key for key in rows[0] if key not in ("net", "threads")]
    heads = [f"{row['net']}, {row['threads']} thread{'s' * (row['threads'] > 1)}" for row in rows]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in names:
        cells = [
            f"{row[name]:.1f} ({min(row['torch'], row['torch, channels last']) / row[name]:.2f})" if name in row else ""
            for row in rows
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@torch.inference_mode(False)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, os.cpu_count() or 1)])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--write-docs", action="store_true", help="also write the table of docs/performance")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(machine())
        for name in options.nets:
            print(f"{name}, {threads} threads")
            with torch.no_grad():
                times = measure(name, threads, options.size, options.rounds)
            best = min(times["torch"], times["torch, channels last"])
            for candidate, milliseconds in times.items():
                print(f"  {candidate:36} {milliseconds:8.2f} ms  {best / milliseconds:5.2f}x")
            rows.append({"net": name, "threads": threads, **{k: round(v, 3) for k, v in times.items()}})
    if options.save:
        save("conv", rows)
    if options.write_docs:
        write_docs("conv", table(rows))


if __name__ == "__main__":
    main()
