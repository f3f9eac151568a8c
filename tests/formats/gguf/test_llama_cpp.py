"""llama.cpp runs the files: the most probable tokens are those of transformers with the dequantized weights.

Its programs llama-simple and llama-perplexity are looked for in the folder that QTORCH_LLAMA_CPP names, and on PATH.
"""

import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import qtorch
from qtorch.training import convert, qat
from tests.formats.gguf.trained import MODELS, PROMPT, TEXT, built, continuation, save_folder, tokenizer, train

pytestmark = pytest.mark.slow
RECIPES = {
    "Q4_0": qtorch.gguf_q4_0(), "Q4_1": qtorch.gguf_q4_1(), "Q5_0": qtorch.gguf_q5_0(), "Q5_1": qtorch.gguf_q5_1(),
    "Q8_0": qtorch.gguf_q8_0(), "IQ4_NL": qtorch.gguf_iq4_nl(), "MXFP4": qtorch.mxfp4_weight_only(),
}  # fmt: skip
KINDS = ("linear", "experts")


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("QTORCH_LLAMA_CPP")) or shutil.which(name)
    return found or pytest.skip(f"needs {name} of llama.cpp: QTORCH_LLAMA_CPP=its folder")


def run(name: str, path: Path, *arguments: object) -> str:
    command = [program(name), "-m", str(path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout if name == "llama-simple" else done.stdout + done.stderr


def dequantized(model: Any) -> Any:
    """The model with the numbers of its quantized weights in fp32."""
    qtorch.dequantize_(model)
    return model


def agrees(model: Any, path: Path) -> None:
    assert any(isinstance(parameter, qtorch.dtypes.QuantizedTensor) for parameter in model.parameters())
    found = run("llama-simple", path, "-n", 24, PROMPT).strip()
    assert found == continuation(dequantized(model))
    assert len(found) > 60


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral"])
def test_quantized_models(name: str, kind: str, tmp_path: Path) -> None:
    program("llama-simple")
    model = built(name)
    assert train(model) < 0.5
    qtorch.quantize_(model, RECIPES[kind], targets=KINDS)
    qtorch.save_gguf(model, tmp_path / "x.gguf", tokenizer=tokenizer())
    agrees(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    program("llama-simple")
    model = built(name)
    assert train(model) < 1
    qtorch.quantize_(model, qtorch.gguf_q8_0(), targets=KINDS)
    qtorch.save_gguf(model, tmp_path / "x.gguf", tokenizer=tokenizer())
    agrees(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3", "longrope"])
def test_rotary_embeddings(rope: str, tmp_path: Path) -> None:
    program("llama-simple")
    # llama.cpp rounds its context up to 256, and takes the long factors beyond the original one.
    original = {"original_max_position_embeddings": 256 if rope == "longrope" else 64}
    given = {
        "linear": {},
        "yarn": original,
        "llama3": {**original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {**original, "short_factor": [1.0] * 16 + [2.0] * 16, "long_factor": [4.0] * 32},
    }[rope]
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, **given}
    options = {**original, "max_position_embeddings": 1024} if rope == "longrope" else {}
    model = built("Phi3" if rope == "longrope" else "Llama", rope_parameters=parameters, **options)
    assert train(model) < 0.5
    qtorch.quantize_(model, qtorch.gguf_q8_0())
    qtorch.save_gguf(model, tmp_path / "x.gguf", tokenizer=tokenizer())
    agrees(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_folder_without_the_model(name: str, tmp_path: Path) -> None:
    """As transformers saves it, with a matrix for each expert; types of floats by name."""
    program("llama-simple")
    model = built(name)
    assert train(model) < 0.5
    save_folder(model, tmp_path / "model")
    types = {".*embed_tokens": "Q8_0", ".*down_proj": "Q6_K", ".*(self_attn|mlp).*": "Q5_K"}
    qtorch.save_gguf(tmp_path / "model", tmp_path / "x.gguf", types=types)
    loaded = qtorch.load_quantized(model, tmp_path / "x.gguf")
    agrees(loaded, tmp_path / "x.gguf")


def test_trained_perplexity_is_kept(tmp_path: Path) -> None:
    """Quantization-aware training, Q4_0, llama.cpp."""
    program("llama-perplexity")
    model = built("Llama")
    train(model, 12)
    qtorch.quantize_(model, qat(qtorch.gguf_q4_0()))
    train(model, 20)
    qtorch.quantize_(model, convert())
    qtorch.save_gguf(model, tmp_path / "x.gguf", tokenizer=tokenizer())
    # Of the second half of each piece of 64 tokens.
    (tmp_path / "text.txt").write_text(TEXT * 3)
    said = run("llama-perplexity", tmp_path / "x.gguf", "-f", tmp_path / "text.txt", "-c", 64, "-b", 64)
    found = float(re.findall(r"\[\d+\]([\d.]+),", said)[-1])
    ids = tokenizer()(TEXT * 3, return_tensors="pt")["input_ids"]
    count, total = ids.shape[1] // 64, 0.0
    with torch.no_grad():
        for piece in ids[:, : count * 64].reshape(count, 1, 64):
            logits = model(piece).logits[0, 32:-1]
            total += torch.nn.functional.cross_entropy(logits, piece[0, 33:]).item()
    wanted = math.exp(total / count)
    assert 1 < wanted < 20
    assert found == pytest.approx(wanted, rel=1e-3)
