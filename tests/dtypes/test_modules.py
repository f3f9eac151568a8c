"""Quantized weights inside modules: they behave as any Parameter does, compiled too."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from qtorch import AffineQuantizedTensor, compute_error
from qtorch.kernels import record_kernels
from tests.dtypes.specs import LUTS, SPECS, quantized

pytestmark = pytest.mark.usefixtures("torch_kernels")

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.

all_specs = pytest.mark.parametrize("name", SPECS)
some_specs = pytest.mark.parametrize("name", ["int8 row", "uint4 group", "int8 row, static int8"])


def linear(name: str, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(64, 32, bias=bias)
    layer.weight = nn.Parameter(quantized(name), requires_grad=False)
    return layer


def tied(name: str) -> nn.Sequential:
    """Two layers of one weight."""
    model = nn.Sequential(OrderedDict(a=linear(name), b=linear(name)))
    model.b.weight = model.a.weight
    return model


def test_names_and_values_of_one_scheme() -> None:
    model = tied("int8 row")
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias", "b.bias"]
    assert list(model.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert isinstance(model.state_dict()["a.weight"], AffineQuantizedTensor)
    assert sum(p.numel() for p in model.parameters()) == 32 * 64 + 64
    module = nn.Module()
    module.register_buffer("table", quantized("uint4 group"))
    values = module.table.dequantize()
    assert module.half().table.dtype == torch.float16
    assert torch.equal(module.float().state_dict()["table"].dequantize(), values)
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


@some_specs
def test_hooks(name: str) -> None:
    layer, x, seen = linear(name), torch.randn(3, 64, requires_grad=True), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("pre") or (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: seen.append("post") or output + 1)
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append("backward"))
    y = layer(x)
    y.sum().backward()
    assert seen == ["pre", "post", "backward"]
    assert torch.equal(y, nn.functional.linear(2 * x, layer.weight, layer.bias) + 1)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_checks_keys_and_shapes(assign: bool) -> None:
    source, target = linear("int8 row").state_dict(), linear("int8 row")
    for state in [
        {"weight": source["weight"]},
        {**source, "extra": source["bias"]},
        {**source, "weight": quantized("int8 row", 16, 64)},
    ]:
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|size mismatch for weight"):
            target.load_state_dict(state, assign=assign)
    result = target.load_state_dict({"weight": source["weight"]}, strict=False, assign=assign)
    assert result.missing_keys == ["bias"]


@all_specs
def test_moves_convert_keep_ties_and_to_empty(name: str) -> None:
    model = tied(name)
    values = model.a.weight.dequantize()
    assert model.half() is model
    assert model.a.weight.dtype == model.a.bias.dtype == torch.float16
    assert model.a(torch.randn(2, 64).half()).dtype == torch.float16
    model.to(torch.bfloat16).float()
    assert torch.equal(model.a.weight.dequantize(), values)
    assert model.a.weight is model.b.weight
    assert isinstance(model.a.weight, nn.Parameter)
    assert not model.a.weight.requires_grad
    model.to("meta")
    assert model.a.weight.is_meta
    assert model.a.weight is model.b.weight
    model = tied(name).to("meta")
    scheme = model.a.weight.scheme
    model.to_empty(device="cpu")
    assert (model.a.weight.scheme, model.a.weight.device.type) == (scheme, "cpu")
    source = tied(name)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.b.weight, source.a.weight)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", ["int8 row", "uint4 group", "int8 row, int8 token"])
def test_multihead_attention(name: str, batch_first: bool) -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=batch_first).eval()
    for module, attribute in [(attention, "in_proj_weight"), (attention.out_proj, "weight")]:
        w = AffineQuantizedTensor.from_float(getattr(module, attribute).detach(), SPECS[name])
        setattr(module, attribute, nn.Parameter(w, requires_grad=False))
    plain = copy.deepcopy(attention)
    plain.in_proj_weight = nn.Parameter(attention.in_proj_weight.dequantize())
    plain.out_proj.weight = nn.Parameter(attention.out_proj.weight.dequantize())
    x, memory = torch.randn(5, 3, 64, requires_grad=True), torch.randn(5, 3, 64)
    for arguments, products in [((x, x, x), 2), ((x, memory, memory), 3), ((x, memory, x), 4)]:
        for mode in [torch.enable_grad(), torch.no_grad(), torch.inference_mode()]:
            with mode:
                wanted = plain(*arguments)[0]
                with record_kernels() as ran:
                    got = attention(*arguments)[0]
            kernel = "linear:int8_scaled_mm" if "token" in name else "linear:weight_only_mm"
            assert [k for k in ran if k.startswith("linear:")] == [kernel] * products
            assert compute_error(wanted, got) > (25 if "token" in name else 110)
    (got,) = torch.autograd.grad(attention(x, x, x)[0].square().sum(), x)
    (wanted,) = torch.autograd.grad(plain(x, x, x)[0].square().sum(), x)
    assert compute_error(wanted, got) > (25 if "token" in name else 100)


# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.


class MLP(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.up.weight = nn.Parameter(quantized(name, 128, 64), requires_grad=False)
        self.down.weight = nn.Parameter(quantized(name, 64, 128), requires_grad=False)
        self.table = nn.Embedding.from_pretrained(quantized(name, 32, 64))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.table(ids) + x)))


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


def test_views_products_attention_and_autocast_inside_a_graph() -> None:
    experts, w = quantized("uint4 group", 4, 32, 64), quantized("int8 row")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            half = nn.functional.linear(x[0], w)
        return torch.bmm(x, experts.mT), x[0] @ w[8:].t(), half, w[:8].dequantize()

    x = torch.randn(4, 3, 64)
    batched, sliced, half, values = compiled(x)
    assert compute_error(x @ experts.dequantize().mT, batched) > 110
    assert compute_error(x[0] @ w.dequantize()[8:].t(), sliced) > 110
    assert half.dtype == torch.bfloat16
    assert torch.equal(values, w.dequantize()[:8])
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    attention.in_proj_weight = nn.Parameter(quantized("int8 row", 192, 64), requires_grad=False)
    attention.out_proj.weight = nn.Parameter(quantized("int8 row", 64, 64), requires_grad=False)
    x = torch.randn(2, 5, 64) * 0.1
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert compute_error(attention(x, x, x)[0], compiled(x, x, x)[0]) > 100
