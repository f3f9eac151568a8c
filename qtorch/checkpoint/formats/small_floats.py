"""Weights in codes of 8 and 4 floating-point bits with a scale for each block, row or tensor, as several packages store
them: DeepSeek, NVIDIA Model Optimizer, quanto and gpt-oss. w = q * s
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...dtypes.transposed_weight import TransposedScheme
from ...primitives.granularity import Granularity, PerRow, PerTensor, granularity_of
from ...primitives.spec import MX_BLOCK, NVFP4_BLOCK, mx_spec, nvfp4_spec
from ..hf_folder import FolderSource, Parts, Seen, StoredWeight
from ..sources import register_source
from .blocks import Cut, check_stored, symmetric_spec, unpack_nibbles, weight_only, with_suffix

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def float8_weight(
    source: FolderSource, name: str, scale: str, block: Sequence[int] | None = None,
    kinds: Sequence[torch.dtype] = FLOAT8,
) -> StoredWeight:  # fmt: skip
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


@register_source
class DeepseekFp8Source(FolderSource):
    """FP8 as DeepSeek-V3 stores it, and transformers' FineGrainedFP8Config: `quant_method` "fp8".

        weight             e4m3 (O, I)
        weight_scale_inv   (O / 128, I / 128), fp32 or e8m0; despite its name a factor
        w = q * weight_scale_inv

    Also weights with one `weight_scale`, or one for each row, as vLLM's quantization "fp8" and FBGEMM ("fbgemm_fp8")
    store them. Activations, which the formats quantize on each call or by `input_scale`, stay in floating point.

    Source: deepseek-ai/DeepSeek-V3 `inference/fp8_cast_bf16.py`.
    """

    format = "fp8"
    methods = ("fp8", "fbgemm_fp8")
    left_out = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".activation_scale")

    def find_weights(self) -> dict[str, StoredWeight]:
        block = self.folder.quantization_config.get("weight_block_size") or [128, 128]
        if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
            raise ValueError(f"{self.path}: weight_block_size is {block!r:.80}, not two sizes such as [128, 128]")
        weights = {}
        for name in with_suffix(self.folder, "_scale_inv"):
            weights[name] = float8_weight(self, name, f"{name}_scale_inv", block)
        for name in with_suffix(self.folder, ".weight_scale"):
            weights[f"{name}.weight"] = float8_weight(self, f"{name}.weight", f"{name}.weight_scale")
        return weights


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


@register_source
class ModeloptSource(FolderSource):
    """NVIDIA Model Optimizer: NVFP4 and FP8; `quant_method` "modelopt", or hf_quant_config.json beside config.json.

        NVFP4   weight uint8 (O, I / 2), weight_scale e4m3 (O, I / 16), weight_scale_2 fp32, a factor
                w = q * (weight_scale * weight_scale_2)
        FP8     weight e4m3 (O, I), weight_scale fp32, one or (O) or, in blocks of 128 by 128, (O / 128, 1, I / 128, 1)
                w = q * weight_scale

    Which of them a weight has is seen from its tensors. Scales of activations and of the KV cache (`input_scale`,
    `k_scale`, ...) are left out: activations stay in floating point. Source: Model-Optimizer 0.39
    `modelopt/torch/export/quant_utils.py`.
    """

    format = "modelopt"
    methods = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    settings = "hf_quant_config.json"
    left_out: ClassVar[tuple[str, ...]] = (".input_scale", ".k_scale", ".v_scale", ".k_proj.output_scale")
    left_out += (".v_proj.output_scale", ".k_bmm_quantizer._amax", ".v_bmm_quantizer._amax")

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        settings = config if self.folder.quantization_config else config.get("quantization")
        algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
        if algorithm is not None and algorithm not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            raise ValueError(f"{self.path}: quant_algo is {algorithm!r:.40}, which is not read; known: {known}")
        return {f"{name}.weight": self._weight(name) for name in with_suffix(self.folder, ".weight_scale")}

    def _weight(self, name: str) -> StoredWeight:
        folder, weight, scale = self.folder, f"{name}.weight", f"{name}.weight_scale"
        if f"{name}.pre_quant_scale" in folder.stored:
            multiplies = f"{name}.pre_quant_scale multiplies the input of {weight}"
            raise ValueError(f"{folder.file_of(scale)}: {multiplies}, which has no place in the model; fold it")
        if f"{name}.weight_scale_2" in folder.stored:
            return self._nvfp4(weight, scale, f"{name}.weight_scale_2")
        shape = folder.stored[scale].shape
        in_blocks = len(shape) == 4 or (len(shape) == 2 and shape[1] > 1)
        return float8_weight(self, weight, scale, (128, 128) if in_blocks else None)

    def _nvfp4(self, weight: str, scale: str, of_scale: str) -> StoredWeight:
        folder = self.folder
        outputs, half = check_stored(folder, weight, [torch.uint8], (None, None)).shape
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


_BLOCKS, _SCALES = "_blocks", "_scales"
_NAN = 255


@register_source
class Mxfp4Source(FolderSource):
    """MXFP4 as OpenAI's gpt-oss stores its experts, and transformers' Mxfp4Config: `quant_method` "mxfp4".

        gate_up_proj_blocks   uint8 (E, O, I / 32, 16), two e2m1 codes in a byte, the low nibble first
        gate_up_proj_scales   uint8 (E, O, I / 32), e8m0: 2^(scale - 127)
        w = q * 2^(scale - 127)

    The parameter `gate_up_proj` of the model is (E, I, O): it is held as the stored matrices, and transposed without
    copying. Biases, routers and attention are in floating point. Source: transformers 5.23 `integrations/mxfp4.py`
    (convert_moe_packed_tensors).
    """

    format = "mxfp4"
    methods = ("mxfp4",)
    marks = r"\.experts\.(gate_up|down)_proj_blocks$"

    def find_weights(self) -> dict[str, StoredWeight]:
        return {name: self._weight(name) for name in with_suffix(self.folder, _BLOCKS)}

    def _weight(self, name: str) -> StoredWeight:
        folder, blocks, scales = self.folder, f"{name}{_BLOCKS}", f"{name}{_SCALES}"
        of_codes = (None, None, None, MX_BLOCK // 2)
        experts, outputs, count, _ = check_stored(folder, blocks, [torch.uint8], of_codes).shape
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


_MAP = "quanto_qmap.json"
_DATA, _SCALE = "._data", "._scale"


@register_source
class QuantoSource(FolderSource):
    """optimum.quanto in safetensors: `quant_method` "quanto", or its quanto_qmap.json beside the tensors.

        weight._data    int8 or float8 (O, I)
        weight._scale   (O, 1), or a single one
        w = q * s

    qint4 and qint2 keep codes by groups, without the shape of the weight, and are refused. Source: quanto 0.2.7
    `nn/qmodule.py`, `tensor/qbytes.py`.
    """

    format = "quanto"
    methods = ("quanto",)
    left_out = (".input_scale", ".output_scale")  # of activations, which stay in floating point

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        return super().matches(seen) or (seen.method is None and _MAP in seen.files)

    def find_weights(self) -> dict[str, StoredWeight]:
        if grouped := with_suffix(self.folder, f"{_DATA}{_DATA}"):
            raise ValueError(
                f"{self.path}: {grouped[0]} has groups of 4 or 2 bits, and no file of quanto says its shape; quantize "
                "the float checkpoint that it was made from: quantize_checkpoint(source, target, int4_weight_only())"
            )
        names, kinds = with_suffix(self.folder, _DATA), (torch.int8, *FLOAT8)
        return {name: float8_weight(self, f"{name}{_DATA}", f"{name}{_SCALE}", kinds=kinds) for name in names}
