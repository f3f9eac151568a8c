"""LoRA that is trained through the codes of the merged weight, on a base that stays in codes.

    w_hat = dequantize(Q(dequantize(base) + sum_i s_i B_i A_i)),   A_i (r, K), B_i (N, r)
    y     = x w_hat^T + bias                          the product of the quantized layer, with its kernel
    dL/dx = g w_hat
    dL/dA = s (g B)^T x_hat,   dL/dB = s g^T (x_hat A^T)

Q chooses scales and codes as the base was quantized, in each forward, by the code that merges adapters: so the merged
layer computes what was trained, bit for bit. The gradient passes straight through Q (Bengio et al., arXiv
1308.3432), and is that of the low-rank product: no gradient of the size of w is made. x_hat is the input as the layer
quantizes it. Between forward and backward x, A and B are kept, and nothing of the size of w: the backward computes the
codes again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from ...dtypes import QuantizedTensor, dispatch, linear
from ...kernels.ops import block_mm, quantize
from ...primitives import tracing
from .adapter_layers import OnQuantized, adapted_class, is_frozen, requantize_merged


class OnMergedCodes(OnQuantized):
    """`OnQuantized` of `lora.Linear`; see the top of the file."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.peft_class, Linear):
            raise ValueError(f"merged_codes=True takes lora.Linear, not {cls.peft_class.__qualname__}; leave it out")

    @tracing.outside_graphs("the codes of merged weights are chosen in eager mode")
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT's, with the active adapters merged.

        Raises:
            ValueError: `adapter_names` is given: a batch of several adapters has no merged weight.
        """
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names: a batch of several adapters has no merged weight; set_adapter one of them")
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not names:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        factors = [tensor for name in names for tensor in (self.lora_A[name].weight, self.lora_B[name].weight)]
        return _ThroughCodes.apply(self, names, x, self.get_base_layer().bias, *factors)

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base, whose codes become those that the layer computed with."""
        with requantize_merged(), dispatch.without_autocast(self.get_base_layer().weight.device.type):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    def update_layer(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, *args, **kwargs)
        check_adapter(self, adapter_name)

    def merged_codes(self: Any, names: Sequence[str]) -> QuantizedTensor:
        """The base weight with these adapters, quantized as the base is."""
        base: QuantizedTensor = self.get_base_layer().weight
        with torch.no_grad(), dispatch.without_autocast(base.device.type):
            values = base.dequantize(torch.float32)
            for name in names:
                values += self.get_delta_weight(name)
            return base.quantized_like(values)


class _ThroughCodes(torch.autograd.Function):
    """The equations at the top of the file; `factors` are A and B of each adapter."""

    @staticmethod
    def forward(ctx: Any, layer: Any, names: list[str], x: Tensor, bias: Tensor | None, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(x, *factors)
        ctx.layer, ctx.names = layer, names
        parameters = layer.get_base_layer()._parameters
        base, parameters["weight"] = parameters["weight"], layer.merged_codes(names)
        try:
            y: Tensor = layer.base_layer(x)
        finally:
            parameters["weight"] = base
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, *factors), layer = grad_outputs, ctx.saved_tensors, ctx.layer
        needs_x, needs_bias = ctx.needs_input_grad[2:4]
        weight: Any = layer.merged_codes(ctx.names)
        weight = weight.t() if layer.fan_in_fan_out else weight
        g = grad.reshape(-1, grad.shape[-1])
        rows = _as_multiplied(x.reshape(-1, x.shape[-1]), weight)
        of_factors: list[Tensor] = []
        for name, a, b in zip(ctx.names, factors[::2], factors[1::2]):
            scaled, x_hat = g.to(a.dtype) * layer.scaling[name], rows.to(a.dtype)
            of_factors += [(scaled @ b).T @ x_hat, scaled.T @ (x_hat @ a.T)]
        of_x = linear.multiply(grad, weight.with_activation(None).t()).to(x.dtype) if needs_x else None
        return None, None, of_x, g.sum(0) if needs_bias else None, *of_factors


def _as_multiplied(rows: Tensor, weight: Any) -> Tensor:
    """The input (M, K) as a product with `weight` (N, K) sees it; that of rotated weights before its quantization."""
    spec = weight.scheme.activation
    if spec is None or spec.rotation:
        return rows
    padded = block_mm.pad_to_blocks(rows, spec.granularity)
    return quantize.dequantize_rows(spec, *quantize.quantize_input(padded, weight))[: rows.shape[0], : rows.shape[1]]


def check_adapter(layer: Any, name: str) -> None:
    """Raise `ValueError` if a merged weight does not compute what this adapter of `layer` does."""
    found = {
        "lora_dropout": not isinstance(layer.lora_dropout[name], nn.Identity),
        "lora_bias": bool(layer.lora_bias[name]),
        "a variant of LoRA, such as DoRA": name in layer.lora_variant,
    }
    for what, there in found.items():
        if there:
            raise ValueError(f"merged_codes=True takes LoRA without dropout, bias and variants; {name!r} has {what}")


def train_through_codes(model: nn.Module) -> None:
    """Let the adapters of `model`, those that are there and those to come, compute with the codes of merged weights.

    Raises:
        ValueError: there is an adapter on quantized weights that is not `lora.Linear` without dropout, bias and
            variants, or it is merged. Nothing is changed.
    """
    classes = {}
    for layer in model.modules():
        if isinstance(layer, OnQuantized):
            classes[layer] = adapted_class(layer.peft_class, OnMergedCodes)
            if layer.kept:
                raise ValueError("merged_codes: an adapter is merged; call unmerge_adapter first")
            adapters: Any = layer.lora_A
            for name in adapters:
                check_adapter(layer, name)
    for layer, kind in classes.items():
        layer.__class__ = kind
    for module in model.modules():
        if any(map(is_frozen, module._parameters.values())):
            vars(module)["adapter_mixin"] = OnMergedCodes
