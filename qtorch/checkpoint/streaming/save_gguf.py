"""save_gguf: a model in memory, or a checkpoint tensor by tensor, as a file of llama.cpp."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..formats.gguf.write import GgufFormat, check_gguf
from ..save_folder import save_folder
from .quantize_checkpoint import convert_checkpoint


def save_gguf(
    model_or_folder: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    types: str | Mapping[str, str] | None = None,
    requantize: bool = False,
) -> None:
    """Save a model of transformers as a GGUF file, which llama.cpp runs.

    Quantized weights whose numbers a type of GGUF has are written code for code: those of `gguf_q4_0()` and its kin,
    of `mxfp4_weight_only()`, of a GGUF file that was read, and others whose scales are numbers of fp16.

    Args:
        model_or_folder: a model with a `config`; or any checkpoint that `load_quantized` reads, with a config.json
            beside it, which is converted tensor by tensor.
        path: the file, which ends in ".gguf".
        tokenizer: a tokenizer of transformers, or the folder of one; by default that of the folder. A file without one
            takes numbers of tokens only.
        types: the type of the weights in floating point, such as "Q8_0", or an ordered mapping from names of modules,
            or regular expressions, to types, of which the first that matches counts. By default they keep their dtype.
        requantize: round weights once more that are quantized and not of the type that is asked for, or of any: they
            become what `types` says, or Q8_0, and a warning names them.

    Raises:
        ImportError: the package `gguf` is missing.
        ValueError: the architecture is not known, llama.cpp would compute something else, a quantized weight is of no
            type, or an entry of `types` is unknown or has no effect.
        FileExistsError: a checkpoint is converted, and `path` exists.
    """
    check_gguf()
    with tempfile.TemporaryDirectory() as temporary:
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(temporary)
            tokenizer = temporary
        options = {"types": types, "requantize": requantize}
        options["tokenizer"] = None if tokenizer is None else os.fspath(tokenizer)
        if isinstance(model_or_folder, nn.Module):
            save_folder(model_or_folder, path, GgufFormat.name, max_shard_size=5 * 2**30, options=options)
        else:
            convert_checkpoint(model_or_folder, path, format=GgufFormat.name, options=options)
