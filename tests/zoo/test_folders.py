"""Folders of every architecture: loaded on the fly, or quantized by the command line, then saved and saved again.

Weights and outputs are those of `quantize_` on the float model, bit for bit. What cannot be so is refused by name
before anything is written.
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from qtorch import int4_weight_only, int8_weight_only, load_quantized, quantize_, quantize_checkpoint
from qtorch.cli import main
from qtorch.cli.recipes import read_recipe
from qtorch.dtypes.joining import join, shares_scales
from qtorch.integrations.transformers import QtorchConfig
from tests.every_recipe import NAMES, make
from tests.fast_part import slow_but
from tests.integrations.transformers.tiny_models import assert_same, quantized_names
from tests.zoo.architectures import ARCHITECTURES, built, output_of

pytestmark = pytest.mark.filterwarnings("ignore")

BY_NAME = {
    r".*\.(layers?|h|block|blocks|stages)\.0\..*": "int8_weight_only()",
    r".*": "int4_weight_only(group_size=32)",
}
RECIPES: dict[str, Any] = {
    "int8": "int8_weight_only()",
    "w8a8": "int8_dynamic_activation_int8_weight()",
    "int4": "int4_weight_only(group_size=32)",
    "nf4": "nf4_weight_only(group_size=32, double_quantize=False)",
    "float8": "float8_weight_only()",
    "by_name": BY_NAME,
}
"""As the command line takes them."""

WITH_ALL_RECIPES = (
    *("llama", "gemma3", "phi3", "gpt2", "opt", "bert", "nomic_bert", "t5", "vit"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"),
)
"""Architectures that are tested with every recipe; the others have one."""

LEFT = re.compile(
    r"(.*\.)?(lm_head|proj_out|classifier|text_projection|decoder|shared|wte|embed_tokens|embeddings|\w+_embeddings)"
    r"\.weight|.*\.(wo\.weight|input_gate_weight|recurrent_gate_weight)"
)
"""What `quantize_` reaches and the other ways leave: heads and what is tied to them, T5's `wo`, bare parameters."""

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "nemotron_h", "jamba")
"""Whose experts are stored one by one, and are one parameter in the model."""


QUICK = [("mixtral", kind) for kind in ("int8", "int4", "by_name")]
QUICK += [(name, "int8") for name in ("llama", "gpt2", "t5", "llama4")]


def cases() -> Iterator[tuple[str, str]]:
    for number, name in enumerate(ARCHITECTURES):
        kinds = list(RECIPES)
        for kind in kinds if name in WITH_ALL_RECIPES else [kinds[number % len(kinds)]]:
            yield name, kind


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of a name with its batch and its folder, which is written once."""
    folders: dict[str, Path] = {}

    def get(name: str) -> tuple[Any, dict[str, Any], Path]:
        model, batch = built(name)
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(folders[name])
        return model, batch, folders[name]

    return get


@pytest.mark.parametrize("way", ["on_the_fly", "command_line"])
@pytest.mark.parametrize(("name", "kind"), slow_but(QUICK, cases()))
def test_loaded_saved_and_saved_again(saved: Any, tmp_path: Path, name: str, kind: str, way: str) -> None:
    model, batch, folder = saved(name)
    text = RECIPES[kind]
    recipe = {key: read_recipe(of) for key, of in text.items()} if isinstance(text, dict) else read_recipe(text)
    if way == "on_the_fly":
        config = QtorchConfig(recipe, on_misfit="skip")
        loaded = type(model).from_pretrained(folder, quantization_config=config).eval()
    else:
        (tmp_path / "by_name.json").write_text(json.dumps(BY_NAME))
        asked = ["--config", str(tmp_path / "by_name.json")] if kind == "by_name" else ["--recipe", text]
        assert main(["quantize", str(folder), str(tmp_path / "cli"), *asked, "--on-misfit", "skip"]) == 0
        loaded, info = type(model).from_pretrained(tmp_path / "cli", output_loading_info=True)
        assert not any(info.values()), info
        loaded.eval()

    wanted = in_memory(model, recipe, loaded)
    assert_same(loaded, wanted)
    assert torch.equal(output_of(loaded, batch), output_of(wanted, batch))
    if ARCHITECTURES[name].generates and kind == "int8":
        tokens = [each.generate(**generation(batch), max_new_tokens=2, do_sample=False) for each in (loaded, wanted)]
        assert torch.equal(*tokens)

    loaded.save_pretrained(tmp_path / "once")
    again = type(model).from_pretrained(tmp_path / "once")
    assert_same(again, loaded)
    again.save_pretrained(tmp_path / "twice")
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")


def in_memory(model: Any, recipe: Any, loaded: Any) -> Any:
    """`model` with the recipe on the weights that `loaded` has quantized, which are all but those of `LEFT`."""
    everything, names = copy.deepcopy(model), quantized_names(loaded)
    quantize_(everything, recipe, on_misfit="skip")
    assert names <= quantized_names(everything)
    assert all(LEFT.fullmatch(name) for name in quantized_names(everything) - names)
    mapping = recipe if isinstance(recipe, dict) else {r".*": recipe}
    first = {name: next(of for key, of in mapping.items() if re.fullmatch(key, name)) for name in names}
    quantize_(model, {re.escape(name): of for name, of in first.items()})
    if implementation := getattr(loaded.config, "_experts_implementation", None):
        model.set_experts_implementation(implementation)
    return model


def generation(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "decoder_input_ids"}


def contents(folder: Path) -> dict[str, Any]:
    """Of every file: its bytes; of safetensors the header, whose metadata have no order, and the bytes after it."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        data = found[path.name] = path.read_bytes()
        if path.suffix == ".safetensors":
            length = 8 + int.from_bytes(data[:8], "little")
            found[path.name] = json.loads(data[8:length]), data[length:]
    return found


