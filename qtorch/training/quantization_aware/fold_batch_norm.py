"""Batch normalization folded into the convolution before it, for inference and for quantization-aware training.

    gamma (conv(x, w) + b - mean) / sigma + beta  =  conv(x, w f) + (b - mean) f + beta,
    f = gamma / sigma,   sigma = sqrt(var + eps)

In training, what is fake-quantized is w f, by the running variance, and the output is divided by f before it is
normalized by the batch (Jacob et al., arXiv 1712.05877, section 3.2; Krishnamoorthi, arXiv 1806.08342, section 3.2.2):

    y = norm(conv(x_hat, quantize(w f)) / f + b)         in training
    y = conv(x_hat, quantize(w f)) + (b - mean) f + beta     in eval mode, and converted
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes.conv import CONVS
from ...kernels.conv import Window
from ...model.install import check_model
from .layers import LAYERS, FakeQuantizedConv, of_each_conv

NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

SMALLEST_FACTOR = 1e-8
"""Of |f|: a gamma of zero, where residual branches often start, is still trained."""


class ConvNorm(nn.Module):
    """A convolution followed by the batch normalization that it holds, `norm`. Recipes with state in layers (`lsq`,
    `scheduled_qat`) fold it in training; `convert()` leaves a convolution with a bias."""

    norm: Any

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input))


ConvNorm1d, ConvNorm2d, ConvNorm3d = of_each_conv(ConvNorm)


class FakeQuantizedConvNorm(FakeQuantizedConv):
    """Base of the three in training."""

    norm: Any

    @classmethod
    def to_matrix(cls, module: Any, weight: Tensor) -> Tensor:
        return super().to_matrix(module, weight * _along(_factor(module.norm), weight, 0).to(weight.dtype))

    def convolve(self, input: Tensor, window: Window, bias: Tensor | None) -> Tensor:
        if not self.norm.training:
            return super().convolve(input, window, _folded_bias(bias, self.norm).to(input.dtype))
        y = super().convolve(input, window, None)
        y = y / _along(_factor(self.norm), y, 1).to(y.dtype)
        return self.norm(y if bias is None else y + _along(bias, y, 1))

    @torch.no_grad()
    def restore(self) -> None:
        self.bias = nn.Parameter(_folded_bias(self.bias, self.norm).to(self.weight.dtype))
        del self.norm
        super().restore()


FakeQuantizedConvNorm1d, FakeQuantizedConvNorm2d, FakeQuantizedConvNorm3d = of_each_conv(FakeQuantizedConvNorm)

WITH_NORM: dict[type[nn.Module], type[ConvNorm]] = dict(zip(CONVS, (ConvNorm1d, ConvNorm2d, ConvNorm3d), strict=True))

LAYERS.update(
    {ConvNorm1d: FakeQuantizedConvNorm1d, ConvNorm2d: FakeQuantizedConvNorm2d, ConvNorm3d: FakeQuantizedConvNorm3d}
)


@torch.no_grad()
def fold_batch_norm(
    model: nn.Module, pairs: Mapping[str, str] | None = None, *, train: bool = False
) -> list[tuple[str, str]]:
    """Fold batch normalizations into the convolutions before them, in place; an `nn.Identity` takes their place.

    Args:
        pairs: names of convolutions to names of the normalizations that follow them, and follow nothing else; None for
            those that follow each other in an `nn.Sequential`.
        train: keep the normalizations, in the convolutions (`ConvNorm2d`), so that recipes with learned or observed
            scales fold them in training. Otherwise they are multiplied into the weights, with the running statistics.

    Returns:
        The names of what was folded.

    Raises:
        ValueError: a name is not that of a convolution or a normalization, the channels differ, a normalization has no
            running statistics, or a module is in several pairs. The model is unchanged.
    """
    check_model("fold_batch_norm", model)
    found = _adjacent(model) if pairs is None else list(dict(pairs).items())
    modules = dict(model.named_modules())
    folded: list[tuple[str, str]] = []
    for conv, norm in found:
        _check_pair(conv, norm, modules)
        if any(norm == other or conv == first for first, other in folded):
            raise ValueError(f"fold_batch_norm: {conv} or {norm} is in more than one pair")
        folded.append((conv, norm))
    for name, norm_name in folded:
        conv, norm = modules[name], modules[norm_name]
        if train:
            conv.__class__ = WITH_NORM[type(conv)]
            conv.norm = norm
        else:
            bias = _folded_bias(conv.bias, norm).to(conv.weight.dtype)
            conv.weight.mul_(_along(_factor(norm), conv.weight, 0))
            conv.bias = nn.Parameter(bias)
        parent, _, attribute = norm_name.rpartition(".")
        setattr(modules[parent], attribute, nn.Identity())
    return folded


def _adjacent(model: nn.Module) -> list[tuple[str, str]]:
    pairs = []
    for name, module in model.named_modules():
        children = list(module.named_children()) if isinstance(module, nn.Sequential) else []
        for (first, conv), (second, norm) in itertools.pairwise(children):
            if type(conv) in CONVS and type(norm) in NORMS:
                pairs.append((f"{name}.{first}".lstrip("."), f"{name}.{second}".lstrip(".")))
    return pairs


def _check_pair(conv_name: str, norm_name: str, modules: Mapping[str, nn.Module]) -> None:
    conv: Any = modules.get(conv_name)
    norm: Any = modules.get(norm_name)
    if type(conv) not in CONVS:
        raise ValueError(f"fold_batch_norm: {conv_name} is not an nn.Conv1d, 2d or 3d but a {type(conv).__name__}")
    if type(norm) not in NORMS:
        raise ValueError(f"fold_batch_norm: {norm_name} is not an nn.BatchNorm1d, 2d or 3d but a {type(norm).__name__}")
    if type(conv.weight) is not nn.Parameter:
        raise ValueError(f"fold_batch_norm: the weight of {conv_name} is quantized; fold first")
    if conv.out_channels != norm.num_features:
        raise ValueError(
            f"fold_batch_norm: {conv_name} has {conv.out_channels} channels, {norm_name} has {norm.num_features}"
        )
    if norm.running_var is None:
        raise ValueError(f"fold_batch_norm: {norm_name} has no running statistics")


def _factor(norm: Any) -> Tensor:
    """f, (N), a constant: its gradient cancels, the output being divided by it."""
    factor = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight.detach()
    return torch.where(factor.abs() < SMALLEST_FACTOR, SMALLEST_FACTOR, factor)


def _folded_bias(bias: Tensor | None, norm: Any) -> Tensor:
    """(b - mean) f + beta, (N)."""
    shift = -norm.running_mean if bias is None else bias - norm.running_mean
    shift = shift * _factor(norm)
    return shift if norm.bias is None else shift + norm.bias


def _along(vector: Tensor, like: Tensor, axis: int) -> Tensor:
    """`vector` along one axis of what has as many axes as `like`."""
    return vector.reshape(*(1,) * axis, -1, *(1,) * (like.dim() - axis - 1))
