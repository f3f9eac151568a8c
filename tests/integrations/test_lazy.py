"""import qtorch imports none of the packages that it connects to; what error messages name is there after it."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
