"""Folders whose names are those of an older checkpoint, as a writer that builds no model leaves them."""

import copy
import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping

from qtorch import quantize_
from qtorch.checkpoint.formats.transformers_folder import Index, quantization_config, stored
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.transformers import QtorchConfig
from qtorch.integrations.transformers.conversions import StoredNames
from qtorch.integrations.transformers.loading_plan import StoredWeights
from qtorch.recipes.base import WeightRecipe
from tests.integrations.transformers.tiny_models import I4, I8, assert_same, build
from tests.refusals import refuses


def rewrite(folder: Path, names: list[str], recipe: WeightRecipe = I8) -> None:
    """Quantize the tensors of these names in the files, and leave all others as they are."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        index = Index.parse(opened.metadata())
    for name in names:
        weight = recipe.apply(tensors.pop(name))
        assert isinstance(weight, QuantizedTensor)
        parts, index.quantized[name] = stored(name, weight)
        tensors |= parts
    save_file(tensors, file, {"format": "pt", **index.to_metadata()})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(I8, names="checkpoint")
    (folder / "config.json").write_text(json.dumps(config))


def test_float_experts_are_fused_beside_quantized_layers(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.0.w1.weight") for name in before)
    names = [name for name in before if name.endswith(("q_proj.weight", "o_proj.weight", ".gate.weight"))]
    rewrite(tmp_path, names)
    loaded = type(model).from_pretrained(tmp_path)
    quantize_(model, {r".*\.(q_proj|o_proj)": I8, r".*\.gate\.weight": I8})
    assert_same(loaded, model)
    x = torch.arange(6)[None]
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_experts_that_are_not_quantized_alike_are_refused(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    experts = [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    rewrite(tmp_path, [name for name in experts if ".w1." in name])
    refuses("quantize all of it", lambda: type(model).from_pretrained(tmp_path))
    rewrite(tmp_path, [name for name in experts if ".w1." not in name], I4)
    refuses("issues during automatic conversion", lambda: type(model).from_pretrained(tmp_path), RuntimeError)


def test_names_are_looked_up_in_one_table(tmp_path: Path) -> None:
    """transformers copies a converter for every key that it takes, and a mixture has a hundred thousand."""
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name])
    stored = StoredWeights([str(tmp_path / "model.safetensors")], QtorchConfig(names="checkpoint"), torch.float32)
    names = StoredNames(stored, get_model_conversion_mapping(model), model)
    names.add_tensor("target", "source", names.source_patterns[0], Future())
    other = copy.deepcopy(names)
    assert other.owners is names.owners
    assert not other.collected_tensors
    assert not other.layer_targets
