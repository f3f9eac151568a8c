"""Files of GGUF that are written from models, and models that are read from them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import gguf
import numpy as np
import torch

import qtorch
from qtorch.checkpoint.formats.gguf.architectures import ARCHITECTURES, permute, undo_permutation
from qtorch.checkpoint.formats.gguf.metadata import SPLITS, architecture_of
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor
from tests.formats.gguf import llama_cpp
from tests.formats.gguf.random_blocks import write
from tests.formats.gguf.trained import MODELS, built, save_folder, tokenizer
from tests.refusals import refuses

KINDS = ("linear", "experts")


def numbers_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file in fp32, as gguf reads them."""
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(tensor.shape[::-1])
        ).float()
        for tensor in gguf.GGUFReader(path).tensors
    }


def fields_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def loaded(model: Any, path: Path) -> Any:
    with accelerate.init_empty_weights():
        empty = type(model)(model.config).eval()
    return qtorch.load_quantized(empty, path)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Names, order and offsets as by gguf's own map, metadata as in a file of llama.cpp, and back again exactly."""
    model, path = built(name), tmp_path / "x.gguf"
    config = model.config
    architecture = architecture_of(config.to_dict())
    wanted = llama_cpp.stored_tensors(model, architecture)
    qtorch.quantize_(model, {r".*\.layers\.1\..*": qtorch.gguf_q8_0()}, targets=KINDS)
    quantized = {key: p for key, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert quantized
    qtorch.save_gguf(model, path)

    found, fields = numbers_of(path), fields_of(path)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if key.startswith("blk.1.") and tensor.dim() > 1 and "gate_inp" not in key:
            assert qtorch.compute_error(tensor, found[key]) > 35
        else:
            assert torch.equal(found[key], tensor.float()), key
    for key, value in llama_cpp.config_metadata(config, architecture).items():
        if "freq_base" not in key and ("sliding_window" not in key or architecture.startswith("gemma")):
            assert fields[key] == pytest.approx(value), key
    assert fields["general.architecture"] == architecture
    assert fields["tokenizer.ggml.model"] == "none"

    again = loaded(model, path)
    for key, parameter in model.named_parameters():
        assert torch.equal(llama_cpp.numbers(again.get_parameter(key)), llama_cpp.numbers(parameter)), key
    assert {key for key, p in again.named_parameters() if isinstance(p, QuantizedTensor)} == quantized.keys()
    qtorch.fuse_decoder(model)
    qtorch.save_gguf(model, tmp_path / "fused.gguf")
    of_fused = numbers_of(tmp_path / "fused.gguf")
    assert of_fused.keys() == found.keys()
    assert all(torch.equal(of_fused[key], found[key]) for key in found)


def test_every_architecture_is_covered_and_permuted_back() -> None:
    assert {architecture_of(built(name).config.to_dict()) for name in MODELS} == ARCHITECTURES.keys()
    for heads, rows in ((1, 4), (4, 32), (3, 18)):
        weight = torch.randn(rows, 5)
        assert torch.equal(permute(weight, heads), llama_cpp.permuted(weight, heads))
        assert torch.equal(undo_permutation(permute(weight, heads), heads), weight)
    assert not torch.equal(llama_cpp.permuted(weight, 3), weight)
    refuses("7 rows are not an even number for each of 2 heads", lambda: undo_permutation(torch.randn(7, 5), 2))


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen3Moe"])
def test_a_folder_and_the_command(name: str, tmp_path: Path) -> None:
    """A matrix for each expert becomes one tensor; the bytes are those of the model in memory."""
    from qtorch.cli import main

    model = built(name).bfloat16()
    save_folder(model, tmp_path / "model")
    arguments = ["convert", str(tmp_path / "model"), str(tmp_path / "x.gguf"), "--format", "gguf"]
    assert main([*arguments, "--type", ".*down_proj=Q6_K", "--type", ".*mlp.*=Q4_0"]) == 0
    types = {".*down_proj": "Q6_K", ".*mlp.*": "Q4_0"}
    qtorch.save_gguf(model, tmp_path / "y.gguf", tokenizer=tokenizer(), types=types)
    found, wanted = (gguf.GGUFReader(tmp_path / file) for file in ("x.gguf", "y.gguf"))
    of = {tensor.name: tensor for tensor in found.tensors}
    assert of.keys() == {tensor.name for tensor in wanted.tensors}
    for tensor in wanted.tensors:
        assert of[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(of[tensor.name].data, tensor.data)
    kinds = {tensor.name.split(".", 2)[-1]: tensor.tensor_type.name for tensor in found.tensors}
    assert kinds["attn_q.weight"] == "BF16"
    assert kinds["attn_norm.weight"] == "F32"
    assert {kind for key, kind in kinds.items() if "ffn_down" in key} == {"Q6_K"}
    assert fields_of(tmp_path / "x.gguf").keys() == fields_of(tmp_path / "y.gguf").keys()


def test_files_of_llama_cpp_again_and_checkpoints(tmp_path: Path) -> None:
    model = built("Qwen3")
    save_folder(model, tmp_path / "model")
    recipe = qtorch.gguf_q4_0()
    qtorch.quantize_checkpoint(tmp_path / "model", tmp_path / "x.gguf", recipe, format="gguf")
    again = loaded(model, tmp_path / "x.gguf")
    qtorch.quantize_(model, {r".*_proj": recipe})
    for key, parameter in model.named_parameters():
        assert torch.equal(llama_cpp.numbers(again.get_parameter(key)), llama_cpp.numbers(parameter))
    # Read and written: the same bytes, also of types whose scales are codes.
    model = built("Llama")
    kinds = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q3_K", "ffn_down": "Q2_K"}
    kinds |= {"ffn_up": "IQ4_XS", "ffn_gate": "IQ4_NL", "token_embd": "Q5_1"}
    first = llama_cpp.save(model, tmp_path / "first.gguf", "llama", kinds)
    qtorch.save_gguf(loaded(model, first), tmp_path / "y.gguf")
    data = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "y.gguf").tensors}
    for tensor in gguf.GGUFReader(first).tensors:
        assert np.array_equal(data[tensor.name], tensor.data), tensor.name


