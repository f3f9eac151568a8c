"""save_quantized / load_quantized: save and load quantized models in safetensors files.

The file at `path` is the root: it holds the first tensors and, in its header, the metadata of the checkpoint. Above
`max_shard_size` the other tensors are in shards in the same folder, which the header names. All files are written to a
temporary folder; then the shards are moved into place under new names, and the root last. So if the process dies,
`path` is either the complete old checkpoint or the new one; the next save removes leftover files.

Checkpoints of other packages are read by the same function: each of their formats is a `Source` (`sources.py`).
"""

from importlib import import_module
from types import ModuleType

from . import formats, hf_folder, sources  # noqa: F401 (register the formats)
from .save_load import load_quantized, save_quantized

__all__ = ["load_quantized", "save_quantized"]


def __getattr__(name: str) -> ModuleType:
    if name == "streaming":  # it needs recipes that look at data
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
