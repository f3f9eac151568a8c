"""Models that transformers saved with another package, loaded by `load_quantized` alone."""

from pathlib import Path

import pytest
import torch

from qtorch import explain, load_quantized, save_quantized
from qtorch.dtypes import QuantizedTensor

functional = pytest.importorskip("bitsandbytes.functional")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


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


def test_llama_in_int8(tmp_path: Path) -> None:
    theirs = by_bitsandbytes(False, tmp_path, {"load_in_8bit": True}, torch.float16)
    ours = load_quantized(llama(False).half(), tmp_path / "bnb").eval()
    found = [name for name, weight in ours.named_parameters() if isinstance(weight, QuantizedTensor)]
    assert len(found) == 14
    for name in found:
        module = theirs.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(ours.get_parameter(name).inner_tensors["qdata"], module.weight.data.to(torch.int8))
