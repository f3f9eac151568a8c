"""GGUF, the files of llama.cpp: read exactly, and kept packed.

`container.py` reads the header, `block_types.py` the types; `source.py` has the names of transformers, and undoes the
order of rows. The package `gguf` is not needed.
"""

from . import source  # noqa: F401 (registers the format)
