"""The first hour of a new user: everyday tasks that no page shows, and the mistakes on the way, each answered with its
remedy in at most two lines."""

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import dequantize_, explain, load_quantized, quantize_, quantize_checkpoint, save_quantized
from qtorch.calibration import auto, gptq, observed
from qtorch.primitives.jsonable import _field_types
from qtorch.recipes import int4_weight_only, int8_dynamic_activation_int4_weight, int8_weight_only
from qtorch.recipes.base import RECIPES, Recipe
from qtorch.training import convert, int8_mixed_precision_training, qat
from tests import every_recipe
from tests.attack import training_recipes

INT8 = int8_weight_only()
ROOT = Path(__file__).parents[1]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def quantized(model: nn.Module | None = None) -> Any:
    model = mlp() if model is None else model
    quantize_(model, INT8)
    return model


def inputs() -> Tensor:
    return torch.randn(4, 64)


def equal(model: nn.Module, other: nn.Module) -> None:
    x = inputs()
    assert torch.equal(model(x), other(x))


# --- tasks ---
def test_compiled_or_not_is_the_same_file(tmp_path: Path) -> None:
    """Of a whole model, and of a layer; a state dict; and a file of the time when names had a prefix."""
    compiled, plain = torch.compile(mlp(), backend="eager"), mlp()
    report = quantize_(compiled, {"0": INT8, "2": None})
    assert [row.name for row in report.layers] == ["0.weight", "2.weight"]
    assert [row.name for row in explain(compiled)] == ["0.weight"]
    save_quantized(compiled, tmp_path / "compiled.safetensors")
    equal(load_quantized(plain, tmp_path / "compiled.safetensors"), compiled._orig_mod)
    save_quantized(plain, tmp_path / "plain.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "compiled.safetensors").read_bytes()
    in_parts = mlp()
    in_parts[0] = torch.compile(in_parts[0], backend="eager")
    for model in (torch.compile(mlp(), backend="eager"), in_parts):
        equal(load_quantized(model, tmp_path / "plain.safetensors"), plain)
    save_quantized(compiled.state_dict(), tmp_path / "state.safetensors")
    equal(load_quantized(mlp(), tmp_path / "state.safetensors"), plain)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("qtorch.checkpoint.save_load", "qtorch.checkpoint.tensor_file"):
            patch.setattr(f"{module}.plain_name", str)
        save_quantized(compiled, tmp_path / "older.safetensors")
    assert b'"_orig_mod.0.weight' in (tmp_path / "older.safetensors").read_bytes()
    equal(load_quantized(mlp(), tmp_path / "older.safetensors"), plain)


def test_quantize_again() -> None:
    """Nothing is done twice, and the report says so; back to floats, and another recipe."""
    model = quantized()
    again = quantize_(model, INT8)
    assert "quantized 0 of 2 weights" in str(again)
    assert "2 already quantized" in repr(again)
    dequantize_(model)
    assert "already" not in repr(quantize_(model, int4_weight_only(group_size=32)))


# --- mistakes ---
def run(text: str) -> Callable[[Path], object]:
    return lambda folder: exec(text, {"qtorch": qtorch, "nn": nn})


def saved(folder: Path) -> Path:
    save_quantized(quantized(), folder / "model.safetensors")
    return folder / "model.safetensors"


def pickled(folder: Path) -> Path:
    torch.save(quantized().state_dict(), folder / "model.pt")
    return folder / "model.pt"


LINEAR = nn.Linear(64, 64)
WEIGHT = quantized(nn.Linear(64, 64)).weight

MISTAKES: dict[str, list[tuple[Callable[[Path], object], str]]] = {
    "quantize_": [
        (lambda _: quantize_(INT8, mlp()), "takes a model, an nn.Module, got a Int8WeightOnly"),
        (lambda _: quantize_(mlp(), int8_weight_only), r"call it: int8_weight_only\(\)"),
        (lambda _: quantize_(mlp(), "int8_weight_only"), r"remove the quotes: int8_weight_only\(\)"),
        (lambda _: quantize_(mlp(), "int4_weight_only(group_size=32)"), r"quotes: int4_weight_only\(group_size=32\)"),
        (lambda _: quantize_(mlp(), "int8_wieght_only"), r"remove the quotes: int8_weight_only\(\)"),
        (lambda _: quantize_(mlp(), [INT8]), "give one, or a mapping from names to recipes"),
        (lambda _: quantize_(mlp(), {nn.Linear: INT8}), "the mapping takes names and regular expressions"),
        (lambda _: quantize_(mlp(), {"fc": INT8}), "'fc' matches no linear layer.*The model has 0, 2"),
        (lambda _: quantize_(mlp(), {"*": INT8}), r"neither a name nor a regular expression.*; write '\.\*'"),
        (lambda _: quantize_(mlp(), INT8, ["0"]), r"filter_fn is a function \(module, name\) -> bool, got \['0'\]"),
        (lambda _: quantize_(mlp(), INT8, lambda name: True), r"filter_fn is a function \(module, name\) -> bool"),
        (lambda _: quantize_(mlp(), INT8, targets="conv"), "targets is one or some of .*'convolution'"),
        (lambda _: quantize_(nn.Conv2d(3, 8, 3), INT8), 'a convolution; ask for it by name, or with targets="all"'),
        (lambda _: quantize_(mlp(), INT8, on_misfit="ignore"), "on_misfit is 'error', 'pad', 'coarser', 'skip'"),
        (lambda _: quantize_(mlp(), INT8, device="gpu"), "device='gpu' is not available here"),
        (lambda _: quantize_(mlp(), INT8)(inputs()), "changes the model in place: call the model itself"),
        (lambda _: quantize_(mlp(), INT8).eval(), "in place: use the model itself"),
        (lambda _: quantize_(quantized(nn.Linear(64, 64)), int4_weight_only(32)), r"or dequantize_\(model\) first"),
        (lambda _: quantize_(nn.Linear(64, 64).double(), INT8), "takes float32, float16 or bfloat16 weights"),
        (lambda _: quantize_(nn.Linear(64, 64, device="meta"), INT8), "without values for .*load it first"),
        (lambda _: explain(mlp()), "no weight of this Sequential is quantized"),
    ],
    "arguments of recipes": [
        (lambda _: int4_weight_only(groupsize=32), "unexpected keyword argument 'groupsize'; did you mean group_size?"),
        (lambda _: int4_weight_only(bits=4), "'bits'; it takes group_size, zero_point_domain, "),
        (lambda _: int8_weight_only(mlp()), r"takes no model; write quantize_\(model, int8_weight_only\(...\)\)"),
        (lambda _: int8_weight_only(32), "int8_weight_only: scale_rule takes ScaleRule, got 32; there are MinMaxRule"),
        (lambda _: int4_weight_only(scale_rule="hqq"), "scale_rule takes ScaleRule, got 'hqq'; there are MinMaxRule, "),
        (lambda _: int4_weight_only(layout="tiled"), "layout takes Layout, got 'tiled'; there are .*TensorCoreTiled"),
        (lambda _: qtorch.float8_weight_only(granularity="row"), "Granularity, got 'row'; there are .*PerRow"),
        (lambda _: qtorch.float8_weight_only(granularity=qtorch.PerRow), r"make one: PerRow\(\)"),
        (lambda _: qtorch.PerGroup("32"), "PerGroup.group_size takes an integer, got '32'"),
        (lambda _: qtorch.float8_weight_only("float8_e4m3fn"), "got 'float8_e4m3fn'; write torch.float8_e4m3fn"),
        (lambda _: qtorch.float8_weight_only(torch.float16), "float16 is not a quantized type; known: int1"),
        (lambda _: int8_dynamic_activation_int4_weight(mapping_type="asymmetric"), "write .*MappingType.ASYMMETRIC"),
        (lambda _: qtorch.uintx_weight_only(), "missing a required argument: 'dtype'; it takes dtype, group_size"),
        (lambda _: qtorch.uintx_weight_only("uint9"), "uint9 is not a quantized type; known: .*uint7"),
        (lambda _: quantize_(mlp(), qtorch.int8_static_activation_int8_weight()), r"calibrated\(.*or give the recipe"),
    ],
    "config": [
        (lambda _: setattr(qtorch.config, "strickt", True), r"strickt is no setting; there are strict \(bool\)"),
        (lambda _: setattr(qtorch.config, "strict", "yes"), "config.strict takes bool, got 'yes'"),
    ],
    "files": [
        (lambda folder: save_quantized(quantized(), folder / "x.pt"), "x.pt is a name .* write x.safetensors"),
        (lambda folder: save_quantized(folder / "x.safetensors", quantized()), "save_quantized: takes a model"),
        (lambda folder: save_quantized(quantized(), folder), "is a folder; give the name of a file in it"),
        (lambda folder: save_quantized(quantized(), folder / "a" / "b.safetensors"), "there is no folder .*a"),
        (lambda folder: save_quantized(quantized(), folder / "x", format="exl2"), "'exl2' is not known; known are"),
        (lambda folder: load_quantized(folder / "x.safetensors", mlp()), "load_quantized: takes a model"),
        (lambda folder: load_quantized(mlp(), folder / "x.safetensors"), "no such file"),
        (lambda folder: load_quantized(mlp(), folder), "the folder is empty"),
        (lambda folder: load_quantized(mlp(), pickled(folder)), r"load_state_dict\(torch.load\(.*assign=True\)"),
        (lambda folder: load_quantized(mlp()[:1], saved(folder)), "unexpected key 2.bias"),
        (lambda folder: quantize_checkpoint(saved(folder), folder / "y.safetensors", "int8"), "remove the quotes"),
        (lambda folder: quantize_checkpoint(saved(folder), folder / "y.pt", INT8), "a file, such as y.pt.safetensors"),
    ],
    "weights": [
        (lambda _: WEIGHT + 1, r"call .dequantize\(\) first"),
        (lambda _: WEIGHT.numpy(), r".dequantize\(\) gives a float tensor"),
        (lambda _: quantized()(torch.randn(2, 64).half()), r"expected an input of dtype torch.float32.*input.to"),
        (lambda _: quantized()(torch.randn(2, 32)), r"shape \(2, 32\) does not fit a weight of shape \(64, 64\)"),
    ],
    "training": [
        (lambda _: quantized().requires_grad_(True), r"quantize_\(model, qat\(recipe\)\) of the float model"),
        (lambda _: quantize_(quantized(nn.Linear(64, 64)), int8_mixed_precision_training()), "take the float model"),
        (lambda _: convert(mlp()), r"takes no model; write quantize_\(model, convert\(...\)\)"),
        (lambda _: quantize_(mlp(), convert), r"call it: convert\(\)"),
        (lambda _: qat(int8_weight_only), r"got <class .*make one: int8_weight_only\(\)"),
        (lambda _: qat(mlp()), r"write quantize_\(model, qat\(...\)\)"),
        (lambda _: qat(), "missing a required argument: 'recipe'"),
        (
            lambda folder: [quantize_(LINEAR, qat(INT8)), save_quantized(LINEAR, folder / "x.safetensors")],
            r"in training.*quantize_\(model, convert\(\)\)",
        ),
    ],
    "calibration": [
        (lambda _: gptq(INT8), r"takes a recipe and batches, gptq\(int4_weight_only\(\), batches\)"),
        (lambda _: gptq(int8_weight_only, [inputs()]), r"make one: int8_weight_only\(\)"),
        (lambda _: gptq([inputs()], INT8), "recipe takes an inference recipe such as int4_weight_only.*, got "),
        (lambda _: auto(INT8, 5), "batches takes Iterable, got 5"),
        (lambda _: quantize_(mlp(), gptq(INT8, inputs())), r"a list of inputs, got .*write \[batch\]"),
        (lambda _: quantize_(mlp(), gptq(INT8, "text.txt")), "is a list of inputs, got 'text.txt'"),
        (lambda _: quantize_(mlp(), gptq(INT8, ["a text"])), "are texts; give what a tokenizer makes"),
        (lambda _: quantize_(mlp(), gptq(INT8, [])), "it needs at least one batch"),
        (lambda _: quantize_(mlp(), observed(INT8, [inputs()])), r"does is int8_static_activation_int8_weight\(\)"),
    ],
    "imports": [
        (
            run("from qtorch import int4_weight_onyl"),
            "'int4_weight_onyl' from 'qtorch'; did you mean int4_weight_only?",
        ),
        (run("qtorch.int4_weigth_only"), "no attribute 'int4_weigth_only'; did you mean int4_weight_only?"),
        (run("from qtorch import quantize"), "did you mean quantize_?"),
        (run("from qtorch import qat"), "qtorch.qat has moved: write qtorch.training.qat"),
        (run("qtorch.quantize_api.int8_wieght_only"), "did you mean int8_weight_only?"),
        (run("from qtorch.quantize_api import int8_mixed_precision_trainig"), "mean int8_mixed_precision_training?"),
        (run("qtorch.load"), "did you mean load_quantized?"),
        (run("qtorch.Int8WeightOnlyConfig"), "did you mean int8_weight_only?"),
    ],
    "export": [
        (lambda _: torch.onnx.export(quantized(), (inputs(),), "x.onnx"), r"qtorch.export.onnx\(model, args, path\)"),
        (lambda _: qtorch.export.onnx(quantized()), r"args is empty; give inputs of the model"),
        (lambda _: qtorch.export.onnx(mlp(), (inputs(),)), "call quantize_ first"),
        (lambda _: torch.jit.trace(quantized(), inputs()), "use torch.export"),
        (lambda _: torch.jit.script(quantized()), "use torch.export"),
    ],
}


def from_pretrained(config: Any) -> Any:
    """As a user of transformers calls it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}

    def load(folder: Path) -> object:
        llama = transformers.LlamaForCausalLM
        llama(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
        return llama.from_pretrained(folder, quantization_config=config())

    return load


def config_of(recipe: Any) -> Any:
    return lambda: qtorch.integrations.transformers.QtorchConfig(recipe)


MISTAKES["transformers"] = [
    (from_pretrained(lambda: INT8), r"write QtorchConfig\(int8_weight_only\(\)\)"),
    (from_pretrained(config_of("int8_weight_only")), r"remove the quotes: int8_weight_only\(\)"),
    (from_pretrained(config_of(int8_weight_only)), r"call it: int8_weight_only\(\)"),
    (lambda _: quantize_(mlp(), pytest.importorskip("transformers").BitsAndBytesConfig()), "takes a recipe such as"),
    (lambda _: qtorch.kv_cache.quantized_cache(mlp()), "takes a model of transformers or its config"),
]
CASES = [pytest.param(*c, id=f"{area} {number}") for area, cases in MISTAKES.items() for number, c in enumerate(cases)]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore:.*on fewer tokens")
@pytest.mark.parametrize(("mistake", "words"), CASES)
def test_mistakes(mistake: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"(?s){words}") as caught:
        mistake(tmp_path)
    lines = str(caught.value).removesuffix("\nthe model is unchanged").splitlines()
    assert len(lines) <= 2
    assert len(" ".join(lines)) < 600


def test_there_are_75_mistakes() -> None:
    """Those of the command line are in `tests/cli/test_commands.py`."""
    assert len(CASES) >= 75
    # `test_arguments_of_another_type` would see nothing of a recipe without fields.
    assert sum(len(dataclasses.fields(recipe)) for recipe in RECIPES.values()) > 80  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_arguments_of_another_type(name: str) -> None:
    """Every argument of every recipe refuses a value of another type in one line, which names both."""
    needed = {
        **every_recipe.ARGUMENTS, **training_recipes.ARGUMENTS,
        "block_sparse": (qtorch.int8_dynamic_activation_int8_weight(),), "calibrated": (INT8, []), "low_rank": (INT8,),
        "importance_weighted": (qtorch.lut_weight_only(bits=3), []), "padded": (INT8, 1),
    }  # fmt: skip
    recipe: Any = RECIPES[name]
    types = _field_types(recipe)
    good = dict(zip(types, needed.get(name, ())))
    assert isinstance(recipe(**good), Recipe)
    for field, kind in types.items():
        wrong: list[Any] = ["32", 32.0, True, object()] if kind in (int, int | None) else [object()]
        for value in wrong:
            with pytest.raises((TypeError, ValueError)) as caught:
                recipe(**{**good, field: value})
            assert len(str(caught.value).splitlines()) == 1
            assert str(caught.value).startswith(name)
            assert field in str(caught.value)
            if kind in (int, int | None):
                assert isinstance(caught.value, TypeError)


def test_dry_run_on_the_meta_device() -> None:
    """Sizes of every recipe without values are those with values; recipes with data need values."""
    recipes = [every_recipe.make(name, 32) for name in every_recipe.NAMES]
    recipes += [training_recipes.make(name) for name in training_recipes.NAMES]
    for recipe in recipes:
        reports = [quantize_(mlp().to(d), recipe, targets="all", dry_run=True, device="cpu") for d in ("cpu", "meta")]
        sizes = [[(row.name, row.bytes_after) for row in report.layers] for report in reports]
        assert sizes[0] == sizes[1], recipe
        assert all(row.sqnr is None and row.kernel is None for row in reports[1].layers)
    with pytest.raises(ValueError, match="on the meta device, without values"):
        quantize_(mlp().to("meta"), gptq(INT8, [inputs()]), dry_run=True)


def test_an_optimizer_of_frozen_weights_warns_once() -> None:
    model = quantized()
    groups = [{"params": [model[0].weight, model[0].bias]}, {"params": [model[2].weight]}]
    with pytest.warns(UserWarning, match=r"^qtorch: AdamW gets 1 weights .* stay frozen; .*qat\(recipe\)") as told:
        torch.optim.AdamW(groups)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.AdamW(groups)  # it was said
        for each in (quantized(), quantized(mlp().requires_grad_(False))):
            torch.optim.SGD(each.requires_grad_(False).parameters(), 0.1)  # it is meant
        torch.optim.SGD([p for p in quantized().parameters() if p.requires_grad], 0.1)
        trained = mlp()
        quantize_(trained, int8_mixed_precision_training())
        torch.optim.SGD(trained.parameters(), 0.1)


@pytest.mark.slow
def test_a_pickle_without_qtorch_names_it(tmp_path: Path) -> None:
    program = f"import torch; torch.load({str(pickled(tmp_path))!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode
    assert "qtorch" in done.stderr.splitlines()[-1] or "GLOBAL qtorch" in done.stderr
    good = [sys.executable, "-c", f"import qtorch\n{program}"]
    assert not subprocess.run(good, capture_output=True, check=False, env=environment, cwd=tmp_path).returncode
