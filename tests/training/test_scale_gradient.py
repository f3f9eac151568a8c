"""The gradient of a dynamic scale against autograd through the same fake quantization in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtorch import PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, compute_error
from qtorch.primitives import Granularity
from qtorch.primitives.granularity import BlockView
from qtorch.training import GemmSpec, MasterWeight, TrainingSpec
from qtorch.training.engine.contraction import contraction
from qtorch.training.engine.numerics import int8, integer


def fake(x: Tensor, spec: QuantSpec) -> Tensor:
    """s round(x / s), s = absmax / Q, rounding straight through, the scale differentiable."""
    view = BlockView(x.shape, spec.block_size(x.shape))
    blocks = view.split(x)
    scale = blocks.abs().amax(view.dims, keepdim=True) / spec.code_range[1]
    ratio = blocks / scale
    return view.merge(scale * (ratio + (ratio.round() - ratio).detach()))


def operand_gradients(
    x: Tensor, w: Tensor, g: Tensor, spec: TrainingSpec, wrapped: bool = False
) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    weight = torch.nn.Parameter(MasterWeight.of(w.clone(), spec) if wrapped else w.clone())
    contraction(x, weight, spec).backward(g)
    return x.grad, weight.grad


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor(), PerGroup(8), PerBlock((4, 8))], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_against_autograd(granularity: Granularity, wrapped: bool) -> None:
    gemm = GemmSpec(int8(granularity), integer(4, granularity))
    x, w, g = torch.randn(12, 16), torch.randn(8, 16), torch.randn(12, 8)
    got = operand_gradients(x, w, g, TrainingSpec(gemm, scale_gradient=True), wrapped)
    without = operand_gradients(x, w, g, TrainingSpec(gemm), wrapped)
    # The backward matmuls of this spec are in full precision: they multiply by values, not by codes.
    for mine, plain, operand, other, incoming, spec in (
        (got[0], without[0], x, w, g, gemm.lhs),
        (got[1], without[1], w, x, g.t(), gemm.rhs),
    ):
        exact = operand.double().requires_grad_()
        (fake(exact, spec) @ other.double().t()).backward(incoming.double())
        assert compute_error(exact.grad, mine.double()) > 100
        assert compute_error(exact.grad, plain.double()) < 70


def test_rows_that_do_not_fill_blocks() -> None:
    spec = int8(PerBlock((4, 8)))
    x, w, g = torch.randn(5, 16), torch.randn(8, 16), torch.randn(5, 8)
    got = operand_gradients(x, w, g, TrainingSpec(GemmSpec(spec, spec), scale_gradient=True))[0]
    completed = operand_gradients(
        torch.nn.functional.pad(x, (0, 0, 0, 3)),
        w,
        torch.nn.functional.pad(g, (0, 0, 0, 3)),
        TrainingSpec(GemmSpec(spec, spec), scale_gradient=True),
    )[0]
    torch.testing.assert_close(got, completed[:5])
