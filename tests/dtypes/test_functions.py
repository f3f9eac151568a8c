"""Products and look-ups with a quantized weight and their gradients, against the dequantized weight."""

import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LUTQuantizedTensor, compute_error, config
from qtorch.dtypes import (
    QuantizedTensor,
    deregister_aqt_quantized_linear_dispatch,
    register_aqt_quantized_linear_dispatch,
)
from qtorch.dtypes.linear import multiply
from qtorch.kernels import record_kernels, registry
from tests.dtypes.specs import DTYPES, INT8, LUTS, SPARSE, SPECS, WEIGHT_ONLY, quantized
from tests.refusals import message_of, refuses

pytestmark = pytest.mark.usefixtures("torch_kernels")

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.


def expected(x: torch.Tensor, w: AffineQuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear in fp32 of what the input and the weight become."""
    activation, rows = w.scheme.activation, x.reshape(-1, x.shape[-1])
    x32 = x.float()
    if activation is not None:
        static = w.scheme.spec.static
        scale, zero_point = (w.act_scale, w.act_zero_point) if static else activation.choose_qparams(rows)
        x32 = activation.dequantize(activation.quantize(rows, scale, zero_point), scale, zero_point).reshape(x.shape)
    return functional.linear(x32, w.dequantize(torch.float32), None if bias is None else bias.float())


def linear_kernel(w: QuantizedTensor, dtype: torch.dtype) -> str:
    if isinstance(w, LUTQuantizedTensor):
        return "linear:lut_weight_mm"
    if w.scheme.layout.name == "packed":
        return "linear:packed_weight_mm" if w.scheme.activation is None else "linear:packed_int8_scaled_mm"
    if w.scheme.layout.name == "semi_sparse":
        weight_only = w.scheme.activation is None
        return "linear:semi_sparse_weight_only_mm" if weight_only else "linear:semi_sparse_int8_scaled_mm"
    if w.scheme.layout.name != "plain":  # a layout that is not named here
        return f"linear:{registry.choose(registry.Problem('linear', w.scheme, dtype, 'cpu')).name}"
    if w.scheme.activation is not None:
        return "linear:int8_scaled_mm"
    per_channel = w.scheme.weight.dtype.name == "int8" and tuple(w.scale.shape) == (w.shape[0], 1)
    return "linear:int8_weight_mm" if per_channel and dtype != torch.float32 else "linear:weight_only_mm"


@pytest.fixture
def fallbacks_allowed() -> Iterator[None]:
    with config.patch(strict=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "qtorch: .* reference")
        yield


@pytest.mark.usefixtures("fallbacks_allowed")
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *LUTS])
def test_every_product_in_both_orders(name: str) -> None:
    w = quantized(name)
    d, x, y, v = w.dequantize(), torch.randn(3, 64), torch.randn(32, 3), torch.randn(64)
    bias = torch.randn(32)
    einsum = lambda w: torch.einsum("bk,nk->bn", x, w)  # noqa: E731
    for product in [
        lambda w: x @ w.t(), lambda w: w @ x.t(), lambda w: y.t() @ w, lambda w: torch.matmul(w.t(), y),
        lambda w: torch.matmul(v, w.T), lambda w: w @ v, lambda w: v.matmul(w.mT), lambda w: torch.mm(x, mat2=w.t()),
        lambda w: torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(0)) @ w.t(),
        lambda w: w.mm(x.t()), lambda w: w @ torch.ones(2, 64, 3), lambda w: torch.addmm(bias, x, w.t()),
        lambda w: torch.addmm(torch.ones(3, 32), x, w.t(), beta=0.5, alpha=2), lambda w: bias.addmm(x, w.t()),
        lambda w: torch.addmm(bias * torch.nan, x, w.t(), beta=0, out=torch.empty(3, 32)),
        einsum, lambda w: functional.linear(input=x, weight=w, bias=bias),
    ]:  # fmt: skip
        with record_kernels() as ran:
            got = product(w)
        # einsum puts an axis behind the last one, which a sparse layout cannot have there: it is unpacked.
        plain = name in SPARSE and product is einsum
        assert ran[0] == ("linear:weight_only_mm" if plain else linear_kernel(w, torch.float32))
        torch.testing.assert_close(got, product(d), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("fallbacks_allowed")
@pytest.mark.parametrize("stored", ["(E, N, K)", "(E, K, N)"])
@pytest.mark.parametrize("name", SPECS)
def test_fused_experts(name: str, stored: str) -> None:
    # Static activations and groups along the last axis exist for both orientations; integer kernels for one.
    experts, x = quantized(name, 4, 32, 64), torch.randn(4, 5, 64 if stored == "(E, N, K)" else 32)
    weights = experts.transpose(1, 2) if stored == "(E, N, K)" else experts
    with record_kernels() as ran:
        got = torch.bmm(x, weights)
    by_reference = experts.scheme.activation is not None and stored == "(E, K, N)" and not name.endswith("portable")
    assert ran[0] == ("linear:reference" if by_reference else linear_kernel(experts[0], torch.float32))
    assert len([name for name in ran if name.startswith("linear:")]) == 4
    wanted = torch.stack([expected(x[e], weights[e].t()) for e in range(4)])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x @ weights, got)
    torch.testing.assert_close(torch.stack([x, x]) @ weights, torch.stack([got, got]))
    torch.testing.assert_close(x[1] @ weights, torch.bmm(x[1].expand_as(x), weights))
    torch.testing.assert_close((weights.mT @ x.mT).mT, got)


@pytest.mark.parametrize("name", SPECS)
def test_autocast_casts_the_input_and_nothing_inside_a_kernel(name: str) -> None:
    w, x = quantized(name), torch.randn(5, 64)
    wanted = multiply(x.bfloat16(), w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(functional.linear(x, w), wanted)
        assert torch.equal(torch.compile(functional.linear, fullgraph=True, backend="aot_eager")(x, w), wanted)


def test_what_does_not_fit_says_so() -> None:
    w, experts, x = quantized("int8 row"), quantized("int8 row", 2, 32, 64), torch.randn(3, 64)
    operations = [
        lambda: functional.linear(torch.randn(3, 32), w), lambda: functional.linear(torch.tensor(1.0), w),
        lambda: functional.linear(x, experts), lambda: functional.linear(x.long(), w),
        lambda: functional.linear(x.to("meta"), w), lambda: functional.linear(x, w.to("meta")),
        lambda: functional.linear(w, w), lambda: functional.linear(w, x), lambda: w @ w.t(), lambda: x @ w,
        lambda: x[[0, 1, 2], None] @ experts.mT, lambda: torch.bmm(x[None], experts.mT),
        lambda: torch.bmm(x, w.t()), lambda: torch.mm(x[None], w.t()),
        lambda: functional.embedding(torch.tensor([1]), w.to("meta")),
        lambda: functional.embedding(torch.tensor([1]), w, max_norm=1.0),
    ]  # fmt: skip
    assert_expected_inline(
        "\n".join(map(message_of, operations)),
        """\
ValueError: linear: an input of shape (3, 32) does not fit a weight of shape (32, 64)
ValueError: linear: an input of shape () does not fit a weight of shape (32, 64)
ValueError: linear: an input of shape (3, 64) does not fit a weight of shape (2, 32, 64)
TypeError: linear takes a floating-point input, got torch.int64: input.to(torch.float32)
ValueError: linear: the input is on meta, the weight on cpu
ValueError: linear: the input is on cpu, the weight on meta
TypeError: linear takes a float input and a quantized weight, got AffineQuantizedTensor and AffineQuantizedTensor
TypeError: linear takes a float input and a quantized weight, got AffineQuantizedTensor and Tensor
TypeError: unsupported operand type(s) for @: 'AffineQuantizedTensor' and 'AffineQuantizedTensor'
ValueError: linear: an input of shape (3, 64) does not fit a weight of shape (64, 32)
ValueError: bmm: an input of shape (3, 1, 64) does not fit matrices of shape (2, 64, 32)
ValueError: bmm: an input of shape (1, 3, 64) does not fit matrices of shape (2, 64, 32)
ValueError: bmm: an input of shape (3, 64) does not fit matrices of shape (64, 32)
ValueError: mm takes matrices, got shapes (1, 3, 64) and (64, 32)
ValueError: embedding: the input is on cpu, the weight on meta
ValueError: embedding: max_norm would rewrite the table, and a quantized table is frozen; leave it out""",
    )


def test_a_registered_dispatch_runs_first_until_deregistered() -> None:
    w, x = quantized("int8 row"), torch.randn(3, 64)
    seen = []

    def condition(input: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> bool:
        seen.append((tuple(input.shape), weight is w, bias))
        return weight.scheme.weight == INT8

    register_aqt_quantized_linear_dispatch(condition, lambda input, weight, bias: input.new_full((1,), 42))
    try:
        assert functional.linear(x, w).item() == 42
        assert seen == [((3, 64), True, None)]
        torch.testing.assert_close(functional.linear(x, quantized("uint4 group")).shape, torch.Size([3, 32]))
    finally:
        deregister_aqt_quantized_linear_dispatch(condition)
    assert functional.linear(x, w).shape == (3, 32)
    refuses("not registered", lambda: deregister_aqt_quantized_linear_dispatch(condition))


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def test_derivatives_are_not_quantized_and_those_of_finite_differences() -> None:
    w, x = quantized("int8 row, int8 token"), torch.randn(3, 64, requires_grad=True)
    y = functional.linear(x, w)
    with record_kernels() as ran:
        y.sum().backward()
    assert ran[0] == "linear:weight_only_mm"
    w = AffineQuantizedTensor.from_float(torch.randn(4, 8, dtype=torch.float64), SPECS["int8 row"])
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: functional.linear(x, w).square(), x)
    assert torch.autograd.gradgradcheck(lambda x: functional.linear(x, w).square(), x)


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
    y = torch.utils.checkpoint.checkpoint(again, x.clone().requires_grad_(), w, use_reentrant=False)
    refuses(r"write the product as F\.linear", lambda: y.sum().backward(), NotImplementedError)
