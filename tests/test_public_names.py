"""Names of the package: public ones, those imported later, those of messages; importing it starts nothing."""

import ast
import builtins
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qtorch

CODE = """
import qtorch
from qtorch.training import int8_mixed_precision_training

reveal_type(qtorch.int4_weight_only(group_size=32))
reveal_type(int8_mixed_precision_training())
qtorch.int4_weight_only(groupsize=32)
qtorch.int5_weight_only
"""
NAMES = json.loads((Path(__file__).parent / "golden" / "public_names.json").read_text())


@pytest.mark.parametrize("module", NAMES)
def test_names_import(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", qtorch._MOVED)
def test_names_that_moved_say_where_to(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"qtorch\.{name} has moved: write {qtorch._MOVED[name]}$"):
        getattr(qtorch, name)
    module, _, last = qtorch._MOVED[name].rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_names_versions_and_later_imports() -> None:
    """A recipe is added by its file; its name is added by hand, so that editors see it."""
    for name, recipe in qtorch.recipes.base.RECIPES.items():
        home = ".".join(recipe.__module__.split(".")[:2])
        if home in ("qtorch.recipes", "qtorch.calibration", "qtorch.training"):
            assert getattr(importlib.import_module(home), name) is recipe
            assert home != "qtorch.recipes" or getattr(qtorch, name) is recipe
    text = (ROOT / "pyproject.toml").read_text()
    for package, oldest in qtorch.primitives.supported_versions.OLDEST.items():
        asked = set(re.findall(rf'"{package}(>=[\d.]+)?[";]', text)) - {""}
        assert asked == {f">={oldest}"}, package
    assert len(set(qtorch.__all__)) == len(qtorch.__all__)
    assert [name for name in qtorch.__all__ if not hasattr(qtorch, name)] == []
    assert [name for name in qtorch.__all__ if getattr(qtorch, name).__doc__ is None] == []
    # Recipes of rooms that nobody has imported are read from JSON, and a checkpoint of any format is opened.
    run(
        "import qtorch\n"
        "from qtorch.primitives import from_json\n"
        "assert from_json({'type': 'Int8TilewiseTraining', 'tile': 32}) == qtorch.training.int8_tilewise_training()\n"
        "assert qtorch.quantize_api.qat is qtorch.training.qat\n"
        "assert all(getattr(qtorch, name) is not None for names in qtorch._ON_USE.values() for name in names)\n"
        "assert callable(qtorch.quantize_checkpoint) and qtorch.checkpoint.formats\n"
    )


@pytest.mark.slow
def test_mypy_sees_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(CODE)
    options = ["--no-incremental", "--follow-imports=silent", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "user.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    told = [line.split(": ", 2)[2] for line in lines if "user.py" in line and 'note: "' not in line]
    assert told[0] == 'Revealed type is "qtorch.recipes.integer.Int4WeightOnly"'
    assert told[1] == 'Revealed type is "qtorch.training.recipes.int8.Int8MixedPrecisionTraining"'
    assert told[2].startswith('Unexpected keyword argument "groupsize" for "Int4WeightOnly"')
    assert told[3].startswith('Module has no attribute "int5_weight_only"')


OTHER_PACKAGES = {"activate_past_recording", "gradient_checkpointing_enable"}
"""Methods of models of transformers."""


def _messages(tree: ast.Module) -> Iterator[str]:
    """Strings in `raise` statements, and constants of the module, which messages are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Assign) and node in tree.body):
            parts = ast.walk(node)
            yield from (str(part.value) for part in parts if isinstance(part, ast.Constant) and " " in str(part.value))


def test_messages_name_calls_that_exist() -> None:
    root, missing, checked = Path(qtorch.__file__).parent, [], set()
    packages = ["calibration", "integrations.torchao", "integrations.transformers", "kernels", "primitives", "training"]
    places = [qtorch, *(importlib.import_module(f"qtorch.{package}") for package in packages)]
    places += [builtins, torch, torch.Tensor, torch.nn.Module]
    for path in root.rglob("*.py"):
        for message in _messages(ast.parse(path.read_text())):
            for name in re.findall(r"(?<![\w.{])([A-Za-z_][\w.]*)\(", message):
                first, _, rest = name.partition(".")
                start = {"torch": torch, "nn": torch.nn, "qtorch": qtorch, "model": torch.nn.Module}.get(first)
                found = (
                    any(callable(getattr(place, first, None)) for place in places)
                    if start is None
                    else _has(start, rest)
                )
                checked.add(name)
                if not found and first not in OTHER_PACKAGES and (start or not rest):  # x.f(): x is the reader's
                    missing.append(f"{path.relative_to(root)}: {name}()")
    assert missing == []
    assert {"convert", "quantize_", "calibrated", "smooth", "qat"} <= checked


def _has(start: object, path: str) -> bool:
    """Whether `path` is an attribute of an attribute ... of `start`; submodules are imported."""
    for name in filter(None, path.split(".")):
        if not hasattr(start, name) and getattr(start, "__name__", "").startswith("qtorch"):
            importlib.import_module(f"{start.__name__}.{name}")  # type: ignore[attr-defined]
        if not hasattr(start, name):
            return False
        start = getattr(start, name)
    return True


ROOT = Path(qtorch.__file__).parent.parent

WITHOUT_LOG = "import logging; logging.getLogger('bitsandbytes').setLevel('ERROR')"
"""With some processors, bitsandbytes logs when it is imported that it misses a package."""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{WITHOUT_LOG}\n{code}"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_is_silent_and_starts_nothing() -> None:
    run(
        "import sys, warnings\n"
        # The option -W would not do: it takes whole module names, and 'qtorch' is not 'qtorch.primitives'.
        "warnings.filterwarnings('error', category=DeprecationWarning, module='qtorch')\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import qtorch\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "never = {'triton', 'transformers', 'matplotlib', 'torchvision', 'torchao', 'accelerate', 'peft'}\n"
        "assert not new & never, new\n"
        "assert 'torch._dynamo' not in set(sys.modules) - before\n"
        "later = ('calibration', 'checkpoint', 'kv_cache', 'training', 'integrations.export', 'integrations.fusion')\n"
        "assert not [name for name in later if f'qtorch.{name}' in sys.modules]\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32\n"
    )


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_as_before(collects: bool) -> None:
    before = "" if collects else "gc.disable()"
    run(f"import gc\n{before}\nimport qtorch\nassert gc.isenabled() is {collects}")


WITHOUT_TRITON = (
    "import os, sys, warnings\n"
    "os.environ['CUDA_VISIBLE_DEVICES'], sys.modules['triton'] = '', None\n"
    "warnings.filterwarnings('ignore', 'qtorch: the compiled CPU kernels are not there')\n"
    "import qtorch, torch\n"
)


def test_works_without_triton_and_without_a_gpu() -> None:
    run(
        f"{WITHOUT_TRITON}layer, x = torch.nn.Linear(64, 64), torch.ones(2, 64)\n"
        "wanted = layer(x); qtorch.quantize_(layer, qtorch.int8_weight_only())\n"
        "assert 20 < qtorch.compute_error(wanted, layer(x)) < 70\n"
    )


@pytest.mark.slow
def test_everything_on_cpu_works_without_triton() -> None:
    """Every recipe that serves, one that trains, and a compiled graph."""
    run(
        f"{WITHOUT_TRITON}warnings.filterwarnings('ignore')\n"
        "from qtorch.training import convert, int8_mixed_precision_training, int8_weight_only_quantized_training\n"
        "from tests.every_recipe import NAMES, make\n"
        "x, linear = torch.ones(2, 256), lambda: torch.nn.Linear(256, 64)\n"
        "for name in NAMES:\n"
        "    qtorch.quantize_(layer := linear(), make(name, 32))\n"
        "    assert layer(x).isfinite().all(), name\n"
        "assert torch.equal(torch.compile(layer, backend='aot_eager', fullgraph=True)(x), layer(x))\n"
        "for recipe in (int8_mixed_precision_training(), int8_weight_only_quantized_training()):\n"
        "    qtorch.quantize_(layer := linear(), recipe)\n"
        "    layer(x).sum().backward()\n"
        "    torch.optim.SGD(layer.parameters(), 0.1).step()\n"
        "    qtorch.quantize_(layer, convert())\n"
        "    assert layer(x).isfinite().all()\n"
    )


@pytest.mark.slow
def test_names_of_messages() -> None:
    for package in ("accelerate", "peft"):
        pytest.importorskip(package)
    run("""
import sys, warnings
warnings.simplefilter("error", UserWarning)
import qtorch
qtorch.integrations.accelerate.disk_offload
qtorch.integrations.accelerate.dispatch_model
qtorch.integrations.peft.prepare_for_adapters
qtorch.integrations.peft.initialize_from_quantization_error
import accelerate.utils.other
assert "qtorch.integrations.accelerate" in sys.modules
assert accelerate.utils.other.safe_save_file.__wrapped__
try:
    qtorch.integrations.nothing
except AttributeError:
    pass
else:
    raise AssertionError
""")


@pytest.mark.slow
def test_packages_that_are_too_old() -> None:
    """The first use says so, and an import that qtorch waits for warns."""
    for package in set(qtorch.primitives.supported_versions.OLDEST) - {"torch"}:
        pytest.importorskip(package)
    run("""
import warnings
import torch
from qtorch.primitives import supported_versions
supported_versions.OLDEST = dict.fromkeys(supported_versions.OLDEST, "99.3")

def raises(package, use):
    try:
        use()
    except ImportError as error:
        assert f"qtorch works with {package} 99.3 and newer, and {package} " in str(error), error
    else:
        raise AssertionError(package)

import qtorch
layer = torch.nn.Linear(8, 8)
qtorch.quantize_(layer, qtorch.int8_weight_only())
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import transformers.modeling_utils
ours = {str(w.message) for w in found if "qtorch" in str(w.message)}
assert len(ours) == 1 and "99.3" in ours.pop(), found
raises("transformers", lambda: qtorch.integrations.transformers)
raises("transformers", lambda: qtorch.kv_cache.quantized_cache(layer))
raises("diffusers", lambda: qtorch.integrations.diffusers)
raises("accelerate", lambda: qtorch.integrations.accelerate.disk_offload(layer, "folder"))
raises("accelerate", lambda: qtorch.integrations.accelerate.dispatch_model(layer, {}))
import peft
model = torch.nn.Sequential(layer)
raises("peft", lambda: peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"])))
""")
