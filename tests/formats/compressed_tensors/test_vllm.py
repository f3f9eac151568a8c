"""The scheme that vLLM takes, by a copy of its table."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from qtorch import quantize_, save_quantized, uintx_weight_only
from qtorch.checkpoint.formats.compressed_tensors.scheme import Args, Group
from qtorch.checkpoint.formats.compressed_tensors.vllm import EMBEDDING, EXPERTS, LINEAR, decide
from qtorch.checkpoint.formats.compressed_tensors.write import serve
from tests.formats.compressed_tensors.cases import CASES, GROUPS, Case
from tests.refusals import refuses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_scheme_of_every_recipe(case: Case) -> None:
    weight = case.make(torch.randn(64, 64))
    group, scheme = serve("layers.0.mlp.down_proj", weight)
    assert (scheme, group.format) == (case.scheme, case.format)
    if case.of_expert is None:
        refuses("vLLM has no scheme for weights", lambda: serve("layers.0.mlp.experts.0.down_proj", weight))
    else:
        assert serve("layers.0.mlp.experts.0.down_proj", weight)[1] == case.of_expert
    if case.scheme == "CompressedTensorsWNA16" and not weight.scheme.weight.has_zero_point:
        assert serve("model.embed_tokens", weight)[1] == "CompressedTensorsEmbeddingWNA16Int"
    else:
        refuses("vLLM has no scheme", lambda: serve("model.embed_tokens", weight))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_file_says_what_the_table_was_asked(case: Case, tmp_path: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    model["proj"].weight = nn.Parameter(case.make(torch.randn(64, 64)), requires_grad=False)
    save_quantized(model, tmp_path / "model", format="compressed-tensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    (entry,) = config["config_groups"].values()
    inputs = entry["input_activations"]
    group = Group(Args.parse(entry["weights"]), None if inputs is None else Args.parse(inputs), entry["format"])
    assert decide(group) == case.scheme


@pytest.mark.parametrize("word", GROUPS)
def test_what_the_package_writes_by_itself(word: str) -> None:
    """Weights alone: formats with a byte per integer are for quantized inputs."""
    format, weights = GROUPS[word]
    group = Group(Args.parse(weights), None, format)
    refused = "in bytes" in word or word == "naive int8"
    odd = word.startswith("asymmetric") and weights["num_bits"] not in (4, 8)
    if refused or odd:
        refuses("zero points for codes of 4 and 8 bits" if odd else "has no scheme", lambda: decide(group))
        return
    expected = {
        "pack-quantized": "CompressedTensorsWNA16",
        "float-quantized": "CompressedTensorsW8A16Fp8",
        "naive-quantized": "CompressedTensorsW8A16Fp8",
        "mxfp4-pack-quantized": "CompressedTensorsW4A4Mxfp4",
        "mxfp8-quantized": "CompressedTensorsW8A8Mxfp8",
        "nvfp4-pack-quantized": "CompressedTensorsW4A4Fp4(use_a16=True)",
    }
    assert decide(group) == expected[format]


def test_on_hopper_int4_weights_with_symmetric_int8_inputs_come_to_the_float8_kernel() -> None:
    """vLLM does not ask for the type of the input before it takes W4A8Fp8 there; the default has a zero point."""
    weights = Args(4, "int", True, "group", 128)
    symmetric = Group(weights, Args(8, "int", True, "token", dynamic=True), "int-quantized")
    asymmetric = Group(weights, Args(8, "int", False, "token", dynamic=True), "int-quantized")
    assert decide(symmetric) == decide(asymmetric) == "CompressedTensorsW4A8Int"
    assert decide(symmetric, capability=90) == "CompressedTensorsW4A8Fp8"
    assert decide(asymmetric, capability=90) == "CompressedTensorsW4A8Int"
    assert decide(symmetric, capability=89) == "CompressedTensorsW4A8Int"


def test_other_tables() -> None:
    nvfp4 = Args(4, "float", True, "tensor_group", 16)
    local = Args(4, "float", True, "tensor_group", 16, dynamic="local")
    assert decide(Group(nvfp4, local, "nvfp4-pack-quantized")) == "CompressedTensorsW4A4Fp4"
    mxfp4, fp8 = Args(4, "float", True, "group", 32), Args(8, "float", True, "group", 128, dynamic=True)
    assert decide(Group(mxfp4, fp8, "mxfp4-pack-quantized")) == "CompressedTensorsW4A8Mxfp4"
    int4 = Args(4, "int", True, "token", dynamic=True)
    assert decide(Group(Args(4, "int", True, "channel"), int4, "pack-quantized")) == "CompressedTensorsWNA4Int"
    assert len({decision.scheme for table in (LINEAR, EXPERTS, EMBEDDING) for decision in table}) == 24


def test_unsigned_codes_of_odd_widths_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    quantize_(model, uintx_weight_only("uint3", group_size=32))
    with pytest.raises(ValueError, match=r"proj\.weight: CompressedTensorsWNA16: vLLM has zero points for codes of 4"):
        save_quantized(model, tmp_path / "model", format="compressed-tensors")
    assert not (tmp_path / "model").exists()
