"""Layers of bitsandbytes: linear layers that quantize their weight when they move to another device, or first run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import QuantizedTensor
from ...recipes import int8_dynamic_activation_int8_weight, nf4_weight_only
from ...recipes.base import WeightRecipe

__all__ = ["Linear4bit", "Linear8bitLt", "LinearNF4", "Params4bit"]


class _QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight, quantized by `recipe`; products are in `compute_dtype`, by default that of
    the input."""

    def __init__(
        self, recipe: WeightRecipe, inputs: int, outputs: int, bias: bool, device: Any, compute_dtype: Any = None
    ) -> None:
        super().__init__(inputs, outputs, bias, device)
        self.weight.requires_grad_(False)
        self.recipe, self.compute_dtype = recipe, compute_dtype

    def quantize(self) -> None:
        """Quantize the weight, unless it is."""
        if not isinstance(self.weight, QuantizedTensor) and not self.weight.is_meta:
            self.weight = nn.Parameter(self.recipe.apply(self.weight.detach()), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_QuantizedLinear":
        before = self.weight.device
        super()._apply(fn, recurse)
        if self.weight.device != before:
            self.quantize()
        return self

    def forward(self, input: Tensor) -> Tensor:
        self.quantize()
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias).to(input.dtype)


def _nf4(function: str, quant_type: str, blocksize: int | None, compress_statistics: bool) -> WeightRecipe:
    if quant_type != "nf4":
        raise ValueError(f"{function}: quant_type={quant_type!r:.20} has no equivalent; write quant_type='nf4'")
    return nf4_weight_only(group_size=blocksize or 64, double_quantize=compress_statistics)


class Linear4bit(_QuantizedLinear):
    """`nf4_weight_only`. `quant_storage` changes nothing.

    Raises:
        ValueError: `quant_type` is not "nf4"; bitsandbytes' default, "fp4", has no equivalent.
    """

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True, quant_type: str = "fp4", quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:  # fmt: skip
        recipe = _nf4(type(self).__name__, quant_type, None, compress_statistics)
        super().__init__(recipe, input_features, output_features, bias, device, compute_dtype)


class LinearNF4(Linear4bit):
    """`Linear4bit` with `quant_type="nf4"`."""

    def __init__(self, input_features: int, output_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(input_features, output_features, bias, **{**options, "quant_type": "nf4"})


class Linear8bitLt(_QuantizedLinear):
    """`int8_dynamic_activation_int8_weight`.

    Raises:
        ValueError: `has_fp16_weights`, or a `threshold` of outliers, which have no equivalent.
    """

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, has_fp16_weights: bool = True,
        threshold: float = 0.0, index: Any = None, device: Any = None,
    ) -> None:  # fmt: skip
        if has_fp16_weights:
            raise ValueError("Linear8bitLt: has_fp16_weights=True trains floats: write has_fp16_weights=False")
        if threshold:
            raise ValueError(f"Linear8bitLt: threshold={threshold} has no equivalent; write 0, or int8_weight_only()")
        super().__init__(int8_dynamic_activation_int8_weight(), input_features, output_features, bias, device)


def Params4bit(
    data: Tensor, requires_grad: bool = False, quant_state: None = None, blocksize: int | None = None,
    compress_statistics: bool = True, quant_type: str = "fp4", **of_bitsandbytes: Any,
) -> nn.Parameter:  # fmt: skip
    """The float matrix `data` as a frozen parameter in NF4; `ValueError` for what has no equivalent."""
    if requires_grad or quant_state is not None:
        raise ValueError("Params4bit: takes float data and makes a frozen weight: leave requires_grad and quant_state")
    recipe = _nf4("Params4bit", quant_type, blocksize, compress_statistics)
    return nn.Parameter(recipe.apply(data.detach()), requires_grad=False)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"bitsandbytes.nn.{name} has no equivalent here, only {', '.join(__all__)}")