def test_others_are_rounded_once_more_only_when_asked(tmp_path: Path) -> None:
    model, path = built("Llama"), tmp_path / "x.gguf"
    qtorch.quantize_(model, {".*up.*": qtorch.nf4_weight_only(), ".*down.*": qtorch.int4_weight_only(group_size=32)})
    message = r"gguf: model.layers.0.mlp.(up|down)_proj.weight: .*; quantize with gguf_q4_0\(\), .* requantize=True"
    refuses(message, lambda: qtorch.save_gguf(model, path))
    assert not path.exists()
    with pytest.warns(UserWarning, match=r"gguf: 4 weights are rounded once more: model.layers.0.mlp.*, \.\.\."):
        qtorch.save_gguf(model, path, requantize=True, types={".*up_proj": "Q5_1"})
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.1.ffn_down.weight"]) == ("Q5_1", "Q8_0")
    weight = model.model.layers[0].mlp.up_proj.weight.dequantize()
    assert 25 < qtorch.compute_error(weight, numbers_of(path)["blk.0.ffn_up.weight"]) < 50


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    model, path = built("Llama"), tmp_path / "x.gguf"
    for types, message in (
        ("Q4_2", "'.*' has the type 'Q4_2'; known are F32"),
        ({".*q_porj": "Q4_0"}, "'.*q_porj' in types matches no matrix"),
    ):
        refuses(message, lambda types=types: qtorch.save_gguf(model, path, types=types))
    refuses(r"format 'gguf' is a file, such as x\.gguf", lambda: qtorch.save_gguf(model, tmp_path / "x"))
    fixed = {
        "norm_topk_prob of config.json is False": ("Qwen3Moe", {"norm_topk_prob": False}),
        "hidden_act of config.json is 'relu'": ("Llama", {"hidden_act": "relu"}),
        "query_pre_attn_scalar of config.json is 256": ("Gemma2", {"query_pre_attn_scalar": 256}),
        "head_dim of config.json is 128": ("Qwen2", {"head_dim": 128}),
        "embeddings of the type 'dynamic' are not": (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ),
    }
    for message, (name, options) in fixed.items():
        refuses(message, lambda name=name, options=options: qtorch.save_gguf(built(name, **options), path))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    refuses("model_type 'gpt2' of config.json has no architecture", lambda: qtorch.save_gguf(model, path))
    assert list(tmp_path.iterdir()) == []


