"""save_quantized / load_quantized: quantized models on disk, in safetensors.

The file at `path` is the root: it holds the first tensors and, in its header, everything else there is to know. Above
`max_shard_size` the other tensors are in shards beside it, which the header names. All files are written in a folder
of their own; the shards are moved into place under new names, the root last. So whenever the process dies, `path` is
either the old checkpoint, whole, or the new one; the next save removes what was left behind.
"""

from .load import load_quantized
from .save import save_quantized

__all__ = ["load_quantized", "save_quantized"]
