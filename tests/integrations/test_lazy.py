"""import qtorch imports none of the packages that it connects to; what error messages name is there after it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qtorch
from qtorch.primitives.supported_versions import OLDEST

PACKAGES = ("accelerate", "peft", "transformers")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_imported_before_it_is_used() -> None:
    run(f"""
import sys, torch
before = set(sys.modules)
import qtorch
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not new & set({PACKAGES!r}), new
assert "torch._dynamo" not in set(sys.modules) - before
""")


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
assert "qtorch.integrations.accelerate_files" in sys.modules
assert accelerate.utils.other.safe_save_file.__wrapped__
try:
    qtorch.integrations.nothing
except AttributeError:
    pass
else:
    raise AssertionError
""")


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
    text = (Path(qtorch.__file__).parent.parent / "pyproject.toml").read_text()
    for package, oldest in OLDEST.items():
        asked = set(re.findall(rf'"{package}(>=[\d.]+)?[";]', text)) - {""}
        assert asked == {f">={oldest}"}, package
