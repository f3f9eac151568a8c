"""torch.compile over quantized weights: one graph, the same numbers, no recompilation for another batch size."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from qtorch import compute_error
from qtorch.kernels import record_kernels
from tests.dtypes.specs import LUTS, SPECS, quantized

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")


class MLP(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.up.weight = nn.Parameter(quantized(name, 128, 64), requires_grad=False)
        self.down.weight = nn.Parameter(quantized(name, 64, 128), requires_grad=False)
        self.table = nn.Embedding.from_pretrained(quantized(name, 32, 64))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.table(ids) + x)))


def run(function, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(ids, x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return y.detach(), x.grad


QUICK = ("uint4 group", "int8 row, int8 token", "float8 row, 2:4", "nf4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in [*SPECS, *LUTS]]
)
def test_one_graph_forward_and_backward(name: str) -> None:
    model, ids, x = MLP(name), torch.tensor([3, 0, 31]), torch.randn(3, 64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for got, wanted in zip(run(compiled, ids, x), run(model, ids, x)):
        assert compute_error(wanted, got) > 110
    with torch.no_grad():
        assert compute_error(model(ids, x), compiled(ids, x)) > 110


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operator"),
    [("uint4 group", "weight_only_mm"), ("nf4", "lut_weight_mm"), ("int8 row, int8 token", "int_matmul")],
)
def test_inductor(name: str, operator: str) -> None:
    model, ids, x = MLP(name), torch.tensor([3, 0, 31]), torch.randn(3, 64)
    compiled = torch.compile(model, fullgraph=True)
    run(compiled, ids, x)
    with record_kernels() as ran:
        got = run(compiled, ids, x)
    assert operator in ran
    for a, b in zip(got, run(model, ids, x)):
        # A code may round the other way after a fused multiplication.
        assert compute_error(b, a) > 35
    with torch.inference_mode():
        assert compute_error(model(ids, x), compiled(ids, x)) > 35


@pytest.mark.parametrize("name", [pytest.param("int8 row", marks=pytest.mark.slow), "int8 row, int8 token"])
def test_another_batch_size_does_not_recompile(name: str) -> None:
    model = MLP(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compiled(torch.tensor([1, 2]), torch.randn(2, 64))
    compilations = counter.frame_count
    for batch in [3, 200]:
        ids, x = torch.arange(batch) % 32, torch.randn(batch, 64)
        assert compute_error(model(ids, x), compiled(ids, x)) > 100
    assert counter.frame_count == compilations


def test_other_values_of_the_same_scheme_do_not_recompile() -> None:
    model, ids, x = MLP("int8 row"), torch.tensor([3, 0, 31]), torch.randn(3, 64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    compiled(ids, x)
    model.load_state_dict(MLP("int8 row").state_dict())
    assert compute_error(model(ids, x), compiled(ids, x)) > 110
    assert counter.frame_count == 1
    model.load_state_dict(MLP("uint4 group").state_dict(), assign=True)
    assert compute_error(model(ids, x), compiled(ids, x)) > 110
    assert counter.frame_count == 2


def test_views_products_and_autocast_inside_a_graph() -> None:
    experts, w = quantized("uint4 group", 4, 32, 64), quantized("int8 row")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            half = functional.linear(x[0], w)
        return torch.bmm(x, experts.mT), x[0] @ w[8:].t(), half, w[:8].dequantize()

    x = torch.randn(4, 3, 64)
    batched, sliced, half, values = compiled(x)
    assert compute_error(x @ experts.dequantize().mT, batched) > 110
    assert compute_error(x[0] @ w.dequantize()[8:].t(), sliced) > 110
    assert half.dtype == torch.bfloat16
    assert torch.equal(values, w.dequantize()[:8])


def test_multihead_attention_in_one_graph() -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    attention.in_proj_weight = nn.Parameter(quantized("int8 row", 192, 64), requires_grad=False)
    attention.out_proj.weight = nn.Parameter(quantized("int8 row", 64, 64), requires_grad=False)
    x = torch.randn(2, 5, 64) * 0.1
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert compute_error(attention(x, x, x)[0], compiled(x, x, x)[0]) > 100
