"""Folders that transformers' `save_pretrained` writes for a quantized model; `transformers` is not imported.

config.json                      `quantization_config` has the `quant_method` "qtorch", see `config`
model.safetensors                or shards that model.safetensors.index.json names
    <name>_codes, <name>_packed, <name>_scale, ...    the parts of a quantized tensor, see `stored`
    <name>                       an empty tensor, the marker of a quantized tensor
    metadata "qtorch.transformers"                    see `Index`
"""

from . import source  # noqa: F401 (they register the format)
from .names import QUANT_METHOD, Index, cast, quantization_config, stored

__all__ = ["QUANT_METHOD", "Index", "cast", "quantization_config", "stored"]
