"""Stock tools load folders of qtorch by the entry points of pyproject.toml alone, without ``import qtorch``."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
pytest.importorskip("transformers")

from qtorch import int8_weight_only, quantize_
from tests.cli import tiny

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
    lines = [f"[{group}]\n" + "".join(f"{n} = {at}\n" for n, at in names.items()) for group, names in GROUPS.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(settings: dict[str, str], *command: object, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=settings, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entry_points_are_there_and_load_a_folder(folder: Path, installed: dict[str, str], tmp_path: Path) -> None:
    assert GROUPS.keys() == {"torch.backends", "vllm.general_plugins", "sglang.srt.plugins"}
    for names in GROUPS.values():
        for at in names.values():
            module, _, function = at.partition(":")
            assert callable(getattr(import_module(module), function))
    run(installed, "-c", LOAD, folder, tmp_path / "again", cwd=tmp_path)


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
