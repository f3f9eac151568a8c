"""Quantization primitives on plain tensors: types, granularities, specs, and the four stages of quantization."""

from .supported_versions import check_version

check_version("torch")  # first of all: what follows needs it

from .affine import MappingType, ZeroPointDomain, dequantize_affine, quantize_affine
from .codebooks import (
    NF4_TABLE, CodebookSpec, PowerSpec, dequantize_codebook, kmeans_codebook, power_table, quantize_codebook,
)  # fmt: skip
from .fake_quant import (
    fake_quantize_affine, fake_quantize_affine_cachemask, learned_step_fake_quantize, lsq_grad_scale, lsq_scale,
)  # fmt: skip
from .granularity import Granularity, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from .jsonable import construct, from_json, jsonable, to_json  # noqa: F401 (as Scheme)
from .pruning import is_2_4, mask_2_4, mask_blocks, prune_2_4, prune_blocks
from .qdtype import QDType, qdtype
from .qparams import choose_qparams_affine, choose_qparams_affine_with_min_max
from .rotated_spec import RotatedSpec
from .rounding import Noise, Rounding, round_to_integer
from .scale_rules import (
    AbsMaxRule, AbsMeanRule, FixedRangeRule, HQQRule, LSQRule, MinMaxRule, MSERule, PercentileRule, PowerMeanRule,
    ScaleRule,
)  # fmt: skip
from .spec import LinearSpec, QuantSpec, Scheme, mx_spec, nvfp4_spec  # noqa: F401 (for the rooms above)
from .sqnr import compute_error
from .tracing import is_compiling  # noqa: F401

__all__ = [
    "NF4_TABLE", "AbsMaxRule", "AbsMeanRule", "CodebookSpec", "FixedRangeRule", "Granularity", "HQQRule", "LSQRule",
    "LinearSpec", "MSERule", "MappingType", "MinMaxRule", "Noise", "PerAxis", "PerBlock", "PerGroup", "PerRow",
    "PerTensor", "PerToken", "PercentileRule", "PowerMeanRule", "PowerSpec", "QDType", "QuantSpec", "RotatedSpec",
    "Rounding", "ScaleRule", "ZeroPointDomain", "choose_qparams_affine", "choose_qparams_affine_with_min_max",
    "compute_error", "dequantize_affine", "dequantize_codebook", "fake_quantize_affine",
    "fake_quantize_affine_cachemask", "from_json", "is_2_4", "kmeans_codebook", "learned_step_fake_quantize",
    "lsq_grad_scale", "lsq_scale", "mask_2_4", "mask_blocks", "mx_spec", "nvfp4_spec", "power_table", "prune_2_4",
    "prune_blocks", "qdtype", "quantize_affine", "quantize_codebook", "round_to_integer", "to_json",
]  # fmt: skip
