"""What a compiled graph depends on beside its inputs, for the keys of torch's caches of graphs on disk.

torch identifies a graph by the operations before they are lowered: `F.linear` of a quantized weight. What that becomes
is for this library to say, of this version, with the kernels that there are.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .cpu.compiled_library import library
from .custom_ops import implementations
from .registry import names


def graph_key(device: str) -> str:
    """Differs where one `F.linear` on a type of device may become different graphs."""
    compiled = library() if device == "cpu" else None
    return " ".join([_sources(), "" if compiled is None else compiled.instruction_set, *names(), *implementations()])


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
