"""The card of a saved folder, and names of tensors in it."""

import copy
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from qtorch import quantize_
from qtorch.checkpoint.formats.transformers_folder import Index, quantization_config, stored
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.transformers import QtorchConfig, quantizer, save_pretrained
from qtorch.integrations.transformers.loading_plan import StoredWeights
from qtorch.recipes.base import WeightRecipe
from tests.integrations.transformers.tiny_models import I4, I8, assert_same, build
from tests.refusals import refuses


def test_card(tmp_path: Path) -> None:
    model = build("llama")
    model.config._name_or_path = model.name_or_path = "someone/tiny-llama"
    quantize_(model, {"lm_head": I8, r".*": I4})
    model.save_pretrained(tmp_path)
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "someone/tiny-llama"
    assert card.data.to_dict()["base_model_relation"] == "quantized"
    assert card.data.library_name == "transformers"
    assert {"qtorch", "quantized"} <= set(card.data.tags)
    assert "int4_weight_only(group_size=32)" in card.text
    assert "import qtorch" in card.text
    total = sum(parameter.numel() for parameter in model.parameters())
    quantized = total - model.model.embed_tokens.weight.numel() - 3 * 64
    assert f"{quantized / total:.1%} of {total:,} parameters are quantized" in card.text
    assert "| weight int8 PerRow() symmetric | 1 | 4,096 | 4,352 |" in card.text

    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.base_model == "someone/tiny-llama"
    assert save_pretrained.model_card(again) == save_pretrained.model_card(model)


@pytest.mark.parametrize("name", ["/some/folder", "", "a\nb/c", "../up"])
def test_folders_are_no_base_model(name: str) -> None:
    model = build("llama")
    model.name_or_path = name
    quantize_(model, I8)
    assert "base_model" not in save_pretrained.model_card(model)


def test_cards_and_names(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    model = build("llama")
    quantize_(model, I8)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    config = QtorchConfig({"z": I8, "a": None, r".*": I4})
    again = QtorchConfig.from_dict(config.to_dict())
    assert list(again.recipe.items()) == [("z", I8), ("a", None), (r".*", I4)]
    # transformers copies a converter for every key that it takes, and a mixture has a hundred thousand.
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name])
    stored = StoredWeights([str(tmp_path / "model.safetensors")], QtorchConfig(names="checkpoint"), torch.float32)
    names = quantizer.StoredNames(stored, get_model_conversion_mapping(model), model)
    names.add_tensor("target", "source", names.source_patterns[0], Future())
    other = copy.deepcopy(names)
    assert other.owners is names.owners
    assert not other.collected_tensors
    assert not other.layer_targets


@pytest.mark.parametrize("card_on_hub", [None, "---\ntags: [mine]\n---\nmine"])
def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card_on_hub: str | None) -> None:
    """Both ways to push, with an upload that keeps the folder instead."""
    import transformers.utils.hub as hub

    uploaded: list[str] = []

    class Api:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id: str, operations: Any, **kwargs: Any) -> None:
            readme = [each for each in operations if each.path_in_repo == "README.md"]
            uploaded.append(Path(readme[0].path_or_fileobj).read_text())

        create_branch = create_repo

    def load(repo_id: str, **kwargs: Any) -> Any:
        if card_on_hub is None:
            raise huggingface_hub.errors.EntryNotFoundError("none")
        return huggingface_hub.ModelCard(card_on_hub)

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    monkeypatch.setattr(hub.ModelCard, "load", load)
    model = build("llama")
    quantize_(model, I8)
    model.push_to_hub("me/quantized")
    model.save_pretrained(tmp_path / "quantized", push_to_hub=True)
    assert len(uploaded) == 2
    for text in uploaded:
        assert ("quantized by qtorch" in text) == (card_on_hub is None)
        assert "[More Information Needed]" not in text


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


def test_float_experts_and_those_not_alike(tmp_path: Path) -> None:
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
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    experts = [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    rewrite(tmp_path, [name for name in experts if ".w1." in name])
    refuses("quantize all of it", lambda: type(model).from_pretrained(tmp_path))
    rewrite(tmp_path, [name for name in experts if ".w1." not in name], I4)
    refuses("issues during automatic conversion", lambda: type(model).from_pretrained(tmp_path), RuntimeError)
