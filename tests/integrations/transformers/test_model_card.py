"""README.md of a saved folder."""

from pathlib import Path
from typing import Any

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

from qtorch import quantize_
from qtorch.integrations.transformers import QtorchConfig
from qtorch.integrations.transformers.save_pretrained import model_card
from tests.integrations.transformers.tiny_models import I4, I8, build


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
    assert model_card(again) == model_card(model)


@pytest.mark.parametrize("name", ["/some/folder", "", "a\nb/c", "../up"])
def test_folders_are_no_base_model(name: str) -> None:
    model = build("llama")
    model.name_or_path = name
    quantize_(model, I8)
    assert "base_model" not in model_card(model)


def test_a_card_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    model = build("llama")
    quantize_(model, I8)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


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


def test_config_keeps_the_order_of_a_mapping() -> None:
    config = QtorchConfig({"z": I8, "a": None, r".*": I4})
    again = QtorchConfig.from_dict(config.to_dict())
    assert list(again.recipe.items()) == [("z", I8), ("a", None), (r".*", I4)]
