"""A model of transformers whose parameters are on the meta device, from the config.json of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.hf_folder import CONFIG


def meta_model(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The model of ``config.json``, of the class that it names, in evaluation mode.

    Parameters have no memory; buffers, which files lack, have values.

    Args:
        dtype: of the model; by default that of the configuration.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder has no config.json.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no {CONFIG}, from which transformers could build the model; give model=")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{folder}: building the model needs transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{folder}: transformers cannot build the model; give model=. It says: {reason}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    kind = next((each for each in named if each is not None), None)
    with parameters_on_meta():
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = kind._from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register have no memory; buffers, which files lack, have."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
