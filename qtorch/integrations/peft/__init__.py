"""PEFT: adapters on quantized weights.

`get_peft_model`, `PeftModel.from_pretrained` and `add_adapter` need nothing from here. PEFT's layers on quantized
weights (`layers`) merge, unmerge and initialize as on float weights. The functions here are what PEFT does not have.
"""

from ...primitives.supported_versions import check_version

check_version("peft")

from .adapter_layers import requantize_merged
from .prepare import initialize_from_quantization_error, prepare_for_adapters

__all__ = ["initialize_from_quantization_error", "prepare_for_adapters", "requantize_merged"]
