"""Models of transformers: what multiplies is quantized, in the model and in its folder."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qtorch
from qtorch import find_uses, int4_weight_only, int8_weight_only, load_quantized, quantize_, quantize_checkpoint
from qtorch.cli.recipes import read_recipe
from qtorch.integrations.transformers import QtorchConfig
from qtorch.model.uses import Uses
from tests.every_recipe import NAMES, make
from tests.fast_part import slow_but
from tests.integrations.transformers.tiny_models import assert_same, quantized_names
from tests.zoo.architectures import ARCHITECTURES, built, output_of

pytestmark = pytest.mark.filterwarnings("ignore")

LEAST, MOST = 5e-4, 0.03
"""Relative error of the outputs. int8 with a scale per row has errors of about 2^-8 / sqrt(3) of the largest weight of
the row in each product, that is 0.2% to 0.5% of its output, and these models have 5 to 20 products in a row."""

EACH = pytest.mark.parametrize("name", list(ARCHITECTURES))


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def multiplied(uses: Uses) -> dict[str, int]:
    """Number of elements of each parameter that takes part in products, tied ones once."""
    return {name: torch.Size(of.shape).numel() for name, of in uses.items() if of.contractions}


def check_first_line(report: qtorch.QuantizeReport) -> None:
    """It says which share of all parameters is quantized."""
    first, _, _ = str(report).partition("\n")
    share = report.quantized_parameters / report.parameters
    assert f"{share:.1%} of all parameters" in first


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "mamba2", "convnext", "whisper"], ARCHITECTURES))
def test_everything_that_can_be_quantized(name: str) -> None:
    model, batch = built(name)
    wanted = output_of(model, batch)
    sizes = multiplied(find_uses(model, **batch))
    report = quantize_(model, int8_weight_only(), targets="all")
    left = {row.name: row.detail for row in report.skipped if row.name in sizes}
    assert all(reason.startswith("is parametrized") for reason in left.values()), left
    assert LEAST < relative_error(output_of(model, batch), wanted) < MOST


@EACH
def test_kinds_and_reports(name: str) -> None:
    """The axis that the registry says is the one that products sum over; what it does not know, they do not use."""
    model, batch = built(name)
    uses = find_uses(model, **batch)
    for target in qtorch.model.targets.find_targets(model, int8_weight_only(), None):
        for slot in target.slots:
            of = uses[slot.name]
            if slot.kind.obstacle or not of.contractions:
                continue
            assert slot.kind.name, (slot.name, str(of))
            assert not of.obstacle, (slot.name, of.obstacle)
            assert slot.kind.is_conv == of.is_convolution, slot.name
            assert slot.kind.is_transposed == (of.axis == -2), (slot.name, str(of))
    model, batch = built(name)
    wanted = output_of(model, batch)
    sizes = multiplied(find_uses(model, **batch))
    report = quantize_(model, int8_weight_only())
    parameters = {key: p for key, p in model.named_parameters() if key in sizes}
    left = [key for key, p in parameters.items() if not isinstance(p, qtorch.dtypes.QuantizedTensor)]
    reasons = {row.name: row.detail for row in report.skipped}
    for key in left:
        assert re.match(r"a router|a convolution|is parametrized", reasons[key]), (key, reasons[key])
    reached = 1 - sum(sizes[key] for key in left) / sum(sizes[key] for key in parameters)
    assert reached >= 0.95 or any(reasons[key].startswith("a convolution") for key in left), reached
    assert {row.name for row in report.quantized} <= sizes.keys()  # nothing else
    check_first_line(report)
    assert LEAST < relative_error(output_of(model, batch), wanted) < MOST


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "recurrent_gemma"], ARCHITECTURES))
def test_targets_that_a_run_has_found(name: str) -> None:
    """The same weights and bits as by the registry; convolutions beside."""
    model, batch = built(name)
    other = copy.deepcopy(model)
    quantize_(model, int8_weight_only(), targets=("linear", "convolution"))
    quantize_(other, int8_weight_only(), targets=find_uses(other, **batch))
    assert torch.equal(output_of(model, batch), output_of(other, batch))


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "mamba2"], ARCHITECTURES))
def test_files_and_copies_have_the_same_bits(name: str, tmp_path: Path) -> None:
    model, batch = built(name)
    quantize_(model, int8_weight_only(), targets="all")
    wanted = output_of(model, batch)
    assert torch.equal(output_of(copy.deepcopy(model), batch), wanted)
    qtorch.save_quantized(model, tmp_path / "model.safetensors")
    fresh, _ = built(name)
    load_quantized(fresh, tmp_path / "model.safetensors")
    assert torch.equal(output_of(fresh, batch), wanted)
    again, _ = built(name)
    quantize_(again, int8_weight_only(), targets="all")
    again.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(output_of(again, batch), wanted)


@pytest.mark.parametrize("name", slow_but(["gpt2", "mixtral"], ARCHITECTURES))
def test_generates_with_a_dynamic_and_a_static_cache(name: str) -> None:
    if not ARCHITECTURES[name].generates:
        pytest.skip("has no static cache")
    model, batch = built(name)
    quantize_(model, int8_weight_only())
    inputs = {key: value for key, value in batch.items() if key != "decoder_input_ids"}
    found = {}
    for cache in ("dynamic", "static"):
        torch.manual_seed(0)
        found[cache] = model.generate(
            **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache,
            output_logits=True, return_dict_in_generate=True, disable_compile=True,
        )  # fmt: skip
    first, second = found.values()
    assert torch.equal(first.sequences, second.sequences)
    for one, other in zip(first.logits, second.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", slow_but(["vit"], ARCHITECTURES))
def test_one_graph_where_the_float_model_is_one(name: str) -> None:
    if not ARCHITECTURES[name].compiles:
        pytest.skip("the float model is not one graph")
    model, batch = built(name)
    quantize_(model, int8_weight_only())
    wanted = output_of(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(output_of(compiled, batch), wanted) < 1e-5


pytest.importorskip("transformers")


BY_NAME = {
    r".*\.(layers?|h|block|blocks|stages)\.0\..*": "int8_weight_only()",
    r".*": "int4_weight_only(group_size=32)",
}
RECIPES: dict[str, Any] = {
    "int8": "int8_weight_only()", "w8a8": "int8_dynamic_activation_int8_weight()",
    "int4": "int4_weight_only(group_size=32)", "nf4": "nf4_weight_only(group_size=32, double_quantize=False)",
    "float8": "float8_weight_only()", "by_name": BY_NAME,
}  # fmt: skip
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
        assert qtorch.cli.main(["quantize", str(folder), str(tmp_path / "cli"), *asked, "--on-misfit", "skip"]) == 0
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
    joined = qtorch.dtypes.joining.join([[chosen.apply(matrix) for matrix in row] for row in rows])
    same = joined.scheme == together.scheme and all(  # type: ignore[attr-defined]
        part is None or torch.equal(part, together.inner_tensors[key])
        for key, part in joined.inner_tensors.items()  # type: ignore[attr-defined]
    )
    assert same != qtorch.dtypes.joining.shares_scales(chosen.linear_spec().weight)
    if same:
        return
    _, _, folder = saved("mixtral")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"(?s)experts\.0\.w1\.weight to .* joins these experts.*found together"):
        quantize_checkpoint(folder, tmp_path / "new", {r".*\.experts\..*": chosen}, format="transformers")
    assert sorted(tmp_path.iterdir()) == before


def test_the_zoo_and_experts_of_different_recipes(saved: Any, tmp_path: Path) -> None:
    _, _, folder = saved("mixtral")
    asked = {r".*\.experts\.0\..*": int4_weight_only(group_size=32), r".*": int8_weight_only()}
    for recipe in (asked, {**asked, r".*\.experts\.0\..*": None}):
        with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight to .* different recipes"):
            quantize_checkpoint(folder, tmp_path / "new", recipe, format="transformers")
    assert not list(tmp_path.iterdir())
    assert len(ARCHITECTURES) >= 24


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
