"""What `import qtorch` does and does not do, in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import qtorch

ROOT = Path(qtorch.__file__).parent.parent


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
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
        "assert not new & {'triton', 'transformers', 'matplotlib', 'torchvision', 'torchao'}, new\n"
        "later = ('calibration', 'checkpoint', 'kv_cache', 'training', 'integrations.export', 'integrations.fusion')\n"
        "assert not [name for name in later if f'qtorch.{name}' in sys.modules]\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32\n"
    )


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
