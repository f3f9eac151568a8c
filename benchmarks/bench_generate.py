"""Prompts and generated tokens of whole language models on this CPU: transformers in floating point and with qtorch's
recipes, eager and compiled, and llama.cpp. Each engine runs in a process of its own, since threads of some keep
spinning.

Weights are random; they cost what trained ones cost. A generated token reads every weight but the table of embeddings:
its bytes times the tokens a second is the share of the memory's read bandwidth, which is measured in the same run.

    python -m benchmarks.bench_generate [--models 1.1B 135M] [--dtypes float32 bfloat16] [--engines "int4 g128" ...]
        [--modes eager "eager fused" ...] [--sequences 1 8] [--llama DIRECTORY] [--save] [--write-docs]

DIRECTORY has `llama-bench` and `llama-quantize` of llama.cpp; the file that they read is written with the package gguf.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qtorch
from benchmarks.common import RECIPES, instruction_set, machine, machine_line, save, write_docs

MODELS: dict[str, dict[str, int]] = {
    "1.1B": {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000,
    },
    "135M": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152,
    },
}  # fmt: skip
"""Shapes of TinyLlama and SmolLM."""

ENGINES = RECIPES | {"W4A8 g128": qtorch.int8_dynamic_activation_int4_weight(group_size=128)}
"""Of transformers."""

LLAMA = ("F16", "Q8_0", "Q4_0")
"""File types of llama.cpp."""

PROMPT, GENERATED, ROUNDS = 256, 32, 3

MODES = ["eager", "eager fused", "compiled", "compiled fused"]
"""Fused: after `fuse_decoder`."""

READ = """
#include <cstdint>
#include <cstddef>
extern "C" uint64_t read_all(const uint64_t* p, size_t n, int threads) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : sum) schedule(static)
    for (size_t i = 0; i < n; i++) sum ^= p[i];
    return sum;
}
"""

Row = dict[str, Any]


def read_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read from memory."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(READ)
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(library)], check=True)
        read = ctypes.CDLL(str(library)).read_all
        read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
        memory = torch.ones(1 << 27, dtype=torch.int64)
        call = lambda: read(memory.data_ptr(), memory.numel(), threads)  # noqa: E731
        return memory.nbytes / min(seconds(call) for _ in range(8))


def seconds(call: Callable[[], Any]) -> float:
    """That one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------- one engine, in its process


