"""Quantized weights inside modules: they behave as any Parameter does."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor, compute_error
from qtorch.kernels import record_kernels
from tests.dtypes.specs import SPECS, quantized

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

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


def test_named_parameters_and_buffers() -> None:
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
def test_a_meta_model_is_filled_by_assignment(name: str) -> None:
    source = tied(name)
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(a=nn.Linear(64, 32), b=nn.Linear(64, 32)))
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model.a.weight, source.a.weight)
    assert model.a.weight.scheme == source.a.weight.scheme
    x = torch.randn(3, 64)
    assert torch.equal(model.b(x), source.b(x))


@all_specs
def test_to_moves_and_converts_and_keeps_ties(name: str) -> None:
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


@all_specs
def test_to_empty(name: str) -> None:
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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_transformer_encoder_layer(mode: type) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    plain = copy.deepcopy(layer)
    for name in ["linear1", "linear2", "self_attn.out_proj"]:
        module, reference = layer.get_submodule(name), plain.get_submodule(name)
        w = AffineQuantizedTensor.from_float(module.weight.detach(), SPECS["int8 row"])
        module.weight = nn.Parameter(w, requires_grad=False)
        reference.weight = nn.Parameter(w.dequantize())
    x: Tensor = torch.randn(2, 5, 64)
    with mode(), record_kernels() as ran:
        assert compute_error(plain(x), layer(x)) > 110
    assert [k for k in ran if k.startswith("linear:")] == ["linear:weight_only_mm"] * 3
