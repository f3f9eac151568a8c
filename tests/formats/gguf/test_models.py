"""Models of transformers from GGUF files: what transformers' own reader gives, which dequantizes, but kept packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import qtorch
from qtorch.checkpoint.formats.gguf.architectures import undo_permutation
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor
from qtorch.kernels import record_kernels
from tests.formats.gguf import llama_cpp
from tests.formats.gguf.random_blocks import write
from tests.refusals import refuses

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "Q5_1", "ffn_down": "MXFP4"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# architecture: (class of the model and of its config, sizes, types)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}, MIXED),
    "llama, biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": False}, MIXED),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, MIXED | {"token_embd": "Q4_1"}),
    "llama, super-blocks": (
        "Llama",
        {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False},
        {
            "attn_q": "Q4_K",
            "attn_k": "Q5_K",
            "attn_v": "Q6_K",
            "attn_output": "Q3_K",
            "ffn_down": "Q2_K",
            "ffn_up": "IQ4_XS",
            "ffn_gate": "IQ4_NL",
            "token_embd": "Q4_K",
            "output": "Q6_K",
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, MIXED),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}, MIXED),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True}, MIXED),
    "gemma3": ("Gemma3", {"tie_word_embeddings": True}, MIXED),
    "phi3": ("Phi3", {"tie_word_embeddings": False, "pad_token_id": 0}, MIXED | {"attn_qkv": "Q4_0"}),
    "qwen2moe": (
        "Qwen2Moe",
        {"tie_word_embeddings": False, "num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS},
        {**MIXED, "gate_exps": "Q4_1", "up_exps": "Q4_1", "down_exps": "Q5_1"},
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {"tie_word_embeddings": False, "num_experts": 4, **EXPERTS},
        {**MIXED, "gate_exps": "Q4_1", "up_exps": "Q4_1", "down_exps": "Q5_1"},
    ),
}


def make(name: str) -> tuple[Any, Any, str]:
    """(model with random weights, its class, the architecture)."""
    called, options, _ = MODELS[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if called == "Gemma3" else f"{called}Config")
    model_class = getattr(transformers, f"{called}ForCausalLM")
    model = model_class(config_class(**(SIZES | options)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval(), model_class, name.split(",")[0]


def empty(model_class: Any, config: Any) -> nn.Module:
    """The model with parameters on the meta device, buffers real."""
    with accelerate.init_empty_weights():
        return model_class(config).eval()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "llama" else []) for n in MODELS])
def test_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    model, model_class, architecture = make(name)
    llama_cpp.save(model, tmp_path / "x.gguf", architecture, MODELS[name][2])
    theirs = model_class.from_pretrained(tmp_path, gguf_file="x.gguf", config=model.config).eval()
    ours = empty(model_class, model.config)
    qtorch.load_quantized(ours, tmp_path / "x.gguf")

    wanted = theirs.state_dict()
    quantized = 0
    for key, parameter in ours.named_parameters(remove_duplicate=False):
        assert torch.equal(llama_cpp.numbers(parameter), wanted[key].float()), key
        quantized += isinstance(parameter, QuantizedTensor)
    # Everything but norms, biases and routers.
    float_matrices = [key for key, p in ours.named_parameters() if p.dim() > 1 and not isinstance(p, QuantizedTensor)]
    assert all(key.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) for key in float_matrices)
    assert quantized >= 9

    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad(), record_kernels() as ran:
        logits = ours(ids).logits
        expected = theirs(ids).logits
    kernels = {kernel for kernel in ran if kernel.startswith("linear:")}
    assert kernels
    assert "linear:reference" not in kernels
    assert qtorch.compute_error(expected, logits) > 90
    assert qtorch.compute_error(model(ids).logits, logits) < 60


@pytest.mark.slow
def test_in_another_dtype(tmp_path: Path) -> None:
    """`model.to` changes no number of a quantized weight."""
    model, model_class, architecture = make("llama")
    llama_cpp.save(model, tmp_path / "x.gguf", architecture, MIXED)
    ours = qtorch.load_quantized(empty(model_class, model.config), tmp_path / "x.gguf")
    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        wanted = ours(ids).logits
        before = llama_cpp.numbers(ours.model.layers[1].self_attn.k_proj.weight)
        ours.to(torch.bfloat16)
        assert torch.equal(ours.model.layers[1].self_attn.k_proj.weight.dequantize(torch.float32), before)
        assert 20 < qtorch.compute_error(wanted, ours(ids).logits.float()) < 60


@pytest.mark.slow
def test_saved_again_in_our_format(tmp_path: Path) -> None:
    model, model_class, architecture = make("llama, tied")
    llama_cpp.save(model, tmp_path / "x.gguf", architecture, MODELS["llama, tied"][2])
    ours = qtorch.load_quantized(empty(model_class, model.config), tmp_path / "x.gguf")
    ours.tie_weights()
    qtorch.save_quantized(ours, tmp_path / "x.safetensors")
    again = qtorch.load_quantized(empty(model_class, model.config), tmp_path / "x.safetensors")
    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, again(ids).logits)


@pytest.mark.slow
def test_mixtral(tmp_path: Path) -> None:
    """Which llama.cpp calls llama; transformers does not read its experts."""
    options = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options)).eval()
    path = llama_cpp.save(model, tmp_path / "x.gguf", "llama", {})
    ours = qtorch.load_quantized(empty(transformers.MixtralForCausalLM, model.config), path)
    wanted = model.state_dict()
    for key, parameter in ours.named_parameters():
        assert qtorch.compute_error(wanted[key], llama_cpp.numbers(parameter)) > 38
    assert isinstance(ours.model.layers[0].mlp.experts.gate_up_proj, QuantizedTensor)
    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        assert 20 < qtorch.compute_error(model(ids).logits, ours(ids).logits) < 70


def test_experts_of_two_types_are_refused_by_name(tmp_path: Path) -> None:
    model, _, architecture = make("qwen3moe")
    path = llama_cpp.save(model, tmp_path / "x.gguf", architecture, {"gate_exps": "Q4_0", "up_exps": "Q5_0"})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    message = r"x\.gguf: model.*gate_up_proj \(blk.0.ffn_gate_exps.weight and .*\): .* become one tensor, but are Q4_0"
    with open_source(path) as source:
        for read in (source.contents, source.tensor):
            with pytest.raises(ValueError, match=message):
                read(name)


def test_rows_of_q_and_k() -> None:
    for heads, rows in ((1, 4), (4, 32), (3, 18)):
        weight = torch.randn(rows, 5)
        assert torch.equal(undo_permutation(llama_cpp.permuted(weight, heads), heads), weight)
    assert not torch.equal(llama_cpp.permuted(weight, 3), weight)
    refuses("7 rows are not an even number for each of 2 heads", lambda: undo_permutation(torch.randn(7, 5), 2))


def test_without_the_number_of_heads(tmp_path: Path) -> None:
    model, _, _ = make("llama")
    tensors = {name: (tensor.numpy(), None) for name, tensor in llama_cpp.stored_tensors(model, "llama").items()}
    path = write(tmp_path / "x.gguf", tensors, "llama")
    refuses(r"x\.gguf: the rows of attn_[qk] are permuted by heads, whose number llama\.", lambda: open_source(path))


def test_what_transformers_computes_itself_is_left_out(tmp_path: Path) -> None:
    model, model_class, architecture = make("llama")
    tensors = {name: (tensor.numpy(), None) for name, tensor in llama_cpp.stored_tensors(model, "llama").items()}
    tensors["rope_freqs.weight"] = torch.ones(8).numpy(), None
    path = write(tmp_path / "x.gguf", tensors, architecture, llama_cpp.config_metadata(model.config, architecture))
    ours = qtorch.load_quantized(empty(model_class, model.config), path)
    for key, parameter in ours.named_parameters():
        assert torch.equal(parameter, model.state_dict()[key])
