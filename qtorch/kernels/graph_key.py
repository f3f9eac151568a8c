"""What a compiled graph depends on besides its inputs: a part of the keys of torch's graph caches on disk.

torch identifies a graph by its operations before lowering, such as `F.linear` of a quantized weight. How qtorch lowers
them depends on its version and on the registered kernels.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .cpu.compiled_library import library
from .custom_ops import implementations
from .registry import names


def graph_key(device: str) -> str:
    """A string that differs whenever `F.linear` on this type of device may be lowered differently."""
    compiled = library() if device == "cpu" else None
    return " ".join([_sources(), "" if compiled is None else compiled.instruction_set, *names(), *implementations()])


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
