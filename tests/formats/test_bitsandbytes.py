"""Weights of bitsandbytes, written by it; its own `dequantize_4bit` on the CPU says what they are; models with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qtorch import explain, load_quantized, save_quantized
from qtorch.dtypes import QuantizedTensor
from tests.formats.folders import Layer, check, load, plain_tensors, quantized_config, refused, write

functional = pytest.importorskip("bitsandbytes.functional")
OUTPUTS, INPUTS = 24, 128
SHAPE = OUTPUTS, INPUTS
STATE = "layer.weight.quant_state.bitsandbytes__"


def layer(
    kind: str, nested: bool, blocksize: int = 64, dtype: torch.dtype = torch.bfloat16, shape: Any = SHAPE
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that bitsandbytes stores, and the weight that they stand for."""
    weight = torch.randn(shape).to(dtype)
    packed, state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind, quant_storage=torch.uint8
    )
    parts = {f"layer.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    tensors = {"layer.weight": packed, **parts, **plain_tensors(shape[1], dtype)}
    return tensors, functional.dequantize_4bit(packed, state).reshape(shape)


def folder(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: str = "float16", **settings: object) -> Path:
    return write(tmp_path / "model", tensors, 2, quantized_config("bitsandbytes", dtype, **settings))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_4_bits(kind: str, nested: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, wanted = layer(kind, nested, dtype=dtype)
    check(
        folder(tmp_path, tensors, load_in_4bit=True), wanted, "lut_weight_mm",
        4 + 32 / 64 + 16 * 32 / (OUTPUTS * INPUTS),
    )  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_every_byte(nested: bool, tmp_path: Path) -> None:
    """Random codes instead of those of a weight: FP4 has two codes of zero."""
    tensors, _ = layer("fp4", nested)
    tensors["layer.weight"] = torch.randint(0, 256, tensors["layer.weight"].shape, dtype=torch.uint8)
    of_state = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("layer.weight.")}
    state = functional.QuantState.from_dict(of_state, device=torch.device("cpu"))
    wanted = functional.dequantize_4bit(tensors["layer.weight"], state)
    assert torch.equal(load(folder(tmp_path, tensors), SHAPE).dequantize(), wanted)


@pytest.mark.parametrize(("inputs", "blocksize", "part"), [(96, 64, 32), (32, 64, 32), (48, 256, 16), (128, 32, 32)])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_end_inside_rows(inputs: int, blocksize: int, part: int, nested: bool, tmp_path: Path) -> None:
    """bitsandbytes cuts the flattened weight; equal parts of a row get copies of the scale. The last block is short.

    The compiled CPU kernel of bitsandbytes 0.50.2 is wrong for such blocks, so its torch operators are the judge.
    """
    ops = pytest.importorskip("bitsandbytes.backends.default.ops")
    tensors, _ = layer("nf4", nested, blocksize, shape=(7, inputs))
    parts = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("layer.weight.")}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    absmax = state.absmax
    if nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = tensors["layer.weight"].reshape(-1)
    with torch.compiler.set_stance("force_eager"):
        wanted = ops._dequantize_4bit_compute(codes, absmax, state.code, blocksize, state.shape, state.dtype)
    weight = load(folder(tmp_path, tensors), (7, inputs))
    assert torch.equal(weight.dequantize(), wanted)
    assert weight.scheme.weight.granularity.group_size == part


def test_tiny_parts_and_int8(tmp_path: Path) -> None:
    parts, _ = layer("nf4", False, shape=(8, 100))
    refused(folder(tmp_path, parts), (8, 100), r"layer.weight: groups of 64 in rows of 100 end inside rows")
    parts, wanted = layer("nf4", True)
    file = write(tmp_path / "alone", parts) / "model.safetensors"
    model = load_quantized(Layer(*SHAPE), file)
    assert torch.equal(model.layer.weight.dequantize(), wanted)
    # Codes are exact. Numbers are rounded once more or less than by bitsandbytes, which multiplies by 1 / 127 last.
    weight = torch.randn(OUTPUTS, INPUTS).half()
    codes, scb, _ = functional.int8_vectorwise_quant(weight)
    stored = {"layer.weight": codes, "layer.SCB": scb, "layer.weight_format": torch.tensor(0, dtype=torch.uint8)}
    parts = {**stored, **plain_tensors(INPUTS, torch.float32)}
    wanted = codes.float() * (scb / 127).reshape(-1, 1)
    loaded = check(folder(tmp_path, parts, "float32", load_in_8bit=True), wanted, "cpu_weight_only_mm", 8 + 32 / INPUTS)
    assert torch.equal(loaded.inner_tensors["qdata"], codes)
    theirs = functional.int8_vectorwise_dequant(codes, scb)
    difference = ((loaded.dequantize() - theirs).abs() / theirs.abs().clamp(min=1e-9)).max()
    assert 0 < difference < 2.5e-7


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_stored_in_another_dtype(storage: torch.dtype, tmp_path: Path) -> None:
    """bnb_4bit_quant_storage, for FSDP."""
    tensors, wanted = layer("nf4", True)
    tensors["layer.weight"] = tensors["layer.weight"].reshape(-1).view(storage).reshape(-1, 1)
    assert torch.equal(load(folder(tmp_path, tensors), SHAPE).dequantize(), wanted)