@pytest.mark.parametrize("recipe", NAMES)
def test_experts_one_by_one_are_those_together_or_refused(saved: Any, tmp_path: Path, recipe: str) -> None:
    """Every recipe: joined codes are the codes of the joined experts, unless `shares_scales` says that they are not."""
    chosen = make(recipe, 32)
    rows = [[torch.randn(32, 64) for _ in range(2)] for _ in range(3)]
    together = chosen.apply(torch.stack([torch.cat(row) for row in rows]))
    joined = join([[chosen.apply(matrix) for matrix in row] for row in rows])
    same = joined.scheme == together.scheme and all(  # type: ignore[attr-defined]
        part is None or torch.equal(part, together.inner_tensors[key])
        for key, part in joined.inner_tensors.items()  # type: ignore[attr-defined]
    )
    assert same != shares_scales(chosen.linear_spec().weight)
    if same:
        return
    _, _, folder = saved("mixtral")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"(?s)experts\.0\.w1\.weight to .* joins these experts.*found together"):
        quantize_checkpoint(folder, tmp_path / "new", {r".*\.experts\..*": chosen}, format="transformers")
    assert sorted(tmp_path.iterdir()) == before


def test_experts_of_different_recipes_are_refused(saved: Any, tmp_path: Path) -> None:
    _, _, folder = saved("mixtral")
    asked = {r".*\.experts\.0\..*": int4_weight_only(group_size=32), r".*": int8_weight_only()}
    for recipe in (asked, {**asked, r".*\.experts\.0\..*": None}):
        with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight to .* different recipes"):
            quantize_checkpoint(folder, tmp_path / "new", recipe, format="transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", slow_but(["mixtral", "jamba"], MIXTURES))
def test_mixtures_in_shards_with_padded_groups(saved: Any, tmp_path: Path, name: str) -> None:
    """And without the loader of transformers."""
    model, batch, folder = saved(name)
    recipe = int4_weight_only(group_size=128)
    quantize_checkpoint(folder, tmp_path / "new", recipe, format="transformers", max_shard_size=20_000, on_misfit="pad")
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path / "new")
    assert any("experts" in name for name in quantized_names(loaded))
    fresh = copy.deepcopy(model)
    quantize_(model, {re.escape(name): recipe for name in quantized_names(loaded)}, on_misfit="pad")
    assert_same(loaded, model)
    model.set_experts_implementation(loaded.config._experts_implementation)
    assert torch.equal(output_of(loaded, batch), output_of(model, batch))
    if name not in ("nemotron_h", "jamba"):  # whose other names differ, too
        assert_same(load_quantized(fresh, tmp_path / "new"), loaded)
