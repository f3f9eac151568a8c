"""How transformers finds the quantizer, and what happens without it; in fresh interpreters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import qtorch
from tests.integrations.transformers.tiny_models import I8, build

SLOW = pytest.mark.slow
ROOT = Path(qtorch.__file__).parent.parent


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which nothing loads qtorch but itself."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, arguments)]
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("llama")
    qtorch.quantize_(model, I8)
    path = tmp_path_factory.mktemp("quantized")
    model.save_pretrained(path)
    return path


LOAD = (
    "import sys\n"
    "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
    "assert type(model.lm_head.weight).__name__ == 'AffineQuantizedTensor'\n"
    "waiting = [f for f in sys.meta_path if type(f).__module__.startswith('qtorch')]\n"
    "assert not [f for f in waiting if f.name.startswith('transformers')]\n"
)


@pytest.mark.parametrize("imports", [
    pytest.param("import qtorch\nfrom transformers import AutoModelForCausalLM\n", marks=SLOW),
    "from transformers import AutoModelForCausalLM\nimport qtorch\n",
    pytest.param("import transformers, qtorch\nfrom transformers import AutoModelForCausalLM\n", marks=SLOW),
    # Asking where a module is does not use the hook up.
    pytest.param(
        "import qtorch, importlib.util, transformers\nimportlib.util.find_spec('transformers.quantizers.auto')\n"
        "from transformers import AutoModelForCausalLM\n",
        marks=SLOW,
    ),
])  # fmt: skip
def test_import_qtorch_is_enough(folder: Path, imports: str) -> None:
    done = run(imports + LOAD, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_in_threads(folder: Path) -> None:
    code = (
        "import threading, qtorch\n"
        "def use():\n"
        "    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "    import transformers.modeling_utils, colorsys, this_is_none\n"
        "def load(name):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as error: assert 'this_is_none' in str(error), error\n"
        "names = ['transformers.quantizers.auto', 'transformers.modeling_utils', 'colorsys', 'this_is_none', 'wave']\n"
        "threads = [threading.Thread(target=load, args=(name,)) for name in names * 3]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "from transformers import AutoModelForCausalLM\n"
    )
    done = run(code + LOAD, folder)
    assert (done.returncode, "Exception in thread" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["", ", quantization_config=None"])
def test_without_qtorch_it_does_not_load_at_random(folder: Path, arguments: str) -> None:
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained(sys.argv[1]{arguments})\n"
    )
    done = run(code, folder)
    assert done.returncode == 1
    assert "Unknown quantization type, got qtorch" in done.stderr or arguments
    assert "MISMATCH" in done.stderr
    assert "RuntimeError" in done.stderr.splitlines()[-1]


def test_a_version_that_does_not_fit_is_a_warning() -> None:
    code = (
        "import sys, types, warnings, tempfile, pathlib\n"
        "folder = pathlib.Path(tempfile.mkdtemp()); package = folder / 'transformers' / 'quantizers'\n"
        "package.mkdir(parents=True)\n"
        "for name in (package.parent / '__init__.py', package / '__init__.py', package / 'auto.py'): name.touch()\n"
        "sys.path.insert(0, str(folder))\n"
        "import qtorch\n"
        "with warnings.catch_warnings(record=True) as found:\n"
        "    warnings.simplefilter('always')\n"
        "    import transformers.quantizers.auto\n"
        "assert 'does not work with this version of transformers' in str(found[0].message), found\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
