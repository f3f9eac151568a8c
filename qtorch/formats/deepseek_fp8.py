"""FP8 as DeepSeek-V3 stores it, and transformers' FineGrainedFP8Config: `quant_method` "fp8".

    weight             e4m3 (O, I)
    weight_scale_inv   (O / 128, I / 128), fp32 or e8m0; despite its name a factor
    w = q * weight_scale_inv

Also weights with one `weight_scale`, or one for each row, as vLLM's quantization "fp8" and FBGEMM ("fbgemm_fp8") store
them. Activations, which the formats quantize on each call or by `input_scale`, stay in floating point.

Source: deepseek-ai/DeepSeek-V3 `inference/fp8_cast_bf16.py`.
"""

from __future__ import annotations

from ..checkpoint.folder_source import FolderSource, StoredWeight
from ..checkpoint.source import register_source
from .blocks import with_suffix
from .float8_blocks import block_weight, tensor_or_row_weight

_BLOCKS = "_scale_inv"
_WHOLE = ".weight_scale"
_NOT_PARAMETERS = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".activation_scale")


@register_source
class DeepseekFp8Source(FolderSource):
    """A folder of DeepSeek, or of transformers' FineGrainedFP8Config."""

    format = "fp8"
    methods = ("fp8", "fbgemm_fp8")

    def find_weights(self) -> dict[str, StoredWeight]:
        block = self.folder.quantization_config.get("weight_block_size") or [128, 128]
        if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
            raise ValueError(f"{self.path}: weight_block_size is {block!r:.80}, not two sizes such as [128, 128]")
        weights = {}
        for name in with_suffix(self.folder, _BLOCKS):
            weights[name] = block_weight(self, name, f"{name}{_BLOCKS}", block)
        for name in with_suffix(self.folder, _WHOLE):
            weights[f"{name}.weight"] = tensor_or_row_weight(self, f"{name}.weight", f"{name}{_WHOLE}")
        return weights

    def ignored(self) -> set[str]:
        return {name for name in self.folder.stored if name.endswith(_NOT_PARAMETERS)}