def test_vocabularies(tmp_path: Path) -> None:
    """Byte pairs by bytes, known by how texts are split; or as in SentencePiece, with scores by the order of merges."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert SPLITS[PRETOKENIZE_REGEX] == "qwen2"
    model, path = built("Llama"), tmp_path / "x.gguf"
    qtorch.save_gguf(model, path, tokenizer=tokenizer())
    fields = fields_of(path)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer())] == tokenizer().convert_ids_to_tokens(range(len(tokenizer())))
    assert tokens[-1] == "[PAD319]"
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.add_bos_token"]) == (0, False)

    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "c", *("".join(pair) for pair in merges)]
    spm = transformers.LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    qtorch.save_gguf(model, path, tokenizer=spm)
    fields = fields_of(path)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.add_space_prefix"]) == ("llama", True)
    assert fields["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 6, 1]
    assert fields["tokenizer.ggml.scores"][8:11] == [0.0, -1.0, -2.0]

    folder = save_folder(model, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["type"] = "Unigram"
    (folder / "tokenizer.json").write_text(json.dumps(data))
    refuses("a Unigram tokenizer; those of byte pairs", lambda: qtorch.save_gguf(model, path, tokenizer=folder))


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "Q5_1", "ffn_down": "MXFP4"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# architecture: (class of the model and of its config, sizes, types)
MODELS_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
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
    called, options, _ = MODELS_MODELS[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if called == "Gemma3" else f"{called}Config")
    model_class = getattr(transformers, f"{called}ForCausalLM")
    model = model_class(config_class(**(SIZES | options)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval(), model_class, name.split(",")[0]


def empty(model_class: Any, config: Any) -> torch.nn.Module:
    """The model with parameters on the meta device, buffers real."""
    with accelerate.init_empty_weights():
        return model_class(config).eval()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "llama" else []) for n in MODELS_MODELS]
)
def test_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    model, model_class, architecture = make(name)
    llama_cpp.save(model, tmp_path / "x.gguf", architecture, MODELS_MODELS[name][2])
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
    with torch.no_grad(), qtorch.kernels.record_kernels() as ran:
        logits = ours(ids).logits
        expected = theirs(ids).logits
    kernels = {kernel for kernel in ran if kernel.startswith("linear:")}
    assert kernels
    assert "linear:reference" not in kernels
    assert qtorch.compute_error(expected, logits) > 90
    assert qtorch.compute_error(model(ids).logits, logits) < 60


@pytest.mark.slow
def test_other_dtypes_and_saved_again(tmp_path: Path) -> None:
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
    model, model_class, architecture = make("llama, tied")
    llama_cpp.save(model, tmp_path / "x.gguf", architecture, MODELS_MODELS["llama, tied"][2])
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


def test_what_is_left_out_and_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, model_class, architecture = make("llama")
    tensors = {name: (tensor.numpy(), None) for name, tensor in llama_cpp.stored_tensors(model, "llama").items()}
    tensors["rope_freqs.weight"] = torch.ones(8).numpy(), None
    path = write(tmp_path / "x.gguf", tensors, architecture, llama_cpp.config_metadata(model.config, architecture))
    ours = qtorch.load_quantized(empty(model_class, model.config), path)
    for key, parameter in ours.named_parameters():
        assert torch.equal(parameter, model.state_dict()[key])
    model, _, _ = make("llama")
    tensors = {name: (tensor.numpy(), None) for name, tensor in llama_cpp.stored_tensors(model, "llama").items()}
    path = write(tmp_path / "x.gguf", tensors, "llama")
    refuses(r"x\.gguf: the rows of attn_[qk] are permuted by heads, whose number llama\.", lambda: open_source(path))
    model, _, architecture = make("qwen3moe")
    path = llama_cpp.save(model, tmp_path / "x.gguf", architecture, {"gate_exps": "Q4_0", "up_exps": "Q5_0"})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    message = r"x\.gguf: model.*gate_up_proj \(blk.0.ffn_gate_exps.weight and .*\): .* become one tensor, but are Q4_0"
    with open_source(path) as source:
        for read in (source.contents, source.tensor):
            refuses(message, lambda read=read: read(name))
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"save_gguf needs the package gguf: pip install 'qtorch\[gguf\]'"):
        qtorch.save_gguf(built("Llama"), tmp_path / "x.gguf")