def decoder(name: str, dtype: torch.dtype) -> Any:
    """A Llama of this shape."""
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {**MODELS[name]}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=False)
    torch.set_default_dtype(dtype)
    model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Of all that a token reads: the weights of linear layers."""
    return sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear))


@torch.no_grad()
def run(about: Row) -> Row:
    """The row of an engine in transformers; "compile" is how many seconds that takes."""
    from qtorch.integrations.transformers import compile_generate

    torch.set_num_threads(about["threads"])
    model = decoder(about["model"], getattr(torch, about["dtype"]))
    if (recipe := ENGINES[about["engine"]]) is not None:
        qtorch.quantize_(model, recipe)
        qtorch.kv_cache.use_quantized_attention(model)
        if "fused" in about["mode"]:
            qtorch.fuse_decoder(model)
    ids = torch.randint(0, MODELS[about["model"]]["vocab_size"], (about["sequences"], PROMPT))
    row, settings = {**about, "bytes": weight_bytes(model)}, {}
    if "compiled" in about["mode"]:
        compiles = lambda: compile_generate(model, PROMPT + GENERATED, about["sequences"], progress=False)  # noqa: E731
        row["compile"] = seconds(lambda: settings.update(compiles()))

    def generate(count: int) -> float:
        """Seconds for so many tokens of each sequence, after a prompt of one."""
        given = {"attention_mask": torch.ones_like(ids[:, :1]), "do_sample": False, "pad_token_id": 0}
        return seconds(lambda: model.generate(ids[:, :1], max_new_tokens=count, **given, **settings))

    model.generation_config.eos_token_id = None  # as llama-bench: no token ends a text
    row["prompt"] = ids.numel() / statistics.median(
        seconds(lambda: model(ids, logits_to_keep=1)) for _ in range(ROUNDS)
    )
    # The first token is the prompt's, and `generate` has work of its own.
    times = [generate(GENERATED + 1) - generate(1) for _ in range(ROUNDS)]
    row["generate"] = GENERATED * about["sequences"] / statistics.median(times)
    return row


# --------------------------------------------------------------------------------------------- llama.cpp


def write_gguf(path: Path, name: str) -> None:
    """A random Llama of this shape in fp16."""
    import gguf

    shape = MODELS[name]
    hidden, inner, vocabulary = (shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(1)
    writer.add_tokenizer_model("no_vocab")

    def add(tensor: str, *size: int) -> None:
        made = torch.randn(size, dtype=torch.float32) * 0.02 if len(size) > 1 else torch.ones(size)
        writer.add_tensor(f"{tensor}.weight", (made.half() if len(size) > 1 else made).numpy())

    kv = hidden // heads * kv_heads
    layers = {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    add("token_embd", vocabulary, hidden)
    add("output", vocabulary, hidden)
    add("output_norm", hidden)
    for block, (layer, size) in itertools.product(range(shape["num_hidden_layers"]), layers.items()):
        add(f"blk.{block}.{layer}", *size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_files(programs: Path, model: str, folder: Path) -> dict[str, Path]:
    """The model in the file types of `LLAMA`."""
    half = folder / f"{model}-F16.gguf"
    write_gguf(half, model)
    files = {"F16": half}
    for kind in LLAMA[1:]:
        files[kind] = folder / f"{model}-{kind}.gguf"
        # Without --pure the last layer of a Q4_0 file has 6 bits.
        command = [str(programs / "llama-quantize"), "--pure", str(half), str(files[kind]), kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
    return files


def run_llama(programs: Path, path: Path, about: Row) -> Row:
    """The row of a file of llama.cpp; its benchmark has no batches of sequences."""
    numbers = ["-p", str(PROMPT), "-n", str(GENERATED), "-t", str(about["threads"]), "-r", str(ROUNDS), "-o", "json"]
    command = [str(programs / "llama-bench"), "-m", str(path), *numbers]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    of_prompt, of_generation = json.loads(done.stdout)
    values = MODELS[about["model"]]
    table = values["vocab_size"] * values["hidden_size"]
    share = of_prompt["model_size"] / of_prompt["model_n_params"]  # bytes of a weight
    read = of_prompt["model_size"] - int(table * share)
    return {**about, "bytes": read, "prompt": of_prompt["avg_ts"], "generate": of_generation["avg_ts"]}


# ------------------------------------------------------------------------------------------------- table


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows that the options name."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        row["share"] = row["bytes"] * row["generate"] / row["sequences"] / options.bandwidth
        rows.append(row)
        print(json.dumps(row), flush=True)

    for model in options.models:
        common = {"model": model, "threads": options.threads}
        if options.llama:
            with tempfile.TemporaryDirectory() as folder:
                for kind, path in llama_files(options.llama, model, Path(folder)).items():
                    about = {"engine": f"llama.cpp {kind}", "dtype": "", "mode": "compiled", "sequences": 1, **common}
                    keep(run_llama(options.llama, path, about))
        for dtype, sequences, engine, mode in itertools.product(
            options.dtypes, options.sequences, options.engines, options.modes
        ):
            about = {"engine": engine, "dtype": dtype, "mode": mode, "sequences": sequences, **common}
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_generate", "--one", json.dumps(about)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            keep(json.loads(done.stdout.splitlines()[-1]))
    return rows


def markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """The machine, and a table with a line for each engine."""
    heads = ["model", "engine", "dtype", "mode", "sequences", "GB a token", "prompt", "generate", "share"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        prompt = f"{row['prompt']:.0f}" if "prompt" in row else ""
        cells = [row["model"], row["engine"], row["dtype"], row["mode"], str(row["sequences"])]
        cells += [f"{row['bytes'] / 1e9:.2f}", prompt, f"{row['generate']:.1f}", f"{row['share']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    bandwidth = f"memory is read at {about['read bandwidth'] / 1e9:.1f} GB/s"
    return f"{machine_line(about)}; {bandwidth}.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama", type=Path, help="directory with llama-bench and llama-quantize")
    parser.add_argument("--machine", help="name in generate_NAME, of results and marks; by default the instruction set")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/generate_NAME.json")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one)))
        return
    options.bandwidth = read_bandwidth(options.threads)
    about = machine() | {"read bandwidth": options.bandwidth}
    rows = measure(options)
    name = f"generate_{options.machine or instruction_set()}"
    if options.save:
        save(name, rows, about)
    print(text := markdown(about, rows))
    if options.write_docs:
        write_docs(name, text)


if __name__ == "__main__":
    main()
