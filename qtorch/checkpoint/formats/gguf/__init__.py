"""GGUF, the files of llama.cpp: read exactly, and kept packed.

`container.py` reads the header, `block_types.py` the types, `source.py` the tensors by the names of `architectures.py`;
the package `gguf` is not needed for it. `write.py` writes files with it: `encode.py` has the blocks, `metadata.py` and
`vocabulary.py` what llama.cpp has to know of the model and of its tokenizer.
"""

from . import source, write  # noqa: F401 (register the format)
