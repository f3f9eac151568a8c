"""Gradients pass through a frozen quantized weight as through its dequantized values; it has none of its own."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from qtorch import AffineQuantizedTensor, compute_error
from qtorch.kernels import record_kernels
from tests.dtypes.specs import DTYPES, LUTS, SPECS, WEIGHT_ONLY, quantized

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed linear combination of the outputs, so that they do not depend on how an input was rounded."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y = function(*inputs)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return tuple(x.grad for x in inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*SPECS, *LUTS])
def test_input_and_bias(name: str, dtype: torch.dtype) -> None:
    w = quantized(name, dtype=dtype)
    d, x, bias = w.dequantize(), torch.randn(2, 3, 64, dtype=dtype), torch.randn(32, dtype=dtype)
    got = gradients(lambda x, b: functional.linear(x, w, b).float(), x, bias)
    wanted = gradients(lambda x, b: functional.linear(x, d, b).float(), x, bias)
    for a, b in zip(got, wanted):
        assert a.dtype == dtype
        assert compute_error(b, a) > {torch.float32: 120, torch.float16: 60, torch.bfloat16: 42}[dtype]


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *LUTS])
def test_every_product(name: str) -> None:
    w, experts = quantized(name), quantized(name, 2, 32, 64)
    x, xe = torch.randn(3, 64), torch.randn(2, 3, 64)
    for product, q, input in [
        (lambda x, w: x @ w.t(), w, x),
        (lambda x, w: w @ x.t(), w, x),
        (lambda x, w: torch.addmm(torch.ones(32), x, w.t()), w, x),
        (lambda x, w: torch.bmm(x, w.mT), experts, xe),
        (lambda x, w: torch.einsum("bk,nk->bn", x, w), w, x),
        (lambda x, w: torch.matmul(x[0], w.t()), w, x),
    ]:
        got = gradients(lambda x, product=product, q=q: product(x, q), input)
        wanted = gradients(lambda x, product=product, q=q: product(x, q.dequantize()), input)
        torch.testing.assert_close(got, wanted)


def test_the_backward_of_a_dynamic_activation_is_not_quantized() -> None:
    w, x = quantized("int8 row, int8 token"), torch.randn(3, 64, requires_grad=True)
    y = functional.linear(x, w)
    with record_kernels() as ran:
        y.sum().backward()
    assert ran[0] == "linear:weight_only_mm"


def test_first_and_second_derivatives_are_those_of_finite_differences() -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(4, 8, dtype=torch.float64), SPECS["int8 row"])
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: functional.linear(x, w).square(), x)
    assert torch.autograd.gradgradcheck(lambda x: functional.linear(x, w).square(), x)


def test_only_the_bias_requires_grad() -> None:
    w, bias = quantized("int8 row"), torch.zeros(32, requires_grad=True)
    functional.linear(torch.randn(2, 3, 64), w, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((32,), 6.0))


@pytest.mark.parametrize("name", [name for name in SPECS if name not in WEIGHT_ONLY])
def test_products_whose_gradient_would_be_quantized(name: str) -> None:
    """torch would send the gradient through the quantization that is the input's: with a static scale it is clipped."""
    w, experts, x = quantized(name), quantized(name, 2, 32, 64), torch.randn(3, 64)
    for equation, weight, lhs in [
        ("bk,nk->bn", w, x),
        ("nk,bk->nb", w, x),
        ("bk,enk->ebn", experts, x),
        ("ebk,enk->ebn", experts, torch.stack([x, 2 * x])),
    ]:
        order = (lambda a, b: (b, a)) if equation.startswith("nk") else (lambda a, b: (a, b))
        got = gradients(lambda x, e=equation, q=weight, o=order: torch.einsum(e, *o(x, q)), lhs)
        wanted = gradients(lambda x, e=equation, q=weight.dequantize(), o=order: torch.einsum(e, *o(x, q)), lhs)
        torch.testing.assert_close(got, wanted)
    assert compute_error(functional.linear(x, w), torch.einsum("bk,nk->bn", x, w)) > 100
    # Products below autograd, whose gradients torch makes of products with the same weight.
    got = gradients(lambda x: torch.tensordot(x, w, ([1], [1])), x)
    torch.testing.assert_close(got, gradients(lambda x: torch.tensordot(x, w.dequantize(), ([1], [1])), x))
    again = functools.partial(torch.tensordot, dims=([1], [1]))
    y = checkpoint(again, x.clone().requires_grad_(), w, use_reentrant=False)
    with pytest.raises(NotImplementedError, match=r"write the product as F\.linear"):
        y.sum().backward()