def state(tensors: dict[str, torch.Tensor], **change: object) -> dict[str, torch.Tensor]:
    data = json.loads(bytes(tensors[f"{STATE}nf4"].tolist()))
    text = json.dumps({**data, **change}).encode()
    return {**tensors, f"{STATE}nf4": torch.tensor(list(text), dtype=torch.uint8)}


DAMAGE: dict[str, tuple[Any, str]] = {
    "not JSON": (lambda t: {**t, f"{STATE}nf4": torch.zeros(4, dtype=torch.uint8)}, "its quant_state is not JSON"),
    "a list": (lambda t: {**t, f"{STATE}nf4": torch.tensor([91, 49, 93], dtype=torch.uint8)},
        "its quant_state is a list"),
    "another type": (lambda t: state(t, quant_type="fp4"), "its quant_type is 'fp4'"),
    "a huge shape": (lambda t: state(t, shape=[2**39, 2**39]), "layer.weight has 1536 bytes, codes of shape"),
    "a wrong shape": (lambda t: state(t, shape=[OUTPUTS, 64]), "codes of shape .24, 64. take 768"),
    "a negative shape": (lambda t: state(t, shape=[-1, 64]), r"the shape \[-1, 64\]"),
    "no shape": (lambda t: state(t, shape=None), "the shape None"),
    "no block size": (lambda t: state(t, blocksize=0), r"the block sizes \[0, 256\]"),
    "a block size of text": (lambda t: state(t, blocksize="64"), r"the block sizes \['64', 256\]"),
    "another nested block size": (lambda t: state(t, nested_blocksize=1), "layer.weight.nested_absmax has shape"),
    "another dtype": (lambda t: state(t, dtype="int8"), "the dtype 'int8'"),
    "an infinite offset": (lambda t: state(t, nested_offset=float("inf")), "the nested_offset inf"),
    "another table": (lambda t: {**t, "layer.weight.quant_map": torch.linspace(-1, 1, 16)}, "its quant_map is not the"),
    "no scales": (lambda t: {k: v for k, v in t.items() if not k.endswith(".absmax")}, "weight.absmax is missing"),
    "few scales": (lambda t: {**t, "layer.weight.absmax": t["layer.weight.absmax"][1:]},
        "layer.weight.absmax has shape"),
    "no codes": (lambda t: {k: v for k, v in t.items() if k != "layer.weight"}, "layer.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    change, says = DAMAGE[name]
    tensors, _ = layer("nf4", True)
    refused(folder(tmp_path, change(tensors)), SHAPE, f"model.*{says}")


transformers = pytest.importorskip("transformers")


def llama(tied: bool) -> torch.nn.Module:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval()


def by_bitsandbytes(tied: bool, folder: Path, settings: dict[str, object], dtype: torch.dtype) -> torch.nn.Module:
    """As transformers loads it, and saves it into ``folder / "bnb"``."""
    llama(tied).save_pretrained(folder / "float")
    config = transformers.BitsAndBytesConfig(**settings)
    options = {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": dtype}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", **options)
    theirs.save_pretrained(folder / "bnb", max_shard_size="30KB")
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_llama_in_nf4(tied: bool, nested: bool, tmp_path: Path) -> None:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    settings["bnb_4bit_compute_dtype"] = torch.float32
    theirs = by_bitsandbytes(tied, tmp_path, settings, torch.float32)
    assert (tmp_path / "bnb" / "model.safetensors.index.json").exists()

    ours = load_quantized(llama(tied), tmp_path / "bnb").eval()
    assert ours.lm_head.weight is ours.model.embed_tokens.weight or not tied
    assert {explanation.kernel for explanation in explain(ours)} in ({"cpu_lut_mm"}, {"lut_weight_mm"})
    assert sum(isinstance(p, QuantizedTensor) for p in ours.parameters()) == 14
    dequantized = llama(tied)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            value = weight
            if isinstance(weight, QuantizedTensor):
                of_bnb = theirs.get_parameter(name)
                value = functional.dequantize_4bit(of_bnb.data, of_bnb.quant_state)
                assert torch.equal(weight.dequantize(), value), name
            dequantized.get_parameter(name).copy_(value)
        ids = torch.randint(0, 96, (2, 9))
        wanted, exact, got = theirs(ids).logits, dequantized(ids).logits, ours(ids).logits
    assert (exact - got).abs().max() < 1e-5 * exact.abs().max()
    # Some CPU kernels of bitsandbytes multiply in bfloat16.
    assert (wanted - got).abs().max() < 0.02 * wanted.abs().max()

    save_quantized(ours, tmp_path / "ours.safetensors")
    again = load_quantized(llama(tied), tmp_path / "ours.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, got)


@pytest.mark.slow
def test_llama_in_int8(tmp_path: Path) -> None:
    theirs = by_bitsandbytes(False, tmp_path, {"load_in_8bit": True}, torch.float16)
    ours = load_quantized(llama(False).half(), tmp_path / "bnb").eval()
    found = [name for name, weight in ours.named_parameters() if isinstance(weight, QuantizedTensor)]
    assert len(found) == 14
    for name in found:
        module = theirs.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(ours.get_parameter(name).inner_tensors["qdata"], module.weight.data.to(torch.int8))
