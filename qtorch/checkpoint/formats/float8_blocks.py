"""Weights in float8 codes with a scale for each block, row or tensor, as several formats store them.

w = q * s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...primitives.granularity import Granularity, PerRow, PerTensor, granularity_of
from ..folder_source import FolderSource, Parts, StoredWeight
from ..sources import register_source
from .blocks import Cut, check_stored, symmetric_spec, weight_only, with_suffix

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def block_weight(source: FolderSource, name: str, scale: str, block: Sequence[int]) -> StoredWeight:
    """A weight (..., O, I) with scales (..., O / block[0], I / block[1]), or (..., O / block[0], 1, I / block[1], 1).

    The last block of an axis may be shorter.

    Raises:
        ValueError: the tensors do not fit; the message names the file and the tensor.
    """
    folder = source.folder
    ndim = len(folder.stored[name].shape) if name in folder.stored else 2
    check_stored(folder, name, FLOAT8, [None] * max(ndim, 2))
    shape = folder.stored[name].shape
    *outer, outputs, inputs = shape
    blocks = (*outer, -(-outputs // block[0]), -(-inputs // block[1]))
    is_4d = scale in folder.stored and len(folder.stored[scale].shape) == len(blocks) + 2
    check_stored(folder, scale, SCALES, (*outer, blocks[-2], 1, blocks[-1], 1) if is_4d else blocks)
    try:
        rows, columns = Cut.of(outputs, block[0], smallest=1), Cut.of(inputs, block[1])
    except ValueError as error:
        raise ValueError(f"{folder.file_of(name)}: {name}: {error}") from error

    def read() -> Parts:
        scales = columns.copies(rows.copies(exact_scale(folder.read(scale)).reshape(blocks), -2), -1)
        return folder.read(name, mmap=source.mmap), {"scale": scales.contiguous()}

    parts = (-1 if cut.part == cut.size else cut.part for cut in (rows, columns))
    return _weight(source, name, scale, granularity_of((1,) * len(outer) + tuple(parts)), read)


def tensor_or_row_weight(source: FolderSource, name: str, scale: str) -> StoredWeight:
    """A weight (..., O, I) with one scale, or (O) or (O, 1) scales.

    Raises:
        ValueError: the tensors do not fit; the message names the file and the tensor.
    """
    folder = source.folder
    ndim = len(folder.stored[name].shape) if name in folder.stored else 2
    check_stored(folder, name, FLOAT8, [None] * max(ndim, 2))
    shape = folder.stored[name].shape
    stored = folder.stored[scale].shape if scale in folder.stored else ()
    count = 1
    for size in stored:
        count *= size
    per_row = count != 1 and stored in (shape[:-1], (*shape[:-1], 1))
    check_stored(folder, scale, SCALES, stored if per_row or count == 1 else (1,))

    def read() -> Parts:
        scales = exact_scale(folder.read(scale))
        wanted = (*shape[:-1], 1) if per_row else (1,) * len(shape)
        return folder.read(name, mmap=source.mmap), {"scale": scales.reshape(wanted)}

    return _weight(source, name, scale, PerRow() if per_row else PerTensor(), read)


def exact_scale(scale: Tensor) -> Tensor:
    """A scale in fp32, which represents the other dtypes exactly."""
    return scale.float()


def _weight(
    source: FolderSource, name: str, scale: str, granularity: Granularity, read: Callable[[], Parts]
) -> StoredWeight:
    stored = source.folder.stored[name]
    spec = symmetric_spec(stored.dtype, granularity, torch.float32)
    scheme = weight_only(spec, stored.shape, source.folder.dtype or torch.bfloat16)
    return StoredWeight((name, scale), scheme, read)


# --------------------------------------------------------------------------------------------------
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
            weights[name] = block_weight(self, name, f"{name}{_BLOCKS}", block)
        for name in with_suffix(self.folder, _WHOLE):
            weights[f"{name}.weight"] = tensor_or_row_weight(self, f"{name}.weight", f"{name}{_WHOLE}")
        return weights

    def ignored(self) -> set[str]:
        return {name for name in self.folder.stored if name.endswith(_NOT_PARAMETERS)}
