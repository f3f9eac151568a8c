"""compressed-tensors, the format of vLLM and llm-compressor: read by `load_quantized`, written by `save_quantized`.

    save_quantized(model, folder, format="compressed-tensors")

The package itself is not imported.
"""

from . import source, write  # noqa: F401 (register the format)
from .vllm import recipes_for_vllm

__all__ = ["recipes_for_vllm"]
