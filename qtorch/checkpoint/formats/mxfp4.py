"""MXFP4 as OpenAI's gpt-oss stores its experts, and transformers' Mxfp4Config: `quant_method` "mxfp4".

    gate_up_proj_blocks   uint8 (E, O, I / 32, 16), two e2m1 codes in a byte, the low nibble first
    gate_up_proj_scales   uint8 (E, O, I / 32), e8m0: 2^(scale - 127)
    w = q * 2^(scale - 127)

The parameter `gate_up_proj` of the model is (E, I, O): it is held as the stored matrices, and transposed without
copying. Biases, routers and attention are in floating point. Source: transformers 5.23 `integrations/mxfp4.py`
(convert_moe_packed_tensors).
"""

from __future__ import annotations

import torch

from ...dtypes.transposed_weight import TransposedScheme
from ...primitives.spec import MX_BLOCK, mx_spec
from ..folder_source import FolderSource, Parts, StoredWeight
from ..sources import register_source
from .blocks import check_stored, unpack_nibbles, weight_only, with_suffix

_BLOCKS, _SCALES = "_blocks", "_scales"
_NAN = 255


@register_source
class Mxfp4Source(FolderSource):
    """A folder of gpt-oss, or one whose experts are stored as its are."""

    format = "mxfp4"
    methods = ("mxfp4",)
    marks = r"\.experts\.(gate_up|down)_proj_blocks$"

    def find_weights(self) -> dict[str, StoredWeight]:
        return {name: self._weight(name) for name in with_suffix(self.folder, _BLOCKS)}

    def _weight(self, name: str) -> StoredWeight:
        folder, blocks, scales = self.folder, f"{name}{_BLOCKS}", f"{name}{_SCALES}"
        check_stored(folder, blocks, [torch.uint8], (None, None, None, MX_BLOCK // 2))
        experts, outputs, count, _ = folder.stored[blocks].shape
        check_stored(folder, scales, [torch.uint8], (experts, outputs, count))
        inputs = count * MX_BLOCK
        matrices = weight_only(mx_spec("float4_e2m1"), (experts, outputs, inputs), self.dtype_of(torch.bfloat16))
        scheme = TransposedScheme(matrices.spec, (experts, inputs, outputs), matrices.dtype)

        def read() -> Parts:
            exponents = folder.read(scales)
            if (exponents == _NAN).any():
                raise ValueError(f"one of its scales is {_NAN}, which e8m0 has for NaN")
            return unpack_nibbles(folder.read(blocks).flatten(-2)), {"scale": exponents.view(torch.float8_e8m0fnu)}

        return StoredWeight((blocks, scales), scheme, read)
