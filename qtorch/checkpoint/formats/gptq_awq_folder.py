"""Writes folders of GPTQ and AWQ, whose tensors `autogptq` describes, for engines that read only those.

Codes, zero points and scales are stored as they are: `load_quantized` gives the same tensors back, bit for bit. A model
has one width of codes and one group size. What these formats cannot hold is refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...dtypes import AffineQuantizedTensor, QuantizedTensor
from ...primitives import ZeroPointDomain
from ..save_folder import SaveFormat, register_save_format
from .autogptq import GPTQ
from .compressed_tensors.packing import pack

_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that AWQ puts into each nibble of a word."""


class _GroupedFormat(SaveFormat):
    """What both formats ask of a model."""

    bits: ClassVar[tuple[int, ...]]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.first: tuple[str, dict[str, Any]] | None = None
        self.floats: list[str] = []

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        layer, _, last = name.rpartition(".")
        if not isinstance(tensor, QuantizedTensor):
            if last == "weight" and tensor.dim() == 2:
                self.floats.append(layer)
            return {name: tensor}
        if problem := self._problem_of(tensor, last):
            bits, nearest = tensor.scheme.weight.dtype.bits, "int8_weight_only(group_size=128, scale_dtype=...)"
            if bits <= 4 or 8 not in self.bits:
                nearest = "int4_weight_only(group_size=128)"
            raise ValueError(f"{self.name}: {name} {problem}; quantize with {nearest}")
        codes, others = tensor.canonical()
        bits, (rows, inputs) = tensor.scheme.weight.dtype.bits, codes.shape
        groups = others["scale"].shape[1]
        zero_point = others.get("zero_point")
        if codes.dtype is torch.int8:
            codes = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        sym, middle = zero_point is None, 2 ** (bits - 1)
        zeros = torch.full((rows, groups), middle, dtype=torch.int16, device=codes.device)
        if zero_point is not None:
            shift = middle if tensor.scheme.weight.dtype.is_signed else 0
            zeros = zero_point.expand(rows, groups).to(torch.int16) + shift
        size = inputs // groups
        if groups == 1 and not (self.first and self.first[1]["group_size"] == size):
            size = -1  # one group a row, unless the folder has groups of this size
        found = {"bits": bits, "group_size": size, "sym": sym}
        self.first = self.first or (name, found)
        if found != self.first[1]:
            raise ValueError(
                f"{self.name}: {name} has {found}, and {self.first[0]} {self.first[1]}; a folder has one of each: "
                "quantize all layers alike, or write format='compressed-tensors'"
            )
        try:
            packed = self._packed(codes, zeros, bits)
        except ValueError as error:
            raise ValueError(f"{self.name}: {name} {error}") from error
        return {f"{layer}.{key}": each for key, each in {**packed, "scales": others["scale"].t().contiguous()}.items()}

    def _problem_of(self, tensor: QuantizedTensor, last: str) -> str | None:
        scheme = tensor.scheme
        spec: Any = scheme.weight
        if type(tensor) is not AffineQuantizedTensor or tensor.dim() != 2 or last != "weight":
            return f"is a {type(tensor).__name__} of {tensor.dim()} axes, and the format has weights of linear layers"
        if spec.dtype.is_floating_point or spec.dtype.bits not in self.bits:
            return f"has codes in {spec.dtype}, and the format has integers of {', '.join(map(str, self.bits))} bits"
        codes, others = tensor.canonical()
        if others.keys() - {"scale", "zero_point"}:
            return f"has more than scales and zero points: {', '.join(sorted(others))}"
        if scheme.spec.activation is not None:
            return "quantizes its activations, and the format has weights alone"
        if "zero_point" in others and spec.zero_point_domain is not ZeroPointDomain.INT:
            return "has zero points that are real numbers, and the format has codes"
        scale = others["scale"]
        if scale.shape[0] != codes.shape[0]:
            return f"has scales {tuple(scale.shape)} for codes {tuple(codes.shape)}, and the format has them by row"
        if scale.dtype is not tensor.dtype:
            return f"has scales in {scale.dtype}, and engines keep them in {tensor.dtype}, that of the model"
        if codes.shape[0] % 32 or codes.shape[1] % 32:
            return f"has shape {tuple(codes.shape)}, and the format packs multiples of 32"
        return None

    @abstractmethod
    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        """`qweight` and `qzeros`, and further tensors, of codes (O, I) and zero points (O, G) that count from 0."""

    def progress(self) -> Any:
        return None

    def resume(self, progress: Any) -> None:
        # What all layers have in common would be that of the journal, which may be anybody's.
        raise ValueError(f"{self.name}: a folder of this format is not continued")

    def _settings(self) -> dict[str, Any]:
        return dict(self.first[1]) if self.first else {"bits": self.bits[0], "group_size": -1, "sym": True}


@register_save_format
class GptqFormat(_GroupedFormat):
    """Integers of 2, 3, 4 or 8 bits; `checkpoint_format` is "gptq", which stores zero points z - 1, or "gptq_v2"."""

    name = "gptq"
    bits = (2, 3, 4, 8)

    def __init__(self, config: Mapping[str, Any] | None = None, checkpoint_format: str = "gptq") -> None:
        super().__init__(config)
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise ValueError(f"gptq: checkpoint_format is {checkpoint_format!r:.40}, want 'gptq' or 'gptq_v2'")
        self.checkpoint_format = checkpoint_format

    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        inputs = codes.shape[1]
        stored = zeros.t() - int(GPTQ[self.checkpoint_format].minus_one)
        if bool((stored < 0).any()):
            raise ValueError(
                "has zero points of 0, which 'gptq' cannot store as z - 1: save it in the format 'qtorch', then "
                "convert_checkpoint(..., format='gptq', options={'checkpoint_format': 'gptq_v2'})"
            )
        return {
            "qweight": pack(codes, bits).t().contiguous(),
            "qzeros": pack(stored.to(torch.uint8), bits),
            "g_idx": torch.arange(inputs, dtype=torch.int32, device="cpu") // (inputs // zeros.shape[1]),
        }

    def config(self) -> dict[str, Any]:
        more = {"desc_act": False, "lm_head": False, "checkpoint_format": self.checkpoint_format}
        return {"quant_method": "gptq", **self._settings(), **more}


@register_save_format
class AwqFormat(_GroupedFormat):
    """Integers of 4 bits, in the gemm packing."""

    name = "awq"
    bits = (4,)

    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        order = [8 * word + output for word in range(codes.shape[0] // 8) for output in _OUTPUT_OF_NIBBLE]
        packed = (pack(each.t()[:, order].to(torch.uint8).contiguous(), bits) for each in (codes, zeros))
        return dict(zip(("qweight", "qzeros"), packed, strict=True))

    def config(self) -> dict[str, Any]:
        settings = self._settings()
        more = {"zero_point": True, "version": "gemm", "modules_to_not_convert": sorted(self.floats) or None}
        return {"quant_method": "awq", "bits": settings["bits"], "group_size": settings["group_size"], **more}
