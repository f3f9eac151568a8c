"""The three matmuls of a contraction in float64, on fake-quantized operands: what the engine should compute."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from qtorch import PerBlock, QuantSpec, training
from qtorch.recipes.base import RECIPES as REGISTERED
from qtorch.training import GemmSpec, Int8MixedPrecisionTrainingConfig, TrainingSpec, int8_mixed_precision_training
from qtorch.training.recipes.base import TrainingRecipe
from tests.every_recipe import is_of_users

RECIPES = {
    "int8": int8_mixed_precision_training(),
    "int8 output": int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(grad_input=False, grad_weight=False)),
    "int8 gradients": int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(output=False)),
    "int4, int8": training.mixed_precision_training(training.fully_quantized(4, 8)),
    "switchback": training.switchback_training(),
    "tilewise": training.int8_tilewise_training(),
    "float8 rowwise": training.float8_training("rowwise"),
    "float8 tensorwise": training.float8_training("tensorwise"),
    "float8 blocks": training.float8_training(PerBlock((32, 32))),
    "mxfp8": training.mxfp8_training(),
    "nvfp4": training.nvfp4_training(stochastic_rounding=False, hadamard=False),
    "mxfp4": training.mxfp4_training(stochastic_rounding=False, hadamard=False),
    "bitnet": training.bitnet_training(),
}
RECIPES |= {name: cls() for name, cls in REGISTERED.items() if issubclass(cls, TrainingRecipe) and is_of_users(cls)}


def fake(x: Tensor, spec: QuantSpec | None) -> tuple[Tensor, Tensor]:
    """(dequantized, scale of each element), float64; blocks are completed with zeros."""
    if spec is None:
        return x.double(), torch.ones_like(x, dtype=torch.float64)
    rows, columns = (max(1, size) for size in spec.granularity.pattern(2))
    padded = pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    scale, zero_point = spec.choose_qparams(padded)
    codes = spec.dtype.decode(spec.quantize(padded, scale, zero_point)).double()
    of_element = scale.double()
    offset = torch.zeros_like(of_element) if zero_point is None else zero_point.double()
    for axis in (0, 1):
        of_element = of_element.repeat_interleave(padded.shape[axis] // scale.shape[axis], axis)
        offset = offset.repeat_interleave(padded.shape[axis] // scale.shape[axis], axis)
    codes = codes - offset
    whole = (slice(0, x.shape[0]), slice(0, x.shape[1]))
    return (codes * of_element)[whole], of_element[whole]


def backward_matmul(g: Tensor, other: Tensor, gemm: GemmSpec, forward: QuantSpec | None) -> Tensor:
    """g (A, C) times other (C, B), as the forward saw it or anew."""
    if not gemm.reuse_forward:
        return fake(g, gemm.lhs)[0] @ fake(other.t(), gemm.rhs)[0].t()
    values, scale = fake(other, forward)
    if gemm.lhs is None or forward.granularity.pattern(2) != (1, -1):
        return fake(g, gemm.lhs)[0] @ values
    # One scale for each row of `other` goes to the columns of g, before g is quantized.
    return fake(g * scale[:, 0].float(), gemm.lhs)[0] @ (values / scale)


def three_matmuls(x: Tensor, w: Tensor, g: Tensor, spec: TrainingSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(output, grad_input, grad_weight) of matrices, float64."""
    y = fake(x, spec.output.lhs)[0] @ fake(w, spec.output.rhs)[0].t()
    dx = backward_matmul(g, w, spec.grad_input, spec.output.rhs)
    dw = backward_matmul(g.t(), x, spec.grad_weight, spec.output.lhs)
    return y, dx, dw
