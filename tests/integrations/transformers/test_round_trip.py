"""On the fly -> save -> load -> save -> load, bit for bit; transformers itself loads and generates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import qtorch
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.accelerate import dispatch_model
from qtorch.integrations.transformers import QtorchConfig
from tests.every_recipe import NAMES, make
from tests.integrations.transformers.tiny_models import CASES, I4, I8, assert_same, build, quantized_names, run
from tests.refusals import refuses


@pytest.mark.parametrize("name", CASES)
def test_load_save_load_save_load(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    build(name).save_pretrained(tmp_path / "float")
    model = case.kind.from_pretrained(tmp_path / "float", quantization_config=QtorchConfig(case.recipe))

    wanted = case.kind.from_pretrained(tmp_path / "float")
    qtorch.quantize_(wanted, {**case.left, **case.recipe})
    assert_same(model, wanted)
    assert quantized_names(model)

    model.save_pretrained(tmp_path / "one", max_shard_size=10_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    once, info = case.kind.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(once, model)

    once.save_pretrained(tmp_path / "two")
    twice = case.kind.from_pretrained(tmp_path / "two")
    assert_same(twice, model)
    assert torch.equal(run(name, twice), run(name, model))
    assert torch.equal(run(name, twice), run(name, wanted))

    # And without transformers' loader.
    assert_same(qtorch.load_quantized(build(name), tmp_path / "one"), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe(tmp_path: Path, name: str) -> None:
    recipe = make(name, 32)
    model = build("llama")
    qtorch.quantize_(model, {"lm_head": None, r".*": recipe})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(loaded, model)
    x = torch.arange(6)[None]
    assert torch.equal(loaded(x).logits, model(x).logits)


@pytest.mark.parametrize("recipe", [I8, qtorch.int4_weight_only(group_size=32), qtorch.nf4_weight_only(group_size=32)])
def test_a_base_model_loads_from_the_folder_of_a_model_with_a_head(tmp_path: Path, recipe: Any) -> None:
    model = build("llama")
    qtorch.quantize_(model, recipe)
    model.save_pretrained(tmp_path)
    assert_same(type(model.model).from_pretrained(tmp_path), model.model)


def test_dtypes_of_a_model_and_of_its_weights(tmp_path: Path) -> None:
    model = build("llama")
    qtorch.quantize_(model, {"lm_head": qtorch.uintx_weight_only("uint4", group_size=32), r".*": I8})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.bfloat16}
    weight, before = loaded.lm_head.weight, model.lm_head.weight
    assert torch.equal(weight.dequantize(torch.float32), before.dequantize())
    assert loaded(torch.arange(6)[None]).logits.dtype is torch.bfloat16
    qtorch.quantize_(model, {r".*\.mlp\..*": I8})
    model = model.to(torch.bfloat16)
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach().to(torch.float16), requires_grad=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(loaded, model)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate")
    build("llama").save_pretrained(tmp_path / "float")
    kind = CASES["llama"].kind
    config = QtorchConfig(I8)
    model = kind.from_pretrained(tmp_path / "float", quantization_config=config, device_map=device_map)
    assert len(quantized_names(model)) == 7
    model.save_pretrained(tmp_path / "q")
    assert_same(kind.from_pretrained(tmp_path / "q", device_map=device_map), model)


@pytest.mark.parametrize("pre_quantized", [False, True])
def test_disk_is_refused_with_advice_that_works(tmp_path: Path, pre_quantized: bool) -> None:
    model = build("llama")
    if pre_quantized:
        qtorch.quantize_(model, I8)
    model.save_pretrained(tmp_path)
    config: dict[str, Any] = {} if pre_quantized else {"quantization_config": QtorchConfig(I8)}
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match=r"on 'disk'.*device_map='cpu'.*accelerate\.dispatch_model"):
        type(model).from_pretrained(tmp_path, device_map=device_map, **config)
    loaded = type(model).from_pretrained(tmp_path, device_map="cpu", **config)
    x = torch.arange(6)[None]
    wanted = loaded(x).logits
    device_map = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    dispatched = dispatch_model(loaded, {**device_map, "model.rotary_emb": "cpu"}, offload_dir=tmp_path / "disk")
    assert dispatched.model.layers[0].mlp.up_proj.weight.is_meta
    assert torch.equal(dispatched(x).logits, wanted)


def test_folders_that_are_refused_and_aligned_weights(tmp_path: Path) -> None:
    model = build("llama")
    kind = type(model)
    qtorch.quantize_(model, qtorch.float8_weight_only())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not from a state dict"):
        kind.from_pretrained(None, config=type(model.config).from_pretrained(tmp_path), state_dict={})
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = config.read_text()
    config.write_text(text.replace('"intermediate_size": 64', '"intermediate_size": 96'))
    refuses("issues during automatic conversion", lambda: kind.from_pretrained(tmp_path), RuntimeError)
    config.write_text(text)
    file.write_bytes(file.read_bytes().replace(b"weight_scale", b"weight_scald", 1))
    refuses("missing key", lambda: kind.from_pretrained(tmp_path))
    model = build("llama")
    qtorch.quantize_(model, replace(I4, group_size=8))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    inner = [t for p in loaded.parameters() if isinstance(p, QuantizedTensor) for t in p.inner_tensors.values()]
    assert inner
    assert all(tensor.data_ptr() % 64 == 0 for tensor in inner)
