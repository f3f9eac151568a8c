"""What `import qtorch` does and does not do, in a fresh interpreter; what error messages name is there after it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qtorch
from qtorch.primitives.supported_versions import OLDEST

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


def test_names_that_are_imported_later_are_there() -> None:
    """Recipes of rooms that nobody has imported are read from JSON, and a checkpoint of any format is opened."""
    run(
        "import qtorch\n"
        "from qtorch.primitives import from_json\n"
        "assert from_json({'type': 'Int8TilewiseTraining', 'tile': 32}) == qtorch.training.int8_tilewise_training()\n"
        "assert qtorch.quantize_api.qat is qtorch.training.qat\n"
        "assert all(getattr(qtorch, name) is not None for names in qtorch._ON_USE.values() for name in names)\n"
        "assert callable(qtorch.quantize_checkpoint) and qtorch.checkpoint.formats\n"
    )


def test_works_without_triton_and_without_a_gpu() -> None:
    run(
        "import os, sys, warnings\n"
        "warnings.filterwarnings('ignore', 'qtorch: the compiled CPU kernels are not there')\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "sys.modules['triton'] = None\n"
        "import qtorch, torch\n"
        "layer, x = torch.nn.Linear(64, 64), torch.ones(2, 64)\n"
        "wanted = layer(x)\n"
        "qtorch.quantize_(layer, qtorch.int8_weight_only())\n"
        "assert 20 < qtorch.compute_error(wanted, layer(x)) < 70\n"
    )


@pytest.mark.slow
def test_everything_on_cpu_works_without_triton() -> None:
    """Every recipe that serves, one that trains, and a compiled graph."""
    run(
        "import os, sys, warnings\n"
        "warnings.filterwarnings('ignore')\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "sys.modules['triton'] = None\n"
        "import qtorch, torch\n"
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


def test_public_names() -> None:
    assert len(set(qtorch.__all__)) == len(qtorch.__all__)
    assert [name for name in qtorch.__all__ if not hasattr(qtorch, name)] == []
    assert [name for name in qtorch.__all__ if getattr(qtorch, name).__doc__ is None] == []


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
    for package in set(OLDEST) - {"torch"}:
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


def test_versions_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, oldest in OLDEST.items():
        asked = set(re.findall(rf'"{package}(>=[\d.]+)?[";]', text)) - {""}
        assert asked == {f">={oldest}"}, package
