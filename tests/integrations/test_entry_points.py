"""Names under which other packages find qtorch: entry points, and those of bitsandbytes."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch.integrations.bitsandbytes as bnb
from qtorch import compute_error, int8_dynamic_activation_int8_weight, int8_weight_only, nf4_weight_only, quantize_
from qtorch.dtypes import QuantizedTensor
from tests.cli import tiny

tomllib = pytest.importorskip("tomllib")
pytest.importorskip("transformers")


ROOT = Path(__file__).parents[2]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    floats, path = tmp_path_factory.mktemp("float"), tmp_path_factory.mktemp("quantized")
    tiny.save_llama(floats)
    model = AutoModelForCausalLM.from_pretrained(floats)
    quantize_(model, int8_weight_only())
    model.save_pretrained(path)
    for file in floats.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a package qtorch with these entry points is installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "qtorch-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qtorch\nVersion: 0.1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in names.items()) for group, names in GROUPS.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(environment: dict[str, str], *command: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_entry_point_is_there() -> None:
    assert GROUPS.keys() == {"torch.backends", "vllm.general_plugins", "sglang.srt.plugins"}
    for names in GROUPS.values():
        for at in names.values():
            module, _, function = at.partition(":")
            assert callable(getattr(import_module(module), function))


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
assert not [name for name in sys.modules if name.startswith("qtorch.")]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "AffineQuantizedTensor"
model.save_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokens = torch.arange(6)[None]
assert torch.equal(model(tokens).logits, again(tokens).logits)
"""


def test_transformers_loads_a_folder(folder: Path, installed: dict[str, str], tmp_path: Path) -> None:
    run(installed, "-c", LOAD, folder, tmp_path / "again", cwd=tmp_path)


@pytest.mark.slow
def test_nothing_is_loaded_where_that_is_turned_off(installed: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import torch, transformers.quantizers.auto as a\nassert ('qtorch' in a.AUTO_QUANTIZATION_CONFIG_MAPPING) == {}"
    )
    for switch, wanted in (("0", False), ("1", True)):
        environment = installed | {"TORCH_DEVICE_BACKEND_AUTOLOAD": switch}
        run(environment, "-c", code.format(wanted), cwd=tmp_path)


@pytest.mark.slow
def test_lm_eval_scores_a_folder(folder: Path, installed: dict[str, str], tmp_path: Path) -> None:
    if find_spec("lm_eval") is None or find_spec("datasets") is None:
        pytest.skip("lm_eval or datasets is not installed")
    data = tmp_path / "data.jsonl"
    rows = [{"text": "a b", "choices": [" c", " d"], "label": 0}, {"text": "b c", "choices": [" a", " d"], "label": 1}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path / 'cache'}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n'
    )
    options = ["--model", "hf", "--model_args", f"pretrained={folder}", "--include_path", tmp_path, "--device", "cpu"]
    table = run(installed, "-m", "lm_eval", *options, "--tasks", "tiny_choice", cwd=tmp_path)
    assert "|tiny_choice|" in table


LAYERS = {
    "nf4": (lambda: bnb.nn.Linear4bit(128, 64, quant_type="nf4"), nf4_weight_only()),
    "LinearNF4": (lambda: bnb.nn.LinearNF4(128, 64, compress_statistics=False), nf4_weight_only(double_quantize=False)),
    "int8": (lambda: bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False), int8_dynamic_activation_int8_weight()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_recipes(name: str) -> None:
    build, recipe = LAYERS[name]
    layer, x = build(), torch.randn(3, 128)
    floats = layer.weight.detach().clone()
    wanted = nn.functional.linear(x, recipe.apply(floats), layer.bias)
    assert torch.equal(layer(x), wanted)
    assert isinstance(layer.weight, QuantizedTensor)
    assert not layer.weight.requires_grad
    assert 15 < compute_error(nn.functional.linear(x, floats, layer.bias), layer(x)) < 60
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_the_dtype_of_products_and_the_move_to_a_device() -> None:
    layer = bnb.nn.LinearNF4(64, 64, compute_dtype=torch.bfloat16)
    x = torch.randn(2, 64)
    assert layer(x).dtype is torch.float32
    meta = bnb.nn.LinearNF4(64, 64, device="meta")
    assert not isinstance(meta.to_empty(device="meta").weight, QuantizedTensor)
    assert isinstance(meta.to_empty(device="cpu").weight, QuantizedTensor)
    assert isinstance(bnb.nn.Params4bit(torch.randn(8, 64), quant_type="nf4"), QuantizedTensor)


@pytest.mark.parametrize("name", bnb.optim.__all__)
def test_optimizers_train(name: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 128), torch.randn(8, 64)
    optimizer = getattr(bnb.optim, name)(layer.parameters(), 1e-2, optim_bits=32, min_8bit_size=4096)
    losses = []
    for _ in range(5):
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bnb.nn.Linear4bit(64, 64), "Linear4bit: quant_type='fp4' has no equivalent"),
        (lambda: bnb.nn.Linear8bitLt(64, 64), "has_fp16_weights=False"),
        (lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0), "threshold=6.0"),
        (lambda: bnb.nn.Params4bit(torch.ones(2, 64), requires_grad=True), "frozen weight"),
        (lambda: bnb.optim.AdamW8bit([nn.Parameter(torch.ones(2))], percentile_clipping=5), "percentile_clipping"),
    ],
)
def test_refused_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["Lion8bit", "PagedLion8bit", "SGD8bit", "AdEMAMix8bit", "GlobalOptimManager"])
def test_refused_names(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"bitsandbytes\.optim\.{name} has no equivalent here, only Adam8bit"):
        getattr(bnb.optim, name)
    with pytest.raises(AttributeError, match=r"bitsandbytes\.nn\.LinearFP4 has no equivalent"):
        bnb.nn.LinearFP4  # noqa: B018
