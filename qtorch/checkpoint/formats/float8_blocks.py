"""Weights in float8 codes with a scale for each block, row or tensor, as several formats store them.

w = q * s
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...primitives.granularity import Granularity, PerRow, PerTensor, granularity_of
from ..folder_source import FolderSource, Parts, StoredWeight
from ..sources import register_source
from .blocks import Cut, check_stored, symmetric_spec, weight_only, with_suffix

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def float8_weight(
    source: FolderSource,
    name: str,
    scale: str,
    block: Sequence[int] | None = None,
    kinds: Sequence[torch.dtype] = FLOAT8,
) -> StoredWeight:
    """A weight (..., O, I) of float8 codes, or of other `kinds`. The stored scales are (..., O / block[0], I /
    block[1]), or (..., O / block[0], 1, I / block[1], 1) for blocks, of which the last one of an axis may be shorter;
    else a single one, (..., O) or (..., O, 1)."""
    folder = source.folder
    ndim = len(folder.stored[name].shape) if name in folder.stored else 2
    check_stored(folder, name, kinds, [None] * max(ndim, 2))
    codes, stored = folder.stored[name], folder.stored[scale].shape if scale in folder.stored else ()
    shape = codes.shape
    if block is None:
        per_row = math.prod(stored) != 1 and stored in (shape[:-1], (*shape[:-1], 1))
        check_stored(folder, scale, SCALES, stored if per_row or math.prod(stored) == 1 else (1,))
        of_scale = (*shape[:-1], 1) if per_row else (1,) * len(shape)
        granularity: Granularity = PerRow() if per_row else PerTensor()
        cuts: list[Cut] = []
    else:
        *outer, outputs, inputs = shape
        rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
        of_scale = (*outer, rows, columns)
        is_4d = len(stored) == len(shape) + 2
        check_stored(folder, scale, SCALES, (*outer, rows, 1, columns, 1) if is_4d else of_scale)
        with folder.naming(name):
            cuts = [Cut.of(outputs, block[0], smallest=1), Cut.of(inputs, block[1])]
        parts = [-1 if cut.part == cut.size else cut.part for cut in cuts]
        granularity = granularity_of((1,) * len(outer) + tuple(parts))

    def read() -> Parts:
        scales = folder.read(scale).float().reshape(of_scale)
        for axis, cut in zip((-2, -1), cuts, strict=False):
            scales = cut.copies(scales, axis)
        return folder.read(name, mmap=source.mmap), {"scale": scales.contiguous()}

    spec = symmetric_spec(codes.dtype, granularity, torch.float32)
    return StoredWeight((name, scale), weight_only(spec, shape, folder.dtype or torch.bfloat16), read)


# FP8 as DeepSeek-V3 stores it, and transformers' FineGrainedFP8Config: `quant_method` "fp8".
#
#     weight             e4m3 (O, I)
#     weight_scale_inv   (O / 128, I / 128), fp32 or e8m0; despite its name a factor
#     w = q * weight_scale_inv
#
# Also weights with one `weight_scale`, or one for each row, as vLLM's quantization "fp8" and FBGEMM ("fbgemm_fp8")
# store them. Activations, which the formats quantize on each call or by `input_scale`, stay in floating point.
#
# Source: deepseek-ai/DeepSeek-V3 `inference/fp8_cast_bf16.py`.


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
            weights[name] = float8_weight(self, name, f"{name}{_BLOCKS}", block)
        for name in with_suffix(self.folder, _WHOLE):
            weights[f"{name}.weight"] = float8_weight(self, f"{name}.weight", f"{name}{_WHOLE}")
        return weights

    def ignored(self) -> set[str]:
        return {name for name in self.folder.stored if name.endswith(_NOT_PARAMETERS)}
