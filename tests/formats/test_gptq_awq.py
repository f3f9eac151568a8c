"""Checkpoints of GPTQ and AWQ, read and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qtorch
from tests.formats.folders import check, load, plain_tensors, quantized_config, refused, to_dtype, write

OUTPUTS, INPUTS = 32, 96
SHAPE = OUTPUTS, INPUTS


def bit(words: list[int], position: int) -> int:
    return (words[position // 32] >> (position % 32)) & 1


def dense(words: list[int], bits: int) -> list[int]:
    """The codes in a row of words, whose bits follow each other from word to word."""
    count = len(words) * 32 // bits
    return [sum(bit(words, j * bits + k) << k for k in range(bits)) for j in range(count)]


def planar(words: list[int], bits: int) -> list[int]:
    """GPTQModel's gptq_p: for every 32 codes, the words of their low bits, then of their high bits."""
    planes = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]
    codes = []
    for block in range(0, len(words), bits):
        values, at, low = [0] * 32, block, 0
        for width in planes:
            for j, part in enumerate(dense(words[at : at + width], width)):
                values[j] |= part << low
            at, low = at + width, low + width
        codes += values
    return codes


def unsigned(row: Tensor) -> list[int]:
    return [int(word) % 2**32 for word in row]


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def layer(bits: int, groups: int, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return {
        "layer.qweight": random_words(INPUTS * bits // 32, OUTPUTS),
        "layer.qzeros": random_words(groups, OUTPUTS * bits // 32),
        "layer.scales": (torch.rand(groups, OUTPUTS) + 0.01).to(dtype),
        **plain_tensors(INPUTS, dtype),
    }


def decoded(tensors: dict[str, Tensor], bits: int, group: int, plus: int, unpack=dense) -> Tensor:  # type: ignore[no-untyped-def]
    scales = tensors["layer.scales"].tolist()
    zeros = [unpack(unsigned(row), bits) for row in tensors["layer.qzeros"]]
    values = []
    for o in range(OUTPUTS):
        codes = unpack(unsigned(tensors["layer.qweight"][:, o]), bits)
        values.append([scales[i // group][o] * (codes[i] - zeros[i // group][o] - plus) for i in range(INPUTS)])
    return to_dtype(values, tensors["layer.scales"].dtype)


def without_largest(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The same with stored zero points below the largest, the lowest bit of each code cleared."""
    keep = sum(1 << k for k in range(32 * bits) if k % bits)
    masks = [(keep >> (32 * w)) % 2**32 for w in range(bits)]
    words = tensors["layer.qzeros"].shape[1]
    mask = torch.tensor([masks[w % bits] for w in range(words)], dtype=torch.int64).to(torch.int32)
    return {**tensors, "layer.qzeros": tensors["layer.qzeros"] & mask}


def folder(
    tmp_path: Path, tensors: dict[str, Tensor], dtype: str = "float16", method: str = "gptq", **more: object
) -> Path:
    settings = {"bits": 4, "group_size": 32, **({"checkpoint_format": "gptq_v2"} if method == "gptq" else {}), **more}
    return write(tmp_path / "model", tensors, 2, quantized_config(method, dtype, **settings))


def v1(tmp_path: Path, tensors: dict[str, Tensor], **more: object) -> Path:
    return folder(tmp_path, tensors, checkpoint_format="gptq", **more)


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(version: str, bits: int, group: int, tmp_path: Path) -> None:
    tensors = without_largest(layer(bits, INPUTS // group), bits)
    tensors["layer.g_idx"] = torch.arange(INPUTS, dtype=torch.int32) // group
    size = -1 if group == INPUTS else group
    made = folder(tmp_path, tensors, bits=bits, group_size=size, checkpoint_format=version)
    check(made, decoded(tensors, bits, group, plus=int(version == "gptq")), "cpu_weight_only_mm", bits + 24 / group)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_planes_of_gptqmodel(bits: int, tmp_path: Path) -> None:
    tensors = layer(bits, 3)
    made = folder(tmp_path, tensors, bits=bits, checkpoint_format="gptq_p")
    check(made, decoded(tensors, bits, 32, 0, planar), "cpu_weight_only_mm", bits + 24 / 32)


def test_groups_widths_and_borrows(tmp_path: Path) -> None:
    """Groups of 64 in rows of 96: parts of 32, with copies of the scale."""
    tensors = layer(4, 2)
    weight = check(folder(tmp_path, tensors, group_size=64), decoded(tensors, 4, 64, 0), "cpu_weight_only_mm", 5)
    assert weight.scheme.weight.granularity.group_size == 32
    # GPTQModel's `dynamic`: the shapes say what a layer has.
    tensors, of_layer = layer(8, 3), {"layer": {"bits": 8, "group_size": 32}}
    made = folder(tmp_path, tensors, group_size=96, dynamic=of_layer)
    check(made, decoded(tensors, 8, 32, 0), "cpu_weight_only_mm", 9)
    # It subtracts whole words, so 0 - 1 borrows from the neighbour; adding the word gives all of them back.
    tensors = layer(4, 3)
    zeros = torch.randint(0, 16, (3, OUTPUTS))
    zeros[0, :3] = torch.tensor([0, 5, 0])
    words = (zeros.reshape(3, -1, 8) << (4 * torch.arange(8))).sum(-1)
    tensors["layer.qzeros"] = (words - 0x11111111).to(torch.int32)
    true = {**tensors, "layer.qzeros": words.to(torch.int32)}
    weight = load(v1(tmp_path, tensors, meta={"quantizer": ["gptqmodel:4.0.0"]}), SHAPE)
    assert torch.equal(weight.dequantize(), decoded(true, 4, 32, 0))


def test_what_the_configuration_says(tmp_path: Path) -> None:
    """bfloat16 models have scales in float16."""
    tensors = layer(4, 3)
    weight = load(folder(tmp_path, tensors, "bfloat16"), SHAPE)
    assert weight.dequantize().dtype is torch.bfloat16
    assert weight.inner_tensors["scale"].dtype is torch.float16
    exact = decoded({**tensors, "layer.scales": tensors["layer.scales"].float()}, 4, 32, 0)
    assert torch.equal(weight.dequantize(), exact.to(torch.bfloat16))
    # In a file of its own, where config.json says nothing.
    tensors = without_largest(layer(4, 3), 4)
    made = write(tmp_path / "own", tensors, 1, {"torch_dtype": "float16"})
    (made / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    assert torch.equal(load(made, SHAPE).dequantize(), decoded(tensors, 4, 32, 1))
    # AutoGPTQ stored one for every layer, also where the model has none.
    tensors = {**layer(4, 3), "layer.bias": torch.zeros(OUTPUTS, dtype=torch.float16)}
    load(folder(tmp_path, tensors), SHAPE)
    tensors["layer.bias"][0] = 1
    refused(folder(tmp_path, tensors), SHAPE, r"unexpected key layer.bias")


PACKINGS = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}


@pytest.mark.parametrize("packing", PACKINGS)
def test_auto_round(packing: str, tmp_path: Path) -> None:
    tensors = without_largest(layer(4, 3), 4)
    made = folder(tmp_path, tensors, method="auto-round", packing_format=packing)
    check(made, decoded(tensors, 4, 32, PACKINGS[packing]), "cpu_weight_only_mm", 4.75)


UNORDERED = (torch.arange(INPUTS, dtype=torch.int32) // 32).roll(7)
DAMAGE = {
    "no scales": ({"layer.scales": None}, "layer.scales is missing"),
    "no zero points": ({"layer.qzeros": None}, "layer.qzeros is missing"),
    "codes in int64": ({"layer.qweight": torch.zeros(12, OUTPUTS, dtype=torch.int64)}, "layer.qweight has shape"),
    "codes in 3-d": ({"layer.qweight": torch.zeros(1, 12, OUTPUTS, dtype=torch.int32)}, "layer.qweight has shape"),
    "too many scales": ({"layer.scales": torch.ones(3, OUTPUTS + 1).half()}, "layer.scales has shape"),
    "no such width": ({"layer.qzeros": torch.zeros(3, 5, dtype=torch.int32)}, "no packing of codes of 2, 3, 4, 8 bits"),
    "no such groups": (
        {"layer.scales": torch.ones(7, OUTPUTS).half(), "layer.qzeros": torch.zeros(7, 4, dtype=torch.int32)},
        "rows of 96 have 7 groups; the group_size of the configuration is 32",
    ),
    "another g_idx": ({"layer.g_idx": torch.zeros(95, dtype=torch.int32)}, "layer.g_idx has shape"),
    "desc_act": ({"layer.g_idx": UNORDERED}, r"layer.weight: g_idx groups inputs out of order \(desc_act=True\)"),
    "huge g_idx": ({"layer.g_idx": UNORDERED * 0 + 2**31 - 1}, "layer.weight: g_idx groups inputs out of order"),
    "also a float weight": ({"layer.weight": torch.zeros(SHAPE)}, "layer.weight is stored quantized and in"),
    "empty": ({"layer.qweight": torch.zeros(0, 0, dtype=torch.int32)}, "layer.scales has shape"),
    "a zero point that readers disagree about": (
        {"layer.qzeros": torch.full((3, 4), 0xF0, dtype=torch.int32)},
        "safetensors: layer.weight: a zero point is stored as 15; in the form",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    change, says = DAMAGE[name]
    merged: dict[str, Tensor | None] = {**without_largest(layer(4, 3), 4), **change}
    tensors = {key: tensor for key, tensor in merged.items() if tensor is not None}
    refused(v1(tmp_path, tensors), SHAPE, f"model.*{says}")


@pytest.mark.parametrize("settings, says", [
    ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read; known: gptq"),
    ({"checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas' is not read; known: gptq"),
    ({"method": "auto-round", "packing_format": "auto_round:llm_compressor"},
     "model: packing_format is 'auto_round:llm_compressor', which is not read"),
])  # fmt: skip
def test_packings_that_are_not_read_are_named(settings: dict[str, str], says: str, tmp_path: Path) -> None:
    refused(folder(tmp_path, layer(4, 3), **settings), SHAPE, says)


BITS32 = torch.arange(32)

RECIPES = {
    "uint4": qtorch.int4_weight_only(group_size=32),
    "int4": qtorch.intx_weight_only("int4", group_size=64),
    "int8": qtorch.int8_weight_only(group_size=32),
    "int8 rows": qtorch.int8_weight_only(scale_dtype=torch.bfloat16),
    "int3": qtorch.intx_weight_only("int3", group_size=32),
    "int2": qtorch.intx_weight_only("int2", group_size=32),
}
CASES = [("gptq", name) for name in RECIPES] + [("awq", name) for name in ("int4", "uint4")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(torch.bfloat16)


def bits_of(words: torch.Tensor) -> torch.Tensor:
    """(R, W) int32 -> bits (R, 32 W), the lowest first."""
    return ((words[..., None] >> BITS32) & 1).flatten(1)


def numbers(bits: torch.Tensor, width: int) -> torch.Tensor:
    return (bits.unflatten(1, (-1, width)) << torch.arange(width)).sum(-1)


def stored_layer(path: Path, layer: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration of a folder, and the tensors of a layer by their last names."""
    stored = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return config, {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(f"{layer}.")}


def by_formula(path: Path, layer: str) -> torch.Tensor:
    """The weight (O, I) of a layer in fp32, w = (q - z) s, from the definitions of both formats."""
    config, stored = stored_layer(path, layer)
    width, scales, words, zeros = config["bits"], stored["scales"].float(), stored["qweight"], stored["qzeros"]
    if config["quant_method"] == "gptq":
        q = numbers(bits_of(words.t().contiguous()), width)
        z = numbers(bits_of(zeros), width) + (config["checkpoint_format"] == "gptq")
        group = stored["g_idx"].long()
        return ((q - z[group].t()) * scales[group].t()).float()
    nibble = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    unpack = lambda words: numbers(bits_of(words), 4).unflatten(1, (-1, 8))[:, :, nibble].flatten(1)  # noqa: E731
    q, z = unpack(words), unpack(zeros)
    group = torch.arange(len(q)) // (len(q) // len(z))
    return ((q - z[group]) * scales[group]).t()


def by_auto_round(path: Path, layer: str) -> torch.Tensor:
    """The weight (O, I) of a layer as auto-round dequantizes it, in fp32."""
    config, stored = stored_layer(path, layer)
    width, scales, words, zeros = config["bits"], stored["scales"].float(), stored["qweight"], stored["qzeros"]
    if config["quant_method"] == "awq":
        dequantize = pytest.importorskip("auto_round.export.export_to_awq.utils").dequantize_gemm
        return dequantize(words, zeros, scales, width, len(words) // len(scales)).t()
    of_version = {"gptq": "qlinear_torch_zp", "gptq_v2": "qlinear_torch"}[config["checkpoint_format"]]
    inputs, outputs = len(words) * 32 // width, words.shape[1]
    made = pytest.importorskip(f"auto_round_extension.torch.{of_version}").QuantLinear(
        width, inputs // len(scales), inputs, outputs, bias=False
    )
    made.qweight, made.qzeros, made.scales = words, zeros, scales
    return made(torch.eye(inputs)).t()


@pytest.mark.parametrize("format, name", CASES)
def test_against_auto_round(format: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("auto_round")
    model = build()
    qtorch.quantize_(model, RECIPES[name])
    qtorch.save_quantized(model, tmp_path / "made", format=format)
    for layer in ("0", "2"):
        assert torch.equal(
            by_auto_round(tmp_path / "made", layer), model.get_submodule(layer).weight.dequantize(torch.float32)
        )


@pytest.mark.parametrize("format, name", CASES)
def test_bit_for_bit(format: str, name: str, tmp_path: Path) -> None:
    model = build()
    qtorch.quantize_(model, RECIPES[name])
    qtorch.save_quantized(model, tmp_path / "made", format=format)
    loaded = build()
    qtorch.load_quantized(loaded, tmp_path / "made")
    for layer in ("0", "2"):
        weight = model.get_submodule(layer).weight
        assert torch.equal(loaded.get_submodule(layer).weight.dequantize(), weight.dequantize())
        assert torch.equal(by_formula(tmp_path / "made", layer), weight.dequantize(torch.float32))
    assert torch.equal(loaded[1].weight, model[1].weight)


REFUSED = {
    "float8": (qtorch.float8_weight_only(), "has codes in float8_e4m3fn, and the format has integers"),
    "nf4": (qtorch.nf4_weight_only(group_size=32), "is a LUTQuantizedTensor"),
    "activations": (qtorch.int8_dynamic_activation_int4_weight(group_size=32), "quantizes its activations"),
    "fp32 scales": (qtorch.int8_weight_only(), r"has scales in torch.float32, and engines keep them in torch.bfloat16"),
    "five bits": (qtorch.intx_weight_only("int5", group_size=32), "has codes in int5"),
}


@pytest.mark.parametrize("format", ["gptq", "awq"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(format: str, name: str, tmp_path: Path) -> None:
    recipe, message = REFUSED[name]
    model = build()
    qtorch.quantize_(model, recipe)
    if format == "awq" and name == "fp32 scales":
        message = "has codes in int8"
    with pytest.raises(ValueError, match=rf"{format}: 0.weight {message}.*quantize with int"):
        qtorch.save_quantized(model, tmp_path / "made", format=format)
    assert not (tmp_path / "made").exists()


def test_one_kind_of_weight_and_zero_points_of_zero(tmp_path: Path) -> None:
    model = build()
    qtorch.quantize_(model, {"0": RECIPES["int4"], "2": RECIPES["int3"]})
    with pytest.raises(ValueError, match=r"gptq: 2.weight has .*a folder has one of each"):
        qtorch.save_quantized(model, tmp_path / "made", format="gptq")
    positive = nn.Sequential(nn.Linear(128, 64)).to(torch.bfloat16)
    positive[0].weight.data.abs_()
    qtorch.quantize_(positive, RECIPES["uint4"])
    own = tmp_path / "own.safetensors"
    qtorch.save_quantized(positive, own)
    with pytest.raises(ValueError, match=r"gptq: 0.weight has zero points of 0.*gptq_v2"):
        qtorch.save_quantized(positive, tmp_path / "made", format="gptq")
    qtorch.convert_checkpoint(own, tmp_path / "v2", format="gptq", options={"checkpoint_format": "gptq_v2"})
    assert torch.equal(by_formula(tmp_path / "v2", "0"), positive[0].weight.dequantize(torch.float32))


def test_a_checkpoint_is_converted_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qtorch.cli import main

    model = build()
    qtorch.quantize_(model, RECIPES["int4"])
    qtorch.save_quantized(model, tmp_path / "own.safetensors")
    assert not main(["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "awq"), "--format", "awq"])
    assert not main(["convert", str(tmp_path / "awq"), str(tmp_path / "gptq"), "--format", "gptq"])
    assert torch.equal(by_formula(tmp_path / "gptq", "0"), model[0].weight.dequantize(torch.float32))


AWQ_OUTPUTS, AWQ_INPUTS, GROUP = 32, 64, 32
AWQ_SHAPE = AWQ_OUTPUTS, AWQ_INPUTS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each nibble, from the lowest."""


def layer_of_awq() -> dict[str, Tensor]:
    words = torch.randint(-(2**31), 2**31, (AWQ_INPUTS + AWQ_INPUTS // GROUP, AWQ_OUTPUTS // 8)).to(torch.int32)
    return {
        "layer.qweight": words[:AWQ_INPUTS],
        "layer.qzeros": words[AWQ_INPUTS:],
        "layer.scales": (torch.rand(AWQ_INPUTS // GROUP, AWQ_OUTPUTS) + 0.01).half(),
        **plain_tensors(AWQ_INPUTS, torch.float16),
    }


def config(**more: object) -> dict[str, object]:
    return quantized_config("awq", **{"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, **more})


def folder_of_awq(tmp_path: Path, tensors: dict[str, Tensor], **more: object) -> Path:
    return write(tmp_path / "model", tensors, 2, config(**more))


def outputs(words: Tensor) -> list[int]:
    """The outputs in a row of words."""
    found = [0] * (8 * len(words))
    for w, word in enumerate(words.tolist()):
        for i, output in enumerate(ORDER):
            found[8 * w + output] = (word >> (4 * i)) & 0xF
    return found


def test_awq_by_plain_loops_and_compressed_tensors(tmp_path: Path) -> None:
    tensors = layer_of_awq()
    codes, zeros = ([outputs(row) for row in tensors[f"layer.{name}"]] for name in ("qweight", "qzeros"))
    scales = tensors["layer.scales"].tolist()
    values = [
        [scales[i // GROUP][o] * (codes[i][o] - zeros[i // GROUP][o]) for i in range(AWQ_INPUTS)]
        for o in range(AWQ_OUTPUTS)
    ]
    check(folder_of_awq(tmp_path, tensors), to_dtype(values, torch.float16), "cpu_weight_only_mm", 4.75)
    tensors = layer_of_awq()
    wanted = load(write(tmp_path / "awq", tensors, 1, config()), AWQ_SHAPE).dequantize()
    of_auto_round = quantized_config("auto-round", bits=4, group_size=GROUP, packing_format="auto_round:auto_awq")
    check(write(tmp_path / "auto", tensors, 1, of_auto_round), wanted, "cpu_weight_only_mm", 4.75)
    tensors = layer_of_awq()
    wanted = load(write(tmp_path / "new", tensors, 1, config()), AWQ_SHAPE).dequantize()
    former = write(tmp_path / "former", tensors, 1, {"torch_dtype": "float16"})
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    (former / "quant_config.json").write_text(json.dumps(settings))
    assert torch.equal(load(former, AWQ_SHAPE).dequantize(), wanted)
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    tensors = layer_of_awq()
    converter = converters.AutoAWQConverter(group_size=GROUP, targets=["re:.*layer"])
    converted = converter.process({name: t.clone() for name, t in tensors.items() if name.startswith("layer.")})
    scheme = converter.update_config(None).config_groups["config_group_0"]
    parts = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    made = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)
    weight = load(folder_of_awq(tmp_path, tensors), AWQ_SHAPE)
    assert torch.equal(weight.dequantize(), made["weight"])


@pytest.mark.parametrize(("more", "says"), [
    ({"version": "gemv"}, "AWQ of version 'gemv' is not read, only 'gemm'"),
    ({"bits": 3}, "AWQ of 3 bits is not read, only 4"),
])  # fmt: skip
def test_other_packings_are_refused_by_name(more: dict[str, object], says: str, tmp_path: Path) -> None:
    refused(folder_of_awq(tmp_path, layer_of_awq(), **more), AWQ_SHAPE, f"model: {says}")


@pytest.mark.parametrize("name", ["qzeros", "scales"])
def test_damage_is_named_of_awq(name: str, tmp_path: Path) -> None:
    tensors = layer_of_awq()
    tensors[f"layer.{name}"] = tensors[f"layer.{name}"][:, 1:]
    refused(folder_of_awq(tmp_path, tensors), AWQ_SHAPE, f"safetensors: layer.{name} has shape")
    del tensors[f"layer.{name}"]
    refused(folder_of_awq(tmp_path, tensors), AWQ_SHAPE, f"model: layer.{name} is missing")
