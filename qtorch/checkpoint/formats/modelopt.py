"""NVIDIA Model Optimizer: NVFP4 and FP8; `quant_method` "modelopt", or hf_quant_config.json beside config.json.

    NVFP4   weight uint8 (O, I / 2), weight_scale e4m3 (O, I / 16), weight_scale_2 fp32, a factor
            w = q * (weight_scale * weight_scale_2)
    FP8     weight e4m3 (O, I), weight_scale fp32, one or (O) or, in blocks of 128 by 128, (O / 128, 1, I / 128, 1)
            w = q * weight_scale

Which of them a weight has is seen from its tensors. Scales of activations and of the KV cache (`input_scale`,
`k_scale`, ...) are left out: activations stay in floating point. Source: Model-Optimizer 0.39
`modelopt/torch/export/quant_utils.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.spec import NVFP4_BLOCK, nvfp4_spec
from ..folder_source import FolderSource, Parts, StoredWeight
from ..sources import register_source
from .blocks import check_stored, unpack_nibbles, weight_only, with_suffix
from .float8_blocks import float8_weight

# Weights in NVFP4, as several formats store them.
#
# codes        uint8 (O, I / 2), e2m1, the low nibble first
# scale        e4m3 (O, I / 16)
# scale of s   fp32, one for the tensor, a factor
# w = q * (scale * scale of s)


_SMALLEST_E4M3 = 2.0**-9


def nvfp4_parts(packed: Tensor, scale: Tensor, of_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes and the other tensors of a weight. Where a scale is zero, so are the reals, and the codes become zero."""
    factor = float(of_scale.reshape(()))
    if not torch.finfo(torch.float32).tiny / _SMALLEST_E4M3 <= factor < float("inf"):
        raise ValueError(f"the scale of its scales is {factor}; it must be a positive normal number")
    values = scale.float()
    if not bool((values >= 0).all()):
        raise ValueError("one of its scales is negative or NaN")
    codes = unpack_nibbles(packed)
    if bool((values == 0).any()):
        codes = codes.masked_fill((values == 0).repeat_interleave(NVFP4_BLOCK, -1), 0)
    return codes, {"scale": scale, "scale_scale": of_scale.float().reshape(1)}


_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MIXED_PRECISION")
_NOT_PARAMETERS: tuple[str, ...] = (".input_scale", ".k_scale", ".v_scale", ".k_proj.output_scale")
_NOT_PARAMETERS += (".v_proj.output_scale", ".k_bmm_quantizer._amax", ".v_bmm_quantizer._amax")


@register_source
class ModeloptSource(FolderSource):
    """A folder of Model Optimizer."""

    format = "modelopt"
    methods = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    settings = "hf_quant_config.json"

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        settings = config if self.folder.quantization_config else config.get("quantization")
        algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
        if algorithm is not None and algorithm not in _ALGORITHMS:
            raise ValueError(
                f"{self.path}: quant_algo is {algorithm!r:.40}, which is not read; known: {', '.join(_ALGORITHMS)}. "
                "Export the model in one of these, or quantize the original model"
            )
        return {f"{name}.weight": self._weight(name) for name in with_suffix(self.folder, ".weight_scale")}

    def ignored(self) -> set[str]:
        return {name for name in self.folder.stored if name.endswith(_NOT_PARAMETERS)}

    def _weight(self, name: str) -> StoredWeight:
        folder, weight, scale = self.folder, f"{name}.weight", f"{name}.weight_scale"
        if f"{name}.pre_quant_scale" in folder.stored:
            raise ValueError(
                f"{folder.file_of(scale)}: {name}.pre_quant_scale multiplies the input of {weight}, which has no place "
                "in the model: fold it into the layer before, or quantize the original model"
            )
        if f"{name}.weight_scale_2" in folder.stored:
            return self._nvfp4(weight, scale, f"{name}.weight_scale_2")
        shape = folder.stored[scale].shape
        in_blocks = len(shape) == 4 or (len(shape) == 2 and shape[1] > 1)
        return float8_weight(self, weight, scale, (128, 128) if in_blocks else None)

    def _nvfp4(self, weight: str, scale: str, of_scale: str) -> StoredWeight:
        folder = self.folder
        check_stored(folder, weight, [torch.uint8], (None, None))
        outputs, half = folder.stored[weight].shape
        inputs = 2 * half
        check_stored(folder, scale, [torch.float8_e4m3fn], (outputs, inputs // NVFP4_BLOCK))
        stored = folder.stored[of_scale].shape
        check_stored(folder, of_scale, [torch.float32], () if stored == () else (1,))
        if inputs % NVFP4_BLOCK:
            raise ValueError(f"{folder.file_of(weight)}: {weight} has rows of {inputs}, no multiple of {NVFP4_BLOCK}")
        scheme = weight_only(nvfp4_spec(), (outputs, inputs), folder.dtype or torch.bfloat16)

        def read() -> Parts:
            return nvfp4_parts(folder.read(weight), folder.read(scale), folder.read(of_scale))

        return StoredWeight((weight, scale, of_scale), scheme, read)
