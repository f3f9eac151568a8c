"""The format of BitNet, as transformers stores it."""

from dataclasses import replace

import torch

from ...dtypes import PackedLayout
from ...primitives import AbsMeanRule, LinearSpec, MappingType, PerRow, QuantSpec, Scheme, qdtype
from ...primitives.layouts.packed import unpack_dense
from ...recipes.integer import int8_activation
from ..hf_folder import FolderSource, Parts, StoredWeight
from ..sources import register_source
from .blocks import FLOATS, check_stored, with_suffix

_SCALE = "_scale"
_PER_BYTE = 4

_TERNARY = QuantSpec(qdtype("int2"), PerRow(), scale_rule=AbsMeanRule(), quant_min=-1, quant_max=1)
_INT8 = replace(int8_activation(PerRow(), MappingType.SYMMETRIC), eps=1e-5 / 127)

_DIVIDES = {"bitlinear": True, "autobitlinear": False}
"""Whether weight_scale divides, by `linear_class`."""


@register_source
class BitnetSource(FolderSource):
    """BitNet b1.58 as transformers stores it: `quant_method` "bitnet".

        weight         uint8 (O / 4, I): bits 2 i and 2 i + 1 of row r hold q + 1 of row i O / 4 + r; or floats (O, I)
        weight_scale   (1)
        w = q / weight_scale     of BitLinear,          q is -1, 0 or 1
        w = q * weight_scale     of AutoBitLinear

    Inputs are quantized on each call, as the model was trained: int8 by token, with the scale max(|x|, 1e-5) / 127. The
    scale of the weight is kept once for each row, in fp32, which integer kernels read; 1 / weight_scale is rounded to
    fp32. Source: transformers 5.23 `integrations/bitnet.py`.
    """

    format = "bitnet"
    methods = ("bitnet",)

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        linear_class = config.get("linear_class", "bitlinear")
        if not isinstance(linear_class, str) or linear_class not in _DIVIDES:
            raise ValueError(f"{self.path}: linear_class is {linear_class!r:.40}; known: {', '.join(_DIVIDES)}")
        if config.get("use_rms_norm"):
            raise ValueError(
                f"{self.path}: use_rms_norm puts a norm into each linear layer, which has no place in the model of "
                "transformers; dequantize it there"
            )
        if config.get("quantization_mode", "offline") != "offline":
            raise ValueError(
                f"{self.path}: quantization_mode is {config['quantization_mode']!r:.40}, its weights are floats. "
                "Remove quantization_config from config.json, load it, and call quantize_(model, bitnet_training()), "
                "which trains as transformers does, and quantize_(model, convert())"
            )
        names = [f"{name}.weight" for name in with_suffix(self.folder, f".weight{_SCALE}")]
        return {name: self._weight(name, _DIVIDES[linear_class]) for name in names}

    def _weight(self, name: str, divides: bool) -> StoredWeight:
        folder, scale = self.folder, f"{name}{_SCALE}"
        dtype, (rows, columns), *_ = check_stored(folder, name, (torch.uint8, *FLOATS), (None, None))
        of_scale = check_stored(folder, scale, FLOATS, (1,)).dtype
        shape = (rows * _PER_BYTE if dtype is torch.uint8 else rows, columns)
        scheme = Scheme(LinearSpec(_TERNARY, _INT8, layout=PackedLayout()), shape, self.dtype_of(of_scale))

        def read() -> Parts:
            stored = folder.read(name)
            if dtype is torch.uint8:
                # Codes of a byte are rows that lie apart: (R, I, 4) -> (4, R, I).
                rows = unpack_dense(stored.unsqueeze(-1), 2, _PER_BYTE).movedim(-1, 0)
                stored = rows.reshape(shape).to(torch.int8) - 1
            codes = stored.clamp(-1, 1).to(torch.int8)
            if not torch.equal(codes.to(stored.dtype), stored):
                raise ValueError("one of its codes is not -1, 0 or 1")
            factor = folder.read(scale).float()
            factor = 1 / factor if divides else factor
            if not (factor > 0) & (factor < torch.inf):
                raise ValueError(f"its weight_scale is {folder.read(scale).item()}, which is no scale")
            return codes, {"scale": factor.reshape(1, 1).repeat(shape[0], 1)}

        return StoredWeight((name, scale), scheme, read)
