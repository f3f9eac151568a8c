"""The entry point "torch.backends" of qtorch, which `import torch` calls; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off.

It imports neither qtorch nor anything else; see qtorch/integrations/import_watch.py. It stands outside of the package,
since importing a module of a package imports the package.
"""

from importlib.util import find_spec
from pathlib import Path
from runpy import run_path


def wait() -> None:
    """Let transformers and diffusers load folders of qtorch as soon as they are imported."""
    spec = find_spec("qtorch")
    file = spec and spec.origin and Path(spec.origin).parent / "integrations" / "import_watch.py"
    if file and file.exists():
        run_path(str(file))["offer_qtorch"]()
