"""GGUF, the files of llama.cpp: read exactly, and kept packed.

`reading.py` reads files, `block_types.py` has the types and their blocks, `architectures.py` the names of tensors; the
package `gguf` is not needed for it. `writing.py` writes files with it, and `metadata.py` has what llama.cpp has to know
of the model and of its tokenizer.
"""

from . import reading, writing  # noqa: F401 (register the format)
