"""Models that transformers saved with another package, loaded by `load_quantized` alone."""

from pathlib import Path

import pytest
import torch

from qtorch import explain, load_quantized, save_quantized
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor

functional = pytest.importorskip("bitsandbytes.functional")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


def llama(tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_llama_in_nf4(tied: bool, nested: bool, tmp_path: Path) -> None:
    llama(tied).save_pretrained(tmp_path / "float")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "bnb", max_shard_size="30KB")
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
    llama(False).save_pretrained(tmp_path / "float")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float",
        quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True),
        device_map={"": "cpu"},
        dtype=torch.float16,
    )
    theirs.save_pretrained(tmp_path / "bnb")
    ours = load_quantized(llama(False).half(), tmp_path / "bnb").eval()
    found = [name for name, weight in ours.named_parameters() if isinstance(weight, QuantizedTensor)]
    assert len(found) == 14
    for name in found:
        module = theirs.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(ours.get_parameter(name).inner_tensors["qdata"], module.weight.data.to(torch.int8))


def test_contents_of_a_plain_model(tmp_path: Path) -> None:
    model = llama(True)
    model.save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        assert source.names == {name for name, _ in model.named_parameters()}
        assert all(source.contents(name).scheme is None for name in source.names)
    with torch.no_grad():
        changed = llama(True)
        changed.model.norm.weight.zero_()
        load_quantized(changed, tmp_path)
        ids = torch.arange(7)[None]
        assert torch.equal(changed(ids).logits, model(ids).logits)
